"""The access log: what a line says, who gets one, and what the file may go through."""

import json
import os
import stat

import pytest

from serve.errors import ConfigError
from serve.obs import access_log
from serve.obs.access_log import AccessLog
from tests.obs.builders import MS, START_UNIX_NS, record


def lines(path):
    """Return the objects of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(log, *records):
    """Write the lines of requests that ended together."""
    for one in records:
        log.write(one)
    log.flush()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "access.jsonl"


@pytest.fixture
def log(path, monkeypatch):
    monkeypatch.setattr(access_log, "_LOOK_NS", 0)
    log = AccessLog(path, 1.0)
    yield log
    log.close()
    log.close()


def test_a_line_has_what_people_search_for(log, path):
    write(log, record(tenant="a", client_id='"x"\n', qos_target_ns=20 * MS, status="OK"))
    [line] = lines(path)
    assert line == {
        "time": "2026-09-21T14:13:20.010Z",
        "uid": "r1",
        "client_id": '"x"\n',
        "model": "gcn",
        "version": "1",
        "tenant": "a",
        "status": "OK",
        "nodes": 1000,
        "edges": 8000,
        "latency_ms": 10.0,
        "target_ms": 20.0,
        "queue_ms": 2.0,
        "prepare_ms": 1.0,
        "run_ms": 7.0,
        "lane": 0,
    }
    assert START_UNIX_NS // 10**9 == 1_790_000_000  # the time above


def test_only_this_user_may_read_it(log, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_those_in_time_and_all_others_get_a_line(path, share):
    log = AccessLog(path, share)
    for number in range(2000):
        log.write(record(f"in-time-{number}"))
        if number % 100 == 0:
            log.write(record(f"late-{number}", violated=True, cause="queue"))
            log.write(record(f"failed-{number}", status="UNAVAILABLE", reason="overload"))
    log.close()
    kinds = [line["uid"].rsplit("-", 1)[0] for line in lines(path)]
    assert kinds.count("late") == kinds.count("failed") == 20
    assert kinds.count("in-time") == pytest.approx(2000 * share, abs=120)


def test_the_same_requests_get_a_line_in_every_process(tmp_path):
    chosen = []
    for name in ("a", "b"):
        log = AccessLog(tmp_path / name, 0.5)
        for number in range(100):
            log.write(record(f"{number}"))
        log.close()
        chosen.append([line["uid"] for line in lines(tmp_path / name)])
    assert chosen[0] == chosen[1]


def test_it_goes_on_in_a_new_file_when_the_old_one_is_moved_or_removed(log, path):
    write(log, record("first"))
    path.rename(moved := path.with_suffix(".1"))
    write(log, record("second"))
    path.unlink()
    write(log, record("third"))
    assert [line["uid"] for line in lines(moved)] == ["first"]
    assert [line["uid"] for line in lines(path)] == ["third"]


def test_it_goes_on_in_a_file_that_was_emptied(log, path):
    write(log, record("first"))
    os.truncate(path, 0)
    write(log, record("second"))
    assert [line["uid"] for line in lines(path)] == ["second"]


def test_it_adds_to_what_is_there(log, path):
    write(log, record("first"))
    write(AccessLog(path, 1.0), record("second"))
    assert [line["uid"] for line in lines(path)] == ["first", "second"]


def test_lines_that_a_full_disk_does_not_take_are_counted_and_told_once(caplog):
    log = AccessLog(access_log.Path("/dev/full"), 1.0)
    write(log, record())
    write(log, record(), record())
    assert log.lost == 3
    assert [entry.message for entry in caplog.records] == [
        "access log /dev/full: lines are lost: No space left on device"
    ]
    log.close()


def test_lines_of_requests_that_ended_together_are_written_at_once(log, path, monkeypatch):
    calls = []
    monkeypatch.setattr(access_log.os, "write", lambda fd, data: calls.append(data) or len(data))
    write(log, *(record(str(number)) for number in range(5)))
    log.flush()
    assert [json.loads(line)["uid"] for line in calls[0].splitlines()] == [*"01234"]
    assert len(calls) == 1


def test_what_waits_is_bounded_and_written_when_the_log_is_closed(log, path):
    log.write(record("first"))
    assert not lines(path)
    for number in range(1000):
        log.write(record(str(number)))
    assert 0 < len(lines(path)) < 1001
    log.close()
    assert len(lines(path)) == 1001


@pytest.mark.parametrize(("room", "whole"), [(10, 0), (300, 1), (10**6, 3)])
def test_a_file_that_takes_a_part_has_whole_lines_and_the_others_are_counted(
    log, path, monkeypatch, room, whole
):
    really = os.write
    monkeypatch.setattr(access_log.os, "write", lambda fd, data: really(fd, bytes(data)[:room]))
    write(log, record("a"), record("b"), record("c"))
    monkeypatch.undo()
    write(log, record("d"))
    kept = path.read_text().splitlines()
    whole_ones = [json.loads(line)["uid"] for line in kept if line.endswith("}")]
    assert whole_ones == [*"abc"[:whole], "d"]
    assert log.lost == 3 - whole


def test_a_place_that_cannot_be_written_is_refused_with_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r"report\.access_log: .*cannot be written"):
        AccessLog(tmp_path / "missing" / "access.jsonl", 1.0)
