"""Captured runs for buckets of sizes: any graph that fits is answered, and nearly all do."""

import numpy as np
import pytest
import torch
from torch_geometric.nn import SAGEConv

from bench.kit.architectures import wrap
from serve.graphs.features import FeatureKeeper
from serve.ipc.messages import GatherRef, Part, RunTask, TaskDone, TensorRef
from serve.lane.cuda.buckets import LEAST_EDGES, LEAST_NODES, bucket, bucket_counts, fill
from serve.lane.cuda.capturing import Recorder
from serve.lane.cuda.queues import HostQueue
from serve.lane.cuda.replays import FixedRun, Replays, RunShape
from serve.lane.executors.check import needs_exact_sizes
from serve.lane.executors.csr import with_csr
from serve.lane.models.sizing import SHORT, SizedInput, Sizing
from serve.lane.task import PoolTensors
from serve.models import zoo
from serve.models.repository import find
from serve.models.writer import write_model
from tests.lane.cuda.test_recurring_runs import ARGS, CLASSES, FEATURES, Rig
from tests.lane.cuda.test_tables import table_of

NAMES = ("gcn", "gat")
SOON = 1


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    for name in NAMES:
        torch.manual_seed(0)
        make = getattr(zoo, name)
        write_model(root, name, make(**ARGS), factory=f"serve.models.zoo:{name}", args=ARGS)
    return {name: find(root, name) for name in NAMES}


