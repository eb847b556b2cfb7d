"""Threads whose start ends."""

import sys
import threading

import pytest

from serve import threads
from serve.obs.log import log_uncaught
from serve.threads import Thread


@pytest.fixture
def no_memory(monkeypatch):
    """New threads end before their first line, as they do without memory for it."""

    def ends(thread):
        raise MemoryError

    monkeypatch.setattr(threading.Thread, "_bootstrap", ends)


def test_a_start_without_memory_is_refused_at_once(no_memory, monkeypatch):
    for hook in ("excepthook", "unraisablehook"):
        monkeypatch.setattr(sys, hook, getattr(sys, hook))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    log_uncaught()
    thread = Thread(lambda: None, "one")
    with pytest.raises(RuntimeError, match="can't start new thread"):
        thread.start()
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nor_is_it_waited_for_without_end_where_nobody_is_told(no_memory, monkeypatch):
    monkeypatch.setattr(threads, "_LIMIT_S", 0.05)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Thread(lambda: None, "one").start()


def test_a_thread_that_begins_too_late_runs_nothing(monkeypatch):
    monkeypatch.setattr(threads, "_LIMIT_S", 0.05)
    go, ended, ran = threading.Event(), threading.Event(), []
    begin = threading.Thread._bootstrap

    def late(thread):
        go.wait()
        begin(thread)
        ended.set()

    monkeypatch.setattr(threading.Thread, "_bootstrap", late)
    thread = Thread(lambda: ran.append(1), "one")
    with pytest.raises(RuntimeError):
        thread.start()
    go.set()
    assert ended.wait(60)
    assert not ran


def test_a_thread_that_begins_runs_its_target():
    ran = []
    thread = Thread(ran.append, "one", (1,))
    thread.start()
    thread.join()
    assert ran == [1]
    assert (thread.name, thread.daemon) == ("one", True)
