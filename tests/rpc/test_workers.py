"""Threads made on demand: their number, their life time, and the case that none can be made."""

import threading
import time

import pytest

from serve.rpc.workers import Workers

LONG_S = 60.0


def eventually(condition):
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def name(request):
    return f"workers of {request.node.name}"


def count(name):
    return sum(thread.name == name for thread in threading.enumerate())


def test_idle_threads_end_but_those_that_are_kept(name):
    workers = Workers(8, name, kept=2, idle_s=0.05)
    workers.start_kept()
    assert count(name) == 2
    go, begun = threading.Event(), threading.Semaphore(0)

    def work():
        begun.release()
        go.wait(LONG_S)

    for _ in range(8):
        assert workers.give(work)
    assert all(begun.acquire(timeout=LONG_S) for _ in range(8))
    assert count(name) == 8
    go.set()
    eventually(lambda: count(name) == 2)
    for _ in range(20):
        assert workers.give(begun.release)
    assert all(begun.acquire(timeout=LONG_S) for _ in range(20))
    workers.shutdown()
    eventually(lambda: count(name) == 0)
    assert not workers.give(begun.release)


def test_limits_that_are_raised_and_lowered_count_at_once(name):
    workers = Workers(1, name, most_waiting=1, idle_s=0.05)
    go, begun = threading.Event(), threading.Semaphore(0)

    def work():
        begun.release()
        go.wait(LONG_S)

    def begins():
        return workers.give(work) and begun.acquire(timeout=LONG_S)

    assert begins()
    assert workers.give(work)
    assert not workers.give(work)
    workers.allow(3, 2)
    assert begins()
    assert begins()
    assert workers.give(work)
    assert not workers.give(work)
    workers.allow(1, 0)
    assert not workers.give(work)
    go.set()
    eventually(lambda: count(name) == 0)
    assert begins()
    workers.shutdown()


def test_work_is_given_to_threads_that_end_without_being_lost(name):
    workers = Workers(4, name, idle_s=0.0005)
    done = threading.Semaphore(0)
    for _ in range(300):
        assert workers.give(done.release)
        assert done.acquire(timeout=LONG_S)
        time.sleep(0.0005)
    workers.shutdown()
    eventually(lambda: count(name) == 0)


def test_so_much_work_waits_and_no_more(name):
    workers = Workers(1, name, most_waiting=2)
    go, begun, done = threading.Event(), threading.Event(), []
    assert workers.give(lambda: (begun.set(), go.wait(LONG_S)))
    assert begun.wait(LONG_S)
    assert workers.give(lambda: done.append(1))
    assert workers.give(lambda: done.append(2))
    assert not workers.give(lambda: done.append(3))
    go.set()
    eventually(lambda: done == [1, 2])
    assert workers.give(lambda: done.append(4))
    eventually(lambda: done == [1, 2, 4])
    workers.shutdown()


def test_without_a_new_thread_work_waits_for_one_there_is(name, monkeypatch):
    workers = Workers(4, name)
    go, begun, done = threading.Event(), threading.Event(), threading.Event()
    assert workers.give(lambda: (begun.set(), go.wait(LONG_S)))
    assert begun.wait(LONG_S)

    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert workers.give(done.set)
    go.set()
    assert done.wait(LONG_S)
    workers.shutdown()


def test_without_any_thread_work_is_refused_and_not_run_later(name, monkeypatch, caplog):
    workers, done = Workers(4, name), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: [][0])
        for _ in range(3):
            assert not workers.give(lambda: done.append(1))
    assert len(caplog.records) == 1  # and not one for each call
    assert workers.give(lambda: done.append(2))
    eventually(lambda: done == [2])
    workers.shutdown()
