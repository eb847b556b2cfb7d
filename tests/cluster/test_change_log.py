"""The log of changes: what it keeps, over restarts and torn writes, and what it refuses."""

import os

import pytest

from serve.cluster.change_log import MOST_RECORD_BYTES, ChangeLog
from serve.errors import ConfigError, NotReady, TooBig

RECORDS = [b"first", b"", b"third" * 10]


def written(file, records=RECORDS):
    log = ChangeLog(file, 1 << 20)
    for record in records:
        log.append(record)
    log.close()
    return file.read_bytes()


def read(file):
    log = ChangeLog(file, 1 << 20)
    found = list(log.records(0, 1 << 20))
    log.close()
    return found


def test_what_is_written_is_there_after_a_restart(tmp_path):
    file = tmp_path / "log"
    written(file)
    assert read(file) == RECORDS
    written(file, [b"more"])
    assert read(file) == [*RECORDS, b"more"]
    assert file.stat().st_mode & 0o777 == 0o600


def test_records_come_as_many_as_are_asked_for(tmp_path):
    written(tmp_path / "log")
    log = ChangeLog(tmp_path / "log", 1 << 20)
    assert list(log.records(0, 5)) == RECORDS[:2]
    assert list(log.records(0, 0)) == RECORDS[:1]
    assert list(log.records(1, 1 << 20)) == RECORDS[1:]
    assert list(log.records(3, 1 << 20)) == []
    log.close()


@pytest.mark.parametrize("zeros", [0, 40])
def test_a_change_that_was_not_written_to_its_end_is_cut(tmp_path, zeros):
    file = tmp_path / "log"
    whole = written(file)
    two = len(written(tmp_path / "two", RECORDS[:2]))
    for size in range(two, len(whole)):
        if zeros and size > two:
            continue
        file.write_bytes(whole[:size] + bytes(zeros))
        assert read(file) == RECORDS[:2]
        assert len(file.read_bytes()) == two
    for size in range(len(b"gnnserve changes 1\n")):
        file.write_bytes(whole[:size])
        assert read(file) == []


def test_a_damaged_log_is_refused_and_left_as_it_is(tmp_path):
    file = tmp_path / "log"
    whole = written(file)
    at = whole.index(b"first")
    damaged = whole[:at] + b"F" + whole[at + 1 :]
    file.write_bytes(damaged)
    with pytest.raises(ConfigError, match="log: change 1, at byte 19, is damaged"):
        read(file)
    assert file.read_bytes() == damaged
    file.write_bytes(b"notes of mine")
    with pytest.raises(ConfigError, match="it is no log of changes"):
        read(file)
    with pytest.raises(ConfigError, match="Is a directory"):
        read(tmp_path)


def test_two_servers_do_not_write_one_log(tmp_path):
    log = ChangeLog(tmp_path / "log", 1 << 20)
    with pytest.raises(ConfigError, match="another server writes it"):
        read(tmp_path / "log")
    log.close()
    assert read(tmp_path / "log") == []


def test_a_full_log_takes_nothing_more(tmp_path):
    log = ChangeLog(tmp_path / "log", 100)
    log.append(b"x" * 40)
    with pytest.raises(TooBig, match="the log of changes is full: 79 of 100 bytes"):
        log.append(b"y" * 10)
    log.append(b"z")
    with pytest.raises(TooBig, match="send it as several"):
        log.append(bytes(MOST_RECORD_BYTES + 1))
    assert list(log.records(0, 1 << 20)) == [b"x" * 40, b"z"]
    log.close()


def test_a_change_that_the_disk_does_not_take_is_not_in_the_log(tmp_path, monkeypatch):
    log = ChangeLog(tmp_path / "log", 1 << 20)
    log.append(b"first")
    real = os.pwrite

    def half(descriptor, data, at):
        real(descriptor, data[: len(data) // 2], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(NotReady, match="No space left"):
        log.append(b"second")
    monkeypatch.undo()
    log.append(b"third")
    assert list(log.records(0, 1 << 20)) == [b"first", b"third"]
    log.close()
    assert read(tmp_path / "log") == [b"first", b"third"]
