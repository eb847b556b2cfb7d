"""What a lane says that cannot be true costs that lane; without its driver a server ends."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from serve.core.types import FailReason
from serve.runtime import messages
from serve.runtime.driver import EXIT_BUG
from serve.runtime.messages import TaskDone, TaskError
from tests.harness import ROOT
from tests.outside import PATIENCE_S, wait_for
from tests.runtime.test_engine import call, start

DRIVER = """
import threading
from serve.runtime.driver import Driver
from serve.runtime.records import Scheduling
from tests.builders import params

class Pool:
    lane_ids = ()
    def poll(self, until_ns):
        raise RuntimeError("a bug")

driver = Driver(
    params(), Pool(), None, None, lock=threading.Lock(), sink=print,
    scheduling=Scheduling("sqtf", "rolling", ("cpu",), 1), check_finite=True,
)
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
def test_a_lane_that_says_what_cannot_be_is_lost_and_its_request_runs_again(
    engine, trouble, monkeypatch, lie
):
    # Restarted at once, however many lanes were lost before.
    monkeypatch.setattr("serve.runtime.successors._HEALTHY_AFTER_NS", 0)
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


def test_a_server_without_its_drivers_thread_ends():
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], cwd=ROOT, timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert done.returncode == EXIT_BUG, done.stderr
    assert "RuntimeError: a bug" in done.stderr
