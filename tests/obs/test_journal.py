"""The journal on its way to the file."""

import os
import stat

import pytest

from serve.core.events import LaneReady
from serve.core.types import LaneId, Nanos, TaskId
from serve.errors import ConfigError
from serve.journal import AnswerLeft, Step, decode
from serve.obs import journal
from serve.obs.journal import JournalWriter
from tests.builders import params


def test_what_was_told_before_closing_is_in_the_file_in_order(tmp_path):
    path = tmp_path / "journal.jsonl"
    writer = JournalWriter(path)
    writer.begin(params())
    for lane in range(500):
        writer.step(Nanos(lane), LaneReady(LaneId(lane)), [])
    writer.left(900, TaskId(7))
    writer.close()
    writer.close()
    with path.open("rb") as lines:
        found = decode(lines)
    steps = [Step(Nanos(lane), LaneReady(LaneId(lane)), b"[]") for lane in range(500)]
    assert found.rows == (*steps, AnswerLeft(Nanos(900), TaskId(7)))


def test_a_new_journal_is_for_its_owner_alone(tmp_path):
    path, before = tmp_path / "journal.jsonl", os.umask(0)
    try:
        JournalWriter(path).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        JournalWriter(tmp_path / "missing" / "journal.jsonl")


def test_a_disk_that_does_not_keep_up_ends_the_journal_and_not_the_server(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(journal, "MAX_WAITING", 0)
    writer = JournalWriter(tmp_path / "journal.jsonl")
    writer.begin(params())
    for lane in range(3):
        writer.step(Nanos(lane), LaneReady(LaneId(lane)), [])
    writer.close()
    assert caplog.text.count("ends here") == 1
    with writer.path.open("rb") as lines:
        assert decode(lines).rows == ()


def test_a_journal_ends_before_it_is_too_large(tmp_path, caplog):
    path = tmp_path / "journal.jsonl"
    writer = JournalWriter(path, 5000)
    writer.begin(params())
    for lane in range(500):
        writer.step(Nanos(lane), LaneReady(LaneId(lane)), [])
    writer.close()
    assert caplog.text.count("ends here: it has reached report.journal_size") == 1
    with path.open("rb") as lines:
        found = decode(lines)
    steps = [Step(Nanos(lane), LaneReady(LaneId(lane)), b"[]") for lane in range(500)]
    assert found.rows == tuple(steps[: len(found.rows)])
    assert 0 < len(found.rows) < 500
    # The header is not counted.
    assert sum(map(len, path.read_bytes().splitlines(keepends=True)[1:])) <= 5000


def test_a_disk_that_fails_ends_the_journal_and_not_the_server(tmp_path, caplog):
    full = tmp_path / "journal.jsonl"
    full.symlink_to("/dev/full")
    writer = JournalWriter(full)
    writer.begin(params())
    writer.step(Nanos(1), LaneReady(LaneId(0)), [])
    writer.close()
    assert caplog.text.count("ends here: No space left") == 1