class AnySize(Rig):
    """A lane whose models run by `csr` and are captured for buckets."""

    def __init__(self, specs):
        super().__init__()
        for name, spec in specs.items():
            self.load(spec, name, replay_most=100_000, executor="csr", any_size=True)
        self.put_at = 0

    def put(self, name, value):
        start, self.put_at = self.put_at, self.put_at + -(-value.nbytes // 64) * 64
        self.pool[start : start + value.nbytes] = value.tobytes()
        return TensorRef(name, value.dtype.name, value.shape, start)

    def ask_parts(self, key, sizes, dtype=np.int64, table=None):
        """Run one task on new graphs of these nodes and edges; its answers are the model's."""
        self.put_at, parts, expected = 0, [], []
        model = self.lane._models[key]
        for nodes, edges in sizes:
            edge_index = self.rng.integers(0, max(nodes, 1), (2, edges)).astype(dtype)
            refs, gather = [self.put("edge_index", edge_index)], None
            if table is None:
                x = self.rng.standard_normal((nodes, FEATURES), dtype=np.float32)
                refs.insert(0, self.put("x", x))
            else:
                ids = self.rng.integers(0, len(table), nodes)
                at, new = np.array([1]), self.rng.random((1, FEATURES), np.float32)
                x = table[ids]
                x[at] = new
                named = (("ids", ids), ("at", at), ("new", new))
                gather = GatherRef(table_of(table), *(self.put(*each) for each in named))
            output = self.put("output", np.full((nodes, CLASSES), np.nan, np.float32))
            size_bytes = 4 * nodes * CLASSES
            parts.append(Part(tuple(refs), output.offset_bytes, size_bytes, gather))
            inputs = {"x": torch.from_numpy(x), "edge_index": torch.from_numpy(edge_index)}
            expected.append((output, model.loaded.run(inputs)))
        answer = self.place.run(RunTask(5, key, tuple(parts), 1 << 30), model)
        assert isinstance(answer, TaskDone), answer
        assert (answer.rows, answer.columns) == (tuple(n for n, _ in sizes), CLASSES)
        self.place.tidy(answer)
        for output, wanted in expected:
            found = PoolTensors(self.pool).of(output)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture
def rig(specs):
    found = AnySize(specs)
    yield found
    found.close()


def room(nodes, edges):
    return tuple(bucket_counts(SHORT, {"N": nodes, "E": edges}).values())


def bucket_of(inputs, nodes, edges):
    return bucket(SHORT, inputs, {"N": nodes, "E": edges})


def test_a_bucket_is_little_larger_than_what_it_holds():
    for count in range(3000):
        nodes, edges = room(count, count)
        assert count <= nodes
        assert nodes == LEAST_NODES or nodes < 1.5 * count
        assert count <= edges
        assert edges == LEAST_EDGES or edges < 2 * count
        assert room(nodes, edges) == (nodes, edges)
    found = [room(count, 0)[0] for count in (0, 16, 17, 25, 33, 49)]
    assert found == [16, 16, 24, 32, 48, 64]


def test_a_bucket_keeps_all_but_the_sizes():
    inputs = (("x", "float32", (17, 6)), ("edge_index", "int32", (2, 70)),
              ("edge_attr", "float32", (70, 3)), ("edge_weight", "float32", (70,)))  # fmt: skip
    assert bucket_of(inputs, 17, 70) == (
        ("x", "float32", (24, 6)), ("edge_index", "int32", (2, 128)),
        ("edge_attr", "float32", (128, 3)), ("edge_weight", "float32", (128,)),
    )  # fmt: skip
    assert bucket_of(inputs[:1], 0, 0) == (("x", "float32", (LEAST_NODES, 6)),)
    assert bucket_of(inputs[1:2], 0, 0)[0][2] == (2, LEAST_EDGES)


@pytest.mark.parametrize("name", NAMES)
def test_every_size_of_a_bucket_is_answered_by_one_capture(rig, launches, name):
    sizes = [(24, 128), (20, 70), (17, 96), (24, 65), (18, 90)]
    for size in sizes:
        rig.ask_parts(name, [size])
    assert len(launches) == len(sizes) - SOON
    assert len(rig.place._recurring.replays) == 1
    # Smaller ones have one of their own, the graphs without edges and without nodes too.
    for size in [(16, 64), (3, 5), (5, 0), (1, 1), (0, 0)]:
        rig.ask_parts(name, [size])
    assert len(launches) == len(sizes) - SOON + 5 - SOON
    assert len(rig.place._recurring.replays) == 2


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_unions_are_replayed_as_one_graph(rig, launches, dtype):
    for sizes in ([(20, 60), (15, 30)], [(40, 100)], [(5, 0), (0, 0), (31, 99)], [(10, 20)] * 4):
        rig.ask_parts("gcn", sizes, dtype)
    assert len(launches) == 4 - SOON
    assert len(rig.place._recurring.replays) == 1


def test_samples_of_a_resident_graph_are_replayed(rig, launches, tmp_path):
    keeper = FeatureKeeper(dtype="float32", folder=tmp_path, shared=True)
    rows = rig.rng.standard_normal((50, FEATURES)).astype(np.float32)
    table = keeper.kept(rows, "test")
    for sizes in ([(20, 70)], [(22, 80)], [(17, 90)], [(9, 40), (12, 33)]):
        rig.ask_parts("gat", sizes, table=table)
    assert len(launches) == 4 - SOON


def test_edges_of_another_dtype_have_another_capture(rig, launches):
    for _ in range(SOON + 1):
        rig.ask_parts("gcn", [(20, 70)], np.int32)
    assert len(launches) == 1
    rig.ask_parts("gcn", [(20, 70)], np.int64)
    assert len(launches) == 1


def test_nearly_all_of_a_mixed_trace_is_replayed():
    """Of one lane, by counting: sizes over two orders of magnitude, four models."""
    rng = np.random.default_rng(3)
    replays = Replays(lambda shape: FixedRun({}, HostQueue().capture(lambda: (torch.empty(0),))))
    requests, replayed = 10_000, 0
    for _ in range(requests):
        nodes = int(10 ** rng.uniform(1.5, 3.5))
        edges = int(nodes * rng.uniform(3, 12))
        inputs = (("x", "float32", (nodes, 64)), ("edge_index", "int64", (2, edges)))
        key = f"model {rng.integers(4)}"
        shape = RunShape(key, bucket_of(inputs, nodes, edges), is_bucket=True)
        replayed += replays.find(shape) is not None
        replays.capture_due(idle=True)
    assert replayed > 0.95 * requests


def test_each_row_of_an_index_is_shifted_by_what_it_points_to():
    sizing = Sizing(
        {
            "author": SizedInput("A", 0),
            "paper": SizedInput("P", 0),
            "writes": SizedInput("W", 1, ("A", "P")),
        },
        ("A", "P"),
    )
    places = {"author": torch.zeros(8, 1), "paper": torch.zeros(8, 1),
              "writes": torch.zeros(2, 6, dtype=torch.int64)}  # fmt: skip
    parts = [
        {"author": torch.ones(2, 1), "paper": torch.ones(3, 1),
         "writes": torch.tensor([[0, 1], [2, 0]])},
        {"author": torch.ones(1, 1), "paper": torch.ones(2, 1),
         "writes": torch.tensor([[0, 0, 0], [1, 0, 1]])},
    ]  # fmt: skip
    counts = [sizing.counts({name: value.shape for name, value in part.items()}) for part in parts]
    assert counts == [{"A": 2, "P": 3, "W": 2}, {"A": 1, "P": 2, "W": 3}]
    fill(HostQueue(), sizing, places, parts, counts)
    assert places["writes"].tolist() == [[0, 1, 2, 2, 2, -1], [2, 0, 4, 3, 4, -1]]
    assert (places["author"].nansum(), places["paper"].nansum()) == (3, 5)


def test_nothing_of_an_earlier_request_stays_in_spare_room():
    sizing = Sizing(
        {
            "x": SizedInput("N", 0),
            "known": SizedInput("N", 0),
            "kind": SizedInput("E", 1),
            "edge_index": SizedInput("E", 1, ("N",)),
        },
        ("N",),
    )

    def graph(nodes, edges):
        return {
            "x": torch.ones(nodes, 2, dtype=torch.float16),
            "known": torch.ones(nodes, dtype=torch.bool),
            "kind": torch.ones(1, edges, dtype=torch.uint8),
            "edge_index": torch.ones(2, edges, dtype=torch.int32),
        }

    places = graph(5, 6)
    fill(HostQueue(), sizing, places, [graph(3, 4)], [{"N": 3, "E": 4}])
    assert places["x"].isnan().all(1).tolist() == [False] * 3 + [True] * 2
    assert places["known"].tolist() == [True] * 3 + [False] * 2
    assert places["kind"].tolist() == [[1] * 4 + [0] * 2]
    assert places["edge_index"].tolist() == [[1] * 4 + [-1] * 2] * 2
    # Features that are gathered afterwards have spare room too.
    places = graph(5, 6)
    gathered = {name: value for name, value in graph(3, 4).items() if name != "x"}
    fill(HostQueue(), sizing, places, [gathered], [{"N": 3, "E": 4}])
    assert places["x"][3:].isnan().all()


class Debtors(torch.nn.Module):
    """A layer, and how many nodes of all are below zero."""

    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(FEATURES, CLASSES)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index) + (x[:, 0] < 0).sum()


def test_a_replay_answers_by_no_node_of_an_earlier_request():
    """Of a model that takes spare room, as nothing in it is below zero."""
    wrapped, signature = wrap(Debtors(), "model", ("x", "edge_index"), FEATURES)
    model = with_csr(wrapped)
    assert needs_exact_sizes(model, signature) == ""
    recorder = Recorder(HostQueue(), None)
    run = recorder.capture(
        model, (("x", "float32", (24, FEATURES)), ("edge_index", "int64", (2, 64)))
    )
    for nodes in (24, 20):
        inputs = {
            "x": -torch.ones(nodes, FEATURES),
            "edge_index": torch.arange(nodes).repeat(2, 1),
        }
        expected = model.run(inputs)
        (found,) = recorder.replay(run, inputs, [expected.shape])
        torch.testing.assert_close(found, expected)
