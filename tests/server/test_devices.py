"""Several devices behind one engine: on the processor, each a process with a thread for a lane.

And features of resident graphs that such lanes gather themselves.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from serve.commands.configured import calibration_cache, device_of
from serve.config import load_config
from serve.core.types import LaneId
from serve.errors import NotReady, TooBig
from serve.graphs.snapshot import Snapshot
from serve.graphs.updates import Change
from serve.ipc.messages import MemoryTaken, TableMapped, TakesLess
from serve.ipc.setup import DevicePlace
from serve.journal import decode
from serve.obs.journal import JournalWriter
from serve.server.api import InferCall, Tensor
from serve.server.engine import Engine
from serve.sim.replay import first_difference, recorded
from tests.e2e.support import FEATURES, Graph, Reference, assert_equal
from tests.processes import PATIENCE_S, wait_for
from tests.server.test_engine import CONFIG, call

DEVICES = 2
HERE = DevicePlace("cpu")
NODES = 500
GRAPH = """
[[graph]]
name = "{name}"
file = "{folder}/{name}.npz"
hot_memory = "{hot}"
"""
#: Not all of their rows are hot: their places alone take 2,048 bytes.
HOT = {"floats": "6 KiB", "bytes": "3 KiB"}
#: Resident graphs, by how their features are kept.
FEATURES_OF = {
    "floats": lambda rng: rng.standard_normal((NODES, FEATURES), dtype=np.float32),
    "bytes": lambda rng: rng.integers(0, 4, (NODES, FEATURES)).astype(np.float32),
}


class Served:
    """An engine on two devices, and the records of its requests."""

    def __init__(self, trouble, folder, place=HERE):
        path = folder / "server.toml"
        # Merged, only the first graph's word would be heard.
        text = CONFIG.format(repository=trouble.root) + "merge = false\n"
        graphs = (GRAPH.format(name=name, folder=folder, hot=HOT[name]) for name in HOT)
        path.write_text(text.replace("= 4", "= 64") + "".join(graphs))
        rng = np.random.default_rng(0)
        self.edges = rng.integers(0, NODES, (2, 6 * NODES))
        self.x = {name: make(rng) for name, make in FEATURES_OF.items()}
        for name, x in self.x.items():
            np.savez(folder / f"{name}.npz", num_nodes=NODES, edge_index=self.edges, x=x)
        config = load_config(path)
        self.device = replace(
            device_of(config),
            name="fake",
            lane_cores=((),),
            parallelism=1,
            can_suspend=False,
            places=(place,) * DEVICES,
        )
        self.records = []
        cache = calibration_cache(config, self.device)
        self.journal = JournalWriter(folder / "journal.jsonl")
        self.engine = Engine(config, self.device, self.records.append, cache, self.journal)
        self.trouble = trouble

    def ask(self, graph, model="mischief"):
        """One request's answer, checked, and its record."""
        ticket = self.engine.submit(call(graph, model))
        found = ticket.result()
        if model == "mischief":
            expected = self.trouble.expected(graph)
            np.testing.assert_allclose(found.output, expected, rtol=1e-4, atol=1e-5)
        return next(r for r in self.records if r.request_uid == ticket.request_uid)

    def ask_nodes(self, graph, ids):
        """The answer for nodes of a resident graph, from all of it, and its record."""
        tensors = {"node_ids": Tensor("INT64", ids.shape, ids.tobytes())}
        asked = InferCall(
            "gcn", "", tensors, arrived_ns=time.monotonic_ns(), graph=graph, fanouts="all"
        )
        found = self.engine.submit(asked).result()
        return found.output, found.record

    def ask_many(self, count):
        with ThreadPoolExecutor(8) as threads:
            graphs = [self.trouble.graph(num_nodes=50 + number) for number in range(count)]
            return list(threads.map(self.ask, graphs))

    def budgets(self):
        return [device.budget_bytes for device in self.engine.driver.scheduler.devices]


@pytest.fixture(scope="module")
def reference():
    return Reference()


@pytest.fixture(scope="module")
def served(trouble, tmp_path_factory):
    found = Served(trouble, tmp_path_factory.mktemp("devices"))
    with pytest.MonkeyPatch.context() as patch:
        # Memory for hot rows is taken in pieces that all of these small graphs would fit into.
        patch.setattr("serve.graphs.hot_set._SEGMENT_BYTES", 512)
        found.engine.start()
    found.engine.open()
    yield found
    found.engine.stop()
    found.journal.close()


