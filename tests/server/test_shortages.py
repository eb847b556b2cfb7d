"""Lanes come back though the system had no threads, processes or descriptors when they ended."""

import errno
import os
import socket
import threading
from multiprocessing.context import ForkServerProcess
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from bench.kit.waiting import eventually
from serve.server.lanes import processes
from serve.server.lanes.restarts import Restarts

ROLE = "a lane"


class Shortage:
    """Starts of processes that fail with the next of the errors, if there is one."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.reaped = SimpleQueue()
        self.woken = threading.Event()

    def start(self, role):
        assert role == ROLE
        if self.errors:
            raise self.errors.pop(0)
        return "a process", []


@pytest.fixture
def shortage(monkeypatch):
    found = Shortage()
    fake = SimpleNamespace(reap=lambda process: found.reaped.put(process) or "signal 9")
    monkeypatch.setattr("serve.server.lanes.restarts.processes", fake)
    return found


@pytest.fixture
def restarts(shortage):
    found = Restarts(shortage.start, shortage.woken.set)
    found.began(ROLE, "lane 0")
    yield found
    found.end()


def test_a_process_is_restarted_though_no_thread_can_be_started(shortage, restarts, monkeypatch):
    def none_left(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    for number in range(2):
        restarts.restart(ROLE, number)
        eventually(lambda: shortage.woken.is_set())
        shortage.woken.clear()
        assert restarts.taken() == [(ROLE, ("a process", []))]
        assert shortage.reaped.get() == number


def test_a_process_is_restarted_though_memory_fails_as_the_one_before_is_reaped(
    shortage, restarts, monkeypatch
):
    def no_memory(process):
        shortage.reaped.put(process)
        raise MemoryError

    monkeypatch.setattr("serve.server.lanes.restarts.processes", SimpleNamespace(reap=no_memory))
    for number in range(2):
        restarts.restart(ROLE, number)
        eventually(lambda: shortage.woken.is_set())
        shortage.woken.clear()
        assert restarts.taken() == [(ROLE, ("a process", []))]
        assert shortage.reaped.get() == number


@pytest.mark.parametrize(
    "errors",
    [
        [RuntimeError("can't start new thread")] * 2,
        [OSError(24, "too many open files"), BlockingIOError(11, "no processes")],
        [MemoryError()],
        [EOFError()],
    ],
    ids=["threads", "descriptors", "memory", "fork server"],
)
def test_a_start_that_fails_for_a_shortage_is_tried_again_soon(
    shortage, restarts, errors, monkeypatch
):
    monkeypatch.setattr("serve.server.lanes.restarts._BACK_OFF_MOST_NS", 10**15)
    shortage.errors, tries = list(errors), len(errors) + 1
    restarts.restart(ROLE, "process")
    eventually(lambda: shortage.woken.is_set())
    assert restarts.taken() == [(ROLE, ("a process", []))]
    assert restarts.count == tries


@pytest.fixture
def starts(monkeypatch):
    """Starts that fail as the next error says; what the fork server is told is noted."""
    found = SimpleNamespace(error=None, told=[], setup=SimpleNamespace(name="lane 0"))

    def start(process):
        found.told.append("start")
        if found.error is not None:
            raise found.error

    monkeypatch.setattr(ForkServerProcess, "start", start)
    monkeypatch.setattr(processes.forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr(processes.resource_tracker, "ensure_running", lambda: None)
    monkeypatch.setattr(processes, "kill_all", lambda: found.told.append("kill"))
    before = open_files()
    yield found
    assert open_files() == before


def open_files():
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def file():
    with socket.socket() as one:
        yield one.fileno()


def test_a_start_without_descriptors_leaves_the_fork_server_alone(starts, file, monkeypatch):
    left = [None] * 10
    dup = os.dup

    def limited(fd):
        if not left:
            raise OSError(errno.EMFILE, "too many open files")
        left.pop()
        return dup(fd)

    monkeypatch.setattr(os, "dup", limited)
    with pytest.raises(OSError, match="too many open files"):
        processes.start(starts.setup, 1, file)
    assert starts.told == []


def test_a_fork_server_that_listens_no_more_is_ended(starts, file):
    starts.error = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    with pytest.raises(ConnectionRefusedError):
        processes.start(starts.setup, 1, file)
    assert starts.told == ["start", "kill"]


def test_a_fork_server_that_ended_meanwhile_is_not(starts, file):
    starts.error = EOFError()
    with pytest.raises(EOFError):
        processes.start(starts.setup, 1, file)
    assert starts.told == ["start"]
