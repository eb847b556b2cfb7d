"""A fork server outlives forks that fail while the system has no room for one more process."""

import errno
import os

import pytest

from serve.lane.patient_fork import fork_patiently

NO_ROOM = BlockingIOError(errno.EAGAIN, "no room")


@pytest.fixture
def forks(monkeypatch):
    """Results of the system's forks, in order; the last one again and again."""
    results = []

    def fork():
        found = results.pop(0) if len(results) > 1 else results[0]
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(os, "register_at_fork", lambda **functions: None)
    monkeypatch.setattr("serve.lane.patient_fork._EVERY_S", 0.0)
    fork_patiently()
    return results


def test_a_fork_is_tried_until_there_is_room(forks):
    forks += [NO_ROOM, NO_ROOM, 17]
    assert os.fork() == 17


def test_a_fork_is_not_tried_for_ever(forks, monkeypatch):
    monkeypatch.setattr("serve.lane.patient_fork._MOST_S", 0.01)
    forks.append(NO_ROOM)
    with pytest.raises(BlockingIOError):
        os.fork()


def test_a_child_forks_as_usual():
    usual = os.fork
    fork_patiently()
    try:
        pid = os.fork()
        if not pid:
            os._exit(os.fork is not usual)
    finally:
        os.fork = usual
    assert os.waitpid(pid, 0)[1] == 0
