"""Several devices behind one engine: on the processor, each a process with a thread for a lane."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from serve.app import calibration_cache, device_of
from serve.config import load_config
from serve.core.types import LaneId
from serve.errors import NotReady, TooBig
from serve.runtime.engine import Engine
from serve.runtime.entry import DevicePlace
from tests.e2e.support import FEATURES, Graph
from tests.outside import PATIENCE_S, wait_for
from tests.runtime.test_engine import CONFIG, call

DEVICES = 2


class Served:
    """An engine on two devices, and the records of its requests."""

    def __init__(self, trouble, folder):
        path = folder / "server.toml"
        # Merged, only the first graph's word would be heard.
        text = CONFIG.format(repository=trouble.root) + "merge = false\n"
        path.write_text(text.replace("= 4", "= 64"))
        config = load_config(path)
        self.device = replace(
            device_of(config),
            name="fake",
            lane_cores=((),),
            parallelism=1,
            can_suspend=False,
            places=(DevicePlace("cpu"),) * DEVICES,
        )
        self.records = []
        cache = calibration_cache(config, self.device)
        self.engine = Engine(config, self.device, self.records.append, cache)
        self.trouble = trouble

    def ask(self, graph, model="mischief"):
        """One request's answer, checked, and its record."""
        ticket = self.engine.submit(call(graph, model))
        found = ticket.result()
        if model == "mischief":
            expected = self.trouble.expected(graph)
            np.testing.assert_allclose(found.output, expected, rtol=1e-4, atol=1e-5)
        return next(r for r in self.records if r.request_uid == ticket.request_uid)

    def ask_many(self, count):
        with ThreadPoolExecutor(8) as threads:
            graphs = [self.trouble.graph(num_nodes=50 + number) for number in range(count)]
            return list(threads.map(self.ask, graphs))

    def budgets(self):
        return [device.budget_bytes for device in self.engine.driver.scheduler.devices]


@pytest.fixture(scope="module")
def served(trouble, tmp_path_factory):
    found = Served(trouble, tmp_path_factory.mktemp("devices"))
    found.engine.start()
    yield found
    found.engine.stop()


def test_each_device_has_its_process_lanes_and_memory(served):
    pids = served.engine.pool.pids()
    assert len(set(pids.values())) == DEVICES
    assert served.engine.pool.lane_ids_by_device == ((LaneId(0),), (LaneId(1),))
    weights_bytes = sum(served.engine.model(name).weights_bytes for name in ("mischief", "gcn"))
    assert served.budgets() == [served.device.budget_bytes - weights_bytes] * DEVICES
    found = served.engine.estimate("gcn", "", 1000, 5000)
    assert found.budget_bytes == sum(served.budgets())
    assert found.fit_count == DEVICES * (served.budgets()[0] // found.reserve_bytes)
    assert served.engine.snapshot().lanes_up == DEVICES
    assert len(served.engine.snapshot().memory_bytes) == DEVICES


def test_requests_are_spread_and_told_apart(served, trouble):
    with ThreadPoolExecutor(1) as thread, trouble.holding() as held:
        waiting = thread.submit(served.ask, held)
        wait_for(trouble.running, "the request that holds a device")
        records = served.ask_many(8)
        assert {record.lane for record in records} == {1}
        assert {record.device for record in records} == {"fake #1"}
        # Nothing else ran on their device.
        assert {record.co_runners for record in records} == {0}
    assert waiting.result(PATIENCE_S).lane == 0
    served.records.clear()
    assert {record.lane for record in served.ask_many(40)} == {0, 1}


def test_a_request_too_large_for_each_device_is_refused(served):
    num_nodes = 300_000
    need_bytes = served.engine.estimate("gcn", "", num_nodes, 0).reserve_bytes
    assert served.budgets()[0] < need_bytes < sum(served.budgets())
    graph = Graph(np.zeros((num_nodes, FEATURES), np.float32), np.zeros((2, 0), np.int64))
    ticket = served.engine.submit(call(graph, "gcn"))
    with pytest.raises(TooBig, match=str(served.budgets()[0])):
        ticket.result()


def test_a_device_that_dies_runs_its_task_again_and_the_other_goes_on(served, trouble):
    pids = served.engine.pool.pids()
    with ThreadPoolExecutor(1) as thread, trouble.holding() as held:
        waiting = thread.submit(served.ask, held)
        wait_for(trouble.running, "the request that holds a device")
        (victim,) = trouble.running()
        assert victim == pids[LaneId(0)]
        before = served.ask_many(4)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: trouble.running() - {victim}, "the request to run again")
        after = served.ask_many(4)
    record = waiting.result(PATIENCE_S)
    assert record.attempt == 2
    assert {r.attempt for r in before + after} == {1}
    wait_for(lambda: served.engine.snapshot().lanes_up == DEVICES, "the device to come back")
    assert served.engine.snapshot().lane_restarts == 1
    assert served.engine.pool.pids()[LaneId(1)] == pids[LaneId(1)]
    assert {record.lane for record in served.ask_many(40)} == {0, 1}
    assert served.engine.snapshot().reserved_bytes == 0


def test_unloading_gives_memory_back_on_every_device(served):
    before = served.budgets()
    weights_bytes = served.engine.model("gcn").weights_bytes
    served.engine.unload("gcn")
    assert served.budgets() == [size + weights_bytes for size in before]
    served.engine.load("gcn")
    assert served.budgets() == before


def test_a_drain_waits_for_all_devices(served, trouble):
    with ThreadPoolExecutor(1) as thread, trouble.holding() as held:
        waiting = thread.submit(served.ask, held)
        wait_for(trouble.running, "the request that holds a device")
        served.ask_many(2)
        assert served.engine.begin_drain() == 1
        with pytest.raises(NotReady, match="stopping"):
            served.ask(trouble.graph())
        assert not served.engine.wait_drained(0)
    waiting.result(PATIENCE_S)
    assert served.engine.wait_drained(PATIENCE_S)
