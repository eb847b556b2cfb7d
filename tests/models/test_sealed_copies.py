"""A server's copies of a version's files: like the files, sealed, and refused when torn."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from serve.errors import NotReady
from serve.lane.models.loader import load_model
from serve.models import sealed_copies
from serve.models.repository import ModelSpec, find
from serve.models.sealed_copies import SealedCopies

CODE = "import torch\n\n\ndef build():\n    return torch.nn.Linear(2, 2)\n"


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "models" / "m"
    (found / "1").mkdir(parents=True)
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, weights_of(found))
    (found / "model.py").write_text(CODE)
    (found / "config.toml").write_text('[model]\nfactory = "./model.py:build"\n')
    return found


def weights_of(folder):
    return folder / "1" / "weights.safetensors"


def overwrite(path, data):
    """In place, as `cp` does."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def copies_held():
    """Memory files of this process that hold models."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += "gnnserve-model" in str(entry.readlink())
        except OSError:
            continue  # the one that lists them
    return found


@pytest.fixture
def spec(folder) -> ModelSpec:
    return find(folder.parent, "m")


def test_a_model_loads_from_copies_as_from_its_files(folder, spec):
    copies = SealedCopies(spec)
    expected = {name: value.clone() for name, value in load_model(spec).module.named_parameters()}
    overwrite(weights_of(folder), b"")
    overwrite(folder / "model.py", b"raise RuntimeError\n")
    loaded = load_model(copies.spec).module
    copies.close()
    for name, value in loaded.named_parameters():
        assert torch.equal(value, expected[name])


def test_copies_cannot_be_written_to(spec):
    copies = SealedCopies(spec)
    try:
        for place in (copies.spec.copied_weights, copies.spec.copied_source):
            fd = os.open(place, os.O_RDWR)
            try:
                with pytest.raises(PermissionError):
                    os.pwrite(fd, b"x", 0)
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, 0)
            finally:
                os.close(fd)
    finally:
        copies.close()


@pytest.mark.parametrize("size", ["the same", "shorter"])
def test_a_file_that_is_written_to_while_it_is_copied_is_refused(folder, spec, monkeypatch, size):
    path = weights_of(folder)
    sendfile = os.sendfile

    def interrupted(*arguments):
        data = path.read_bytes()
        overwrite(path, data if size == "the same" else data[:-4])
        os.utime(path, ns=(0, 0))
        return sendfile(*arguments)

    monkeypatch.setattr(sealed_copies.os, "sendfile", interrupted)
    before = copies_held()
    with pytest.raises(NotReady, match=r"weights\.safetensors: was written to while it was read"):
        SealedCopies(spec)
    assert copies_held() == before


def test_without_memory_for_a_copy_the_version_is_refused(spec, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sealed_copies.os, "sendfile", full)
    before = copies_held()
    with pytest.raises(NotReady, match="cannot be copied: No space left on device"):
        SealedCopies(spec)
    assert copies_held() == before
