"""Faulty lanes are replaced; a server without its driver's thread ends."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from bench.kit.servers import ROOT
from serve.core.types import FailReason, LaneState
from serve.errors import DeadlineExceeded
from serve.ipc import messages
from serve.ipc.messages import TaskDone, TaskError
from serve.server.driver import EXIT_BUG
from serve.server.lanes.process_state import look
from tests.e2e.mischief import DOZE_ONCE
from tests.processes import PATIENCE_S, wait_for
from tests.server.test_engine import call, start

DRIVER = """
import threading
from serve.server.driver import Driver
from serve.server.lane_monitor import LaneCallbacks, LaneMonitor
from tests.builders import params

class Pool:
    lane_ids = ()
    def poll(self, until_ns):
        raise RuntimeError("a bug")

pool, lock = Pool(), threading.Lock()
lanes = LaneMonitor(pool, None, None, lock, LaneCallbacks())
driver = Driver(params(), pool, lanes, None, None, lock=lock, jobs=None)
driver.start(0.0)
threading.Event().wait(60)
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory, trouble):
    found = start(trouble, tmp_path_factory.mktemp("faults"), [])
    yield found
    found.stop()


def changed(**fields):
    return lambda done: messages.encode(msgspec.structs.replace(done, **fields))


def failed(reason):
    return lambda done: messages.encode(TaskError(done.task_id, reason, "words"))


@pytest.mark.parametrize(
    "lie",
    [
        changed(task_id=1 << 40),
        changed(task_id=-1),
        changed(rows=(3, 3)),
        changed(rows=()),
        changed(rows=(-3,)),
        changed(rows=(1 << 40,)),
        changed(columns=1 << 70),
        changed(run_ns=-1),
        changed(peak_bytes=-1),
        failed("no reason"),
        failed(FailReason.QUARANTINED.value),
        lambda done: b"\xc1",
    ],
    ids=range(12),
)
def test_a_lane_with_an_impossible_answer_is_lost_and_its_request_runs_again(
    engine, trouble, monkeypatch, lie
):
    # Restarted at once, however many lanes were lost before.
    monkeypatch.setattr("serve.server.lanes.restarts._HEALTHY_AFTER_NS", 0)
    lies = [lie]
    decode = messages.decode_from_lane

    def heard(packet):
        message = decode(packet)
        if isinstance(message, TaskDone) and lies:
            return decode(lies.pop()(message))
        return message

    graph = trouble.graph(num_nodes=12)
    before = engine.pool.restarts
    monkeypatch.setattr(messages, "decode_from_lane", heard)
    result = engine.submit(call(graph, timeout_ns=int(PATIENCE_S * 1e9))).result()
    assert result.record.attempt == 2
    np.testing.assert_allclose(result.output, trouble.expected(graph), rtol=1e-5, atol=1e-6)
    assert (engine.pool.restarts, engine.live) == (before + 1, True)
    wait_for(lambda: engine.driver.scheduler.reserved_bytes == 0, "an empty ledger")
    for _ in range(2):  # or the model would be put aside after some of these
        engine.submit(call(graph)).result()


#: Less than a run may take where nothing is set.
SOON_NS = int(50e9)


def test_a_lane_that_somebody_stopped_is_replaced(engine, trouble):
    before = engine.pool.restarts
    with ThreadPoolExecutor() as threads:
        with trouble.holding() as graph:
            answer = threads.submit(engine.submit(call(graph, timeout_ns=SOON_NS)).result)
            (stopped,) = wait_for(trouble.running, "a running request")
            os.kill(stopped, signal.SIGSTOP)
            wait_for(lambda: trouble.running() - {stopped}, "another run")
        assert answer.result(PATIENCE_S).record.attempt == 2
    assert engine.pool.restarts == before + 1


def test_a_run_that_sleeps_for_ever_is_repeated(engine, trouble):
    graph = trouble.graph(DOZE_ONCE)
    result = engine.submit(call(graph, timeout_ns=SOON_NS)).result()
    assert result.record.attempt == 2
    np.testing.assert_allclose(result.output, trouble.expected(graph), rtol=1e-5, atol=1e-6)


def test_a_run_beyond_its_time_limit_ends_without_its_lane(engine, trouble, monkeypatch):
    watch = engine.driver.scheduler.parts.watch
    monkeypatch.setattr(watch, "_limit_ns", 2_000_000_000)
    before = engine.pool.pids()
    words = r"model mischief:1: its run took .* s, a run of it may take 2 s \(server.max_run_s\)"
    with trouble.holding() as graph, pytest.raises(DeadlineExceeded, match=words):
        engine.submit(call(graph, timeout_ns=SOON_NS)).result()
    assert engine.submit(call(trouble.graph())).result().record.attempt == 1
    assert engine.pool.pids() == before


def test_a_server_whose_lanes_are_all_held_by_overlong_runs_is_not_ready(engine, trouble):
    with ThreadPoolExecutor() as threads:
        with trouble.holding() as graph:
            answer = threads.submit(engine.submit(call(graph)).result)
            wait_for(lambda: not engine.ready, "a server that is not ready")
        answer.result(PATIENCE_S)
    assert engine.ready


def test_the_state_of_a_process_is_seen_from_outside():
    code = "import sys, time\nwhile sys.argv[1] == 'busy': pass\ntime.sleep(600)"
    for how, state in (("busy", LaneState.BUSY), ("idle", LaneState.ASLEEP)):
        with subprocess.Popen([sys.executable, "-c", code, how]) as process:
            try:
                first = wait_for(
                    lambda p=process, s=state: (seen := look(p.pid)) and seen.state is s and seen,
                    f"a process that is {how}",
                )
                if how == "busy":
                    wait_for(lambda p=process, f=first: look(p.pid).cpu_ns > f.cpu_ns, "progress")
                os.kill(process.pid, signal.SIGSTOP)
                stopped = wait_for(
                    lambda p=process: (seen := look(p.pid)).state is LaneState.STOPPED and seen,
                    "a stopped process",
                )
                assert look(process.pid) == stopped
            finally:
                process.kill()
    assert look(process.pid) is None


def test_a_server_without_its_drivers_thread_ends():
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], cwd=ROOT, timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert done.returncode == EXIT_BUG, done.stderr
    assert "RuntimeError: a bug" in done.stderr
