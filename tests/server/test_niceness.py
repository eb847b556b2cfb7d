"""Who makes way for the server's own threads: lanes that compute, and not those that launch."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bench.kit.servers import ServerProcess
from serve.ipc.setup import DevicePlace, LaneSetup
from serve.ipc.shared_pool import SharedPool
from serve.lane import process
from serve.niceness import IDLE_CLASS, be_nice
from serve.server.lanes import processes
from serve.server.lanes.pool import LanePool


class NoFile:
    def detach(self):
        return os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize("niceness", [0, 7, IDLE_CLASS])
def test_a_process_takes_the_niceness_it_is_told(monkeypatch, niceness):
    found = []
    monkeypatch.setattr(process, "be_nice", found.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for name in ("_die_with_parent", "_release_fork_server"):
        monkeypatch.setattr(process, name, lambda: None)
    monkeypatch.setattr(process, "map_pool", lambda *_: None)
    process.enter(LaneSetup("lane", (), 1, 0, 0, 30, 0, niceness=niceness), NoFile())
    assert found == [niceness]


@pytest.mark.parametrize(
    ("niceness", "policy", "added"),
    [(0, os.SCHED_OTHER, 0), (7, os.SCHED_OTHER, 7), (IDLE_CLASS, os.SCHED_IDLE, 19)],
)
def test_a_thread_and_those_it_starts_step_back(niceness, policy, added):
    own = how()
    with ThreadPoolExecutor(1, initializer=be_nice, initargs=(niceness,)) as threads:
        assert threads.submit(how).result() == (policy, min(19, own[1] + added))
    assert how() == own


def test_where_the_idle_class_is_forbidden_a_thread_has_the_largest_niceness(monkeypatch):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    with ThreadPoolExecutor(1, initializer=be_nice, initargs=(IDLE_CLASS,)) as threads:
        assert threads.submit(how).result() == (os.SCHED_OTHER, 19)


def how():
    """Return the class and the niceness of the calling thread."""
    return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize(
    ("places", "niceness"),
    [((), 7), ((DevicePlace("cpu"),), 7), ((DevicePlace("cuda:0"),), 0)],
)
def test_lanes_that_compute_are_nice_and_lanes_of_a_gpu_are_not(monkeypatch, places, niceness):
    """A calibrator is neither until the server serves: nobody's request waits for a core."""
    setups = []

    def start(setup, *_):
        setups.append(setup)
        raise OSError("none is started here")

    monkeypatch.setattr(processes, "start", start)
    shared = SharedPool(1 << 20)
    pool = LanePool(((),), shared, 0, places=places, niceness=7)
    try:
        with pytest.raises(OSError, match="none is started"):
            pool.start()
        for limit in (0, 7):
            pool.calibrators.niceness = limit
            with pytest.raises(OSError, match="none is started"), pool.calibrator():
                pass
    finally:
        pool.stop()
        shared.close()
    assert [setup.niceness for setup in setups] == [niceness, 0, niceness]


@pytest.mark.live
def test_lanes_of_a_server_are_in_the_idle_class(tmp_path, monkeypatch):
    monkeypatch.setattr(ServerProcess, "lane_niceness", None)
    with ServerProcess(tmp_path) as server:
        assert os.sched_getscheduler(server.pid) == os.SCHED_OTHER
        found = [os.sched_getscheduler(pid) for pid in processes_below(server.pid)]
    assert found.count(os.SCHED_IDLE) >= 2


@pytest.mark.live
def test_lanes_have_the_niceness_of_the_configuration(tmp_path):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with ServerProcess(tmp_path, sections={"device": {"lane_niceness": 3}}) as server:
        assert os.getpriority(os.PRIO_PROCESS, server.pid) == own
        found = {os.getpriority(os.PRIO_PROCESS, pid) for pid in processes_below(server.pid)}
    assert max(found) == min(19, own + 3)


def processes_below(pid):
    """Every process that descends from `pid`."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parents[int(entry)] = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it ended just now
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found