def test_each_device_has_its_process_lanes_and_memory(served):
    pids = served.engine.pool.pids()
    assert len(set(pids.values())) == DEVICES
    assert served.engine.pool.lane_ids_by_device == ((LaneId(0),), (LaneId(1),))
    weights_bytes = sum(served.engine.model(name).weights_bytes for name in ("mischief", "gcn"))
    taken_bytes = weights_bytes + (6 << 10) + (3 << 10)
    assert served.budgets() == [served.device.budget_bytes - taken_bytes] * DEVICES
    found = served.engine.estimate("gcn", "", 1000, 5000)
    assert found.budget_bytes == sum(served.budgets())
    assert found.fit_count == DEVICES * (served.budgets()[0] // found.reserve_bytes)
    assert served.engine.snapshot().lanes_up == DEVICES
    assert len(served.engine.snapshot().memory_bytes) == DEVICES


def test_what_a_device_holds_beside_the_plan_is_no_tasks(served):
    before = served.budgets()
    hear = served.engine.driver._hear
    hear([(LaneId(1), MemoryTaken(5000))])
    assert served.budgets() == [before[0], before[1] - 5000]
    hear([(LaneId(1), MemoryTaken(1 << 60))])
    assert served.budgets() == [before[0], 0]
    hear([(LaneId(1), MemoryTaken(0))])
    assert served.budgets() == before


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
    both_are_used(served)


def test_memory_that_a_run_turns_out_not_to_take_is_anothers(served, trouble):
    driver = served.engine.driver
    with ThreadPoolExecutor(1) as thread, trouble.holding() as held:
        waiting = thread.submit(served.ask, held)
        wait_for(trouble.running, "the request that holds a device")
        ledger, (run,) = next(
            (device.parts.board.ledger, device.parts.board.busy.values())
            for device in driver.scheduler.devices
            if device.parts.board.busy
        )
        assert ledger.reserved_bytes == run.reserve_bytes > 100
        driver._hear([(run.lane_id, TakesLess(run.task_id, 100))])
        assert ledger.reserved_bytes == 100
    waiting.result(PATIENCE_S)
    assert ledger.reserved_bytes == 0


def both_are_used(served):
    """Where requests come faster than one device answers them, as they do in time."""
    wait_for(lambda: {record.lane for record in served.ask_many(40)} == {0, 1}, "both devices")


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
    both_are_used(served)
    assert served.engine.snapshot().reserved_bytes == 0


@pytest.fixture
def gathers(served, monkeypatch):
    """How often the host gathered features."""
    wait_for(
        lambda: served.engine._graphs.tables.gathered_by_lanes, "a device to say that it can gather"
    )
    found = []
    gather = Snapshot.gather

    def counted(snapshot, nodes, target):
        found.append(nodes.size)
        return gather(snapshot, nodes, target)

    monkeypatch.setattr(Snapshot, "gather", counted)
    return found


@pytest.mark.parametrize("name", FEATURES_OF)
def test_lanes_gather_features_of_resident_graphs(served, gathers, reference, name):
    ids = np.array([3, 499, 3, 0, 77])
    whole = reference("gcn", Graph(served.x[name], served.edges))
    for lane_id in (0, 1) * 2:
        output, record = served.ask_nodes(name, ids)
        assert_equal(output, whole[ids])
        assert record.pmc_measured_bytes is None, lane_id
    assert gathers == []
    assert served.engine._graphs.get(name).snapshot.x.dtype == {"floats": "f4", "bytes": "u1"}[name]


def test_changes_are_seen_at_once_and_whole(served, gathers, reference, monkeypatch):
    """Patches, and features written anew as these grow, while requests come."""
    monkeypatch.setattr("serve.graphs.columns._LEAST_PATCHED_ROWS", 400)
    x, ids = served.x["floats"].copy(), np.arange(0, NODES, 7)
    before = served.engine._graphs.get("floats").snapshot.x
    versions = {1: x}
    rng = np.random.default_rng(1)

    def change():
        for version in range(2, 8):
            new = versions[version - 1].copy()
            which = rng.choice(NODES, 300, replace=False)
            new[which] = rng.standard_normal((300, FEATURES), dtype=np.float32)
            versions[version] = new
            served.engine.update_graph("floats", Change(set_ids=which, set_x=new[which]), None)

    with ThreadPoolExecutor(2) as threads:
        changing = threads.submit(change)
        answers = []
        while not changing.done() or len(answers) < 10:
            answers.append(served.ask_nodes("floats", ids))
        changing.result()
    assert served.engine._graphs.get("floats").snapshot.x is not before
    answers.append(served.ask_nodes("floats", ids))
    assert answers[-1][1].graph_version == 7
    whole = {v: reference("gcn", Graph(x, served.edges))[ids] for v, x in versions.items()}
    for output, record in answers:
        assert_equal(output, whole[record.graph_version])
    assert gathers == []


def test_nodes_added_since_are_gathered_too(served, gathers, reference):
    x = np.concatenate([served.x["bytes"], np.full((2, FEATURES), 0.5, np.float32)])
    links = np.array([[NODES, NODES + 1], [0, 1]])
    served.engine.update_graph("bytes", Change(add_x=x[NODES:], add_edges=links), None)
    ids = np.array([NODES + 1, 0, 1, NODES])
    edges = np.concatenate([served.edges, links], axis=1)
    output, _ = served.ask_nodes("bytes", ids)
    assert_equal(output, reference("gcn", Graph(x, edges))[ids])
    assert gathers == []


def test_devices_keep_hot_rows_and_take_them_anew_after_changes(served, gathers, reference):
    """Last of those above: they asked while rows were copied, changed and copied again."""
    store = served.engine._graphs
    for name in FEATURES_OF:
        snapshot = store.get(name).snapshot
        hot_set = store.tables.hot_set(name)
        rows = hot_set.rows(snapshot)
        assert 0 < rows.count < NODES
        wait_for(
            lambda hot_set=hot_set, rows=rows: hot_set._held == rows.file.number,
            "a device to say that it has the rows",
        )
    before = served.engine.snapshot().gathered_rows
    x = store.get("floats").snapshot.features(np.arange(NODES))
    whole = reference("gcn", Graph(x, served.edges))
    ids = np.arange(0, NODES, 3)
    for _ in range(16):
        output, _ = served.ask_nodes("floats", ids)
        assert_equal(output, whole[ids])
    after = served.engine.snapshot().gathered_rows
    assert after["bytes"] == before["bytes"]
    rows, hot = (b - a for a, b in zip(before["floats"], after["floats"], strict=True))
    assert 0 < hot < rows
    assert gathers == [NODES]  # this test itself


def test_the_host_gathers_where_lanes_cannot(served, gathers, reference):
    tables = served.engine._graphs.tables
    ids = np.array([5, 6])
    expected, _ = served.ask_nodes("floats", ids)
    number = tables.offers()[0].table.number
    tables.answered(TableMapped(number + 1000, "superseded and gone"))
    assert tables.gathered_by_lanes
    tables.answered(TableMapped(number, "no such file"))
    try:
        output, _ = served.ask_nodes("floats", ids)
        assert_equal(output, expected)
        assert len(gathers) == 1
        assert tables.offers() == ()
        tables.answered(TableMapped(number))
        served.ask_nodes("floats", ids)
        assert len(gathers) == 2
    finally:
        tables._mapped = True


def test_the_host_gathers_for_devices_without_kernels(trouble, tmp_path, gathers, reference):
    """And no memory is taken for hot rows, whatever the configuration wants."""
    served = Served(trouble, tmp_path, DevicePlace("cpu", has_kernels=False))
    try:
        served.engine.start()
        served.engine.open()
        tables = served.engine._graphs.tables
        assert tables.hot_bytes == 0
        wait_for(lambda: tables._mapped is False, "a device to say that it does not gather")
        ids = np.array([5, 6])
        for name, x in served.x.items():
            output, _ = served.ask_nodes(name, ids)
            assert_equal(output, reference("gcn", Graph(x, served.edges))[ids])
        assert len(gathers) == len(served.x)
    finally:
        served.engine.stop()
        served.journal.close()


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


def test_a_fresh_fleet_decides_the_same(served):
    """Everything this module's engine went through, the death of a device included."""
    served.engine.stop()
    served.journal.close()
    with served.journal.path.open("rb") as lines:
        found = decode(lines)
    assert len(found.params.devices) == DEVICES
    assert first_difference(found) is None
    # Each device ran one at a time, whatever the other did.
    assert recorded(found).device.slowdown == (1.0,)
