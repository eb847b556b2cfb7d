"""Files are replaced whole or not at all."""

import os

import pytest

from serve.files import replace_file


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_file_that_cannot_be_replaced_stays_and_nothing_lies_beside_it(
    tmp_path, monkeypatch, step
):
    def fails(*_):
        raise OSError("the disk is broken")

    file = tmp_path / "known.json"
    replace_file(file, b"one")
    monkeypatch.setattr(os, step, fails)
    with pytest.raises(OSError, match="the disk is broken"):
        replace_file(file, b"two")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [
        ("known.json", b"one")
    ]


def test_what_is_renamed_is_on_the_disk_before(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda one: done.append(os.fstat(one).st_size) or sync(one))
    monkeypatch.setattr(os, "replace", lambda *names: done.append("renamed") or replace(*names))
    replace_file(tmp_path / "file", b"three")
    assert done == [5, "renamed"]
