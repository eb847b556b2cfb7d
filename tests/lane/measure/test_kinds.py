"""Memory of models that treat kinds of things one by one, for any mix of them."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.nn import RGCNConv

from serve.estimate import Calibration, ModelEstimator, Overhead
from serve.estimate.calibration import Ramp, TimeFit
from serve.interface import MOST_KINDS, InputSlot, Interface, KindCounts, TensorSlot
from serve.lane.executors import with_executor
from serve.lane.measure.memory import measure_memory
from serve.lane.measure.probe_graphs import Shape, declared_graph
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.measure.tracing import trace
from serve.lane.models.declared import DeclaredForward
from serve.lane.models.loader import LoadedModel
from serve.models.repository import ModelSpec

NUM_NODES, NUM_EDGES = 600, 4_000


class Relational(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.first = RGCNConv(16, 32, num_relations=kinds)
        self.second = RGCNConv(32, 7, num_relations=kinds, num_bases=2)

    def forward(self, x, edge_index, edge_type):
        return self.second(self.first(x, edge_index, edge_type).relu(), edge_index, edge_type)


class OneIsWide(nn.Module):
    """Things of the kind in the middle take ten times what others do."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds

    def forward(self, x, edge_index, edge_type):
        for kind in range(self.kinds):
            width = 640 if kind == self.kinds // 2 else 64
            ends = edge_index[1, edge_type == kind]
            x = x + x[ends].repeat(1, width // x.shape[1]).sum()
        return x[:, :7]


class Unlike(nn.Module):
    """Things of each kind take memory of their own, those of a kind in the middle most."""

    def __init__(self, kinds, seed):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.widths = [int(width) for width in rng.integers(1, 25, kinds)]
        self.costly = int(rng.integers(1, kinds - 1))
        self.widths[self.costly] = 40

    def forward(self, x, edge_index, edge_type):
        kept = []
        for kind, width in enumerate(self.widths):
            message = x[edge_index[1, edge_type == kind]].repeat(1, width)
            kept.append(message.sum(0, keepdim=True)[:, :16])
        return (x + sum(kept))[:, :7]


class Embedded(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.table = nn.Embedding(kinds, 16)

    def forward(self, x, edge_index, edge_type):
        message = x[edge_index[0]] * self.table(edge_type)
        return torch.zeros_like(x).index_add_(0, edge_index[1], message)[:, :7]


def interface(kinds, low=0):
    slots = (
        InputSlot("x", "FP32", ("N", 16)),
        InputSlot("edge_index", "INT64", (2, "E"), index=("N",)),
        InputSlot("edge_type", "INT64", ("E",), low=low, high=low + kinds),
    )
    return Interface(slots, (TensorSlot("y", "FP32", ("N", 7)),))


@functools.cache
def unlike(seed):
    return functools.partial(Unlike, seed=seed)


@functools.cache
def measured(model, kinds, executor="eager"):
    """The model with an estimator of its memory."""
    torch.manual_seed(0)
    return measured_of(model(kinds).eval().requires_grad_(False), interface(kinds), executor)


def measured_of(module, declared, executor="eager"):
    spec = ModelSpec(
        name="m", version=1, folder="", factory="", args={}, weights="", weights_bytes=0,
        inputs=tuple(slot.name for slot in declared.inputs), interface=declared, qos_factor=None,
    )  # fmt: skip
    loaded = LoadedModel(spec, module, declared=DeclaredForward(module, declared, "m:1"))
    loaded = with_executor(loaded, executor)
    memory = measure_memory(loaded, probe_signature(loaded), max_bytes=1 << 30)
    time = TimeFit(
        constant_ns=1e6, ramps=(Ramp((0.0,), (0.0,), (1.0,)),) * len(declared.counts),
        high_ratio=1, error_median=0, error_p95=0, samples=9, largest=(1, 1),
    )  # fmt: skip
    calibration = Calibration(
        model="m:1", executor=executor, device="cpu", threads=1, memory=memory, time=time
    )
    return loaded, ModelEstimator(calibration, Overhead())


def mixes(kinds):
    """Yield the kinds of NUM_EDGES edges: alike, one only, some empty, one rare, lopsided."""
    rng = np.random.default_rng(1)
    yield rng.integers(0, kinds, NUM_EDGES)
    for kind in range(kinds):
        yield np.full(NUM_EDGES, kind)
        yield np.where(rng.random(NUM_EDGES) < 0.7, kind, rng.integers(0, kinds, NUM_EDGES))
    yield kinds - 1 - np.arange(NUM_EDGES) % 2
    yield np.arange(NUM_EDGES) % max(2, kinds // 2)
    for concentration in (0.05, 0.3, 3.0):
        shares = rng.dirichlet(np.full(kinds, concentration))
        yield rng.choice(kinds, NUM_EDGES, p=shares)


def errors(model, kinds, executor="eager", *, counted=True):
    """Return estimate ÷ measured − 1 for each mix, which is `counted`, or not known."""
    loaded, estimator = measured(model, kinds, executor)
    declared = loaded.spec.interface
    graph = declared_graph(declared, (NUM_NODES, NUM_EDGES), Shape.PLAIN)
    staged = sum(tensor.nbytes for tensor in graph.values())
    found = []
    for mix in mixes(kinds):
        inputs = graph | {"edge_type": torch.from_numpy(mix)}
        counts = NUM_NODES, NUM_EDGES
        by_kind = declared.kind_counts(inputs) if counted else None
        peak_bytes, _ = estimator.memory(*counts, by_kind=by_kind)
        run = functools.partial(loaded.outputs, inputs)
        run()
        found.append(peak_bytes / (staged + trace(run, loaded.module, *counts).peak_bytes) - 1)
    return found


@pytest.mark.parametrize(
    ("kinds", "executor"), [(2, "eager"), (4, "eager"), (4, "csr"), (20, "eager")]
)
def test_counted_kinds_make_the_estimate_that_of_their_mix(kinds, executor):
    found = errors(Relational, kinds, executor)
    assert min(found) >= -0.001
    assert max(found) <= 0.02


def test_kinds_are_not_counted_where_that_spares_nothing():
    assert measured(Relational, 4)[1].counts_kinds
    assert not measured(Embedded, 5)[1].counts_kinds
    assert min(errors(Embedded, 5)) >= -0.001


def test_kinds_may_be_unlike():
    assert measured(OneIsWide, 5)[1].counts_kinds
    assert min(errors(OneIsWide, 5)) >= -0.001


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("counted", [False, True])
def test_no_mix_takes_more_than_estimated_whichever_kind_costs_most(seed, counted):
    kinds = 3 + seed % 6
    model = unlike(seed)
    found = errors(model, kinds, counted=counted)
    assert min(found) >= -0.001
    # And the bound is met: it is that of the graph in which all are of the costly kind.
    assert counted or min(found) <= 0.001


def test_the_costly_kinds_of_two_inputs_are_traced_together():
    declared = Interface(
        (
            InputSlot("x", "FP32", ("N", 16)),
            InputSlot("a", "INT64", ("N",), low=-1, high=4),
            InputSlot("b", "UINT8", ("N", 2), low=0, high=9),
        ),
        (TensorSlot("y", "FP32", ("N", 7)),),
    )

    class Both(nn.Module):
        def forward(self, x, a, b):
            # Together in one product, so that neither alone takes as much.
            wide = 1 + 20 * (a == 2)[:, None] * (b == 5)
            return (x + x.repeat_interleave(wide.max(1).values, 0).sum(0))[:, :7]

    loaded, estimator = measured_of(Both().eval(), declared)
    x = torch.ones(900, 16)
    for a, b in ((2, 5), (2, 4), (-1, 0), (3, 8)):
        inputs = {
            "x": x,
            "a": torch.full((900,), a),
            "b": torch.full((900, 2), b, dtype=torch.uint8),
        }
        run = functools.partial(loaded.outputs, inputs)
        staged = sum(tensor.nbytes for tensor in inputs.values())
        took = staged + trace(run, loaded.module, 900).peak_bytes
        assert estimator.memory(900)[0] >= 0.999 * took


def test_more_kinds_than_can_be_traced_are_not_counted():
    assert interface(MOST_KINDS).kinds
    assert not interface(MOST_KINDS + 1).kinds


def test_a_request_whose_kinds_are_unknown_may_have_any():
    _, estimator = measured(Relational, 4)
    counts = NUM_NODES, NUM_EDGES
    alike = estimator.memory(*counts, by_kind=KindCounts((0,), (NUM_EDGES,)))
    assert estimator.memory(*counts)[0] >= alike[0] * 0.999
    even = estimator.memory(*counts, by_kind=KindCounts(*2 * ((NUM_EDGES // 4,),)))
    assert even[0] < 0.7 * alike[0]
    assert even[1] < alike[1]


def test_kinds_are_counted_from_where_they_begin():
    declared = interface(4, low=-2)
    made = {"edge_type": np.array([-2, 1, 1, 0, 1], np.int64)}
    assert declared.kind_counts(made) == KindCounts((1,), (3,))
    empty = {"edge_type": torch.tensor([], dtype=torch.int64)}
    assert declared.kind_counts(empty) == KindCounts((0,), (0,))
    assert declared.kind_counts({}) is None


def test_one_input_of_kinds_counts_for_each_symbol():
    slots = (
        InputSlot("z", "INT64", ("N",), low=0, high=9),
        InputSlot("mask", "BOOL", ("N",)),
        InputSlot("kind", "INT8", ("E",), low=3, high=5),
        InputSlot("atoms", "INT64", ("N", 3), low=0, high=9),
        InputSlot("many", "INT64", ("M",), low=0, high=1000),
        InputSlot("at", "INT64", (2, "E"), index=("N",)),
    )
    declared = Interface(slots, ())
    assert [slot.name for slot in declared.kinds] == ["z", "kind"]
    made = {"z": np.array([1, 1, 2]), "kind": np.array([4, 4, 4, 3], np.int8)}
    assert declared.kind_counts(made) == KindCounts((0, 1), (2, 3))
    assert declared.kind_counts(made).most == (2, 3)


@pytest.mark.parametrize(
    ("num_nodes", "of_each"), [(20, (123, 113, 90, 113)), (56, (296, 293, 288, 261))]
)
def test_kinds_that_are_sorted_take_the_same_in_any_mix(num_nodes, of_each):
    """On the kernels a relation's edges are a part of all edges, and none are taken out."""
    loaded, estimator = measured(Relational, 4, "csr")
    assert not estimator.counts_kinds
    counts = num_nodes, sum(of_each)
    kinds = np.random.default_rng(0).permutation(np.repeat(np.arange(4), of_each))
    declared = loaded.spec.interface
    inputs = declared_graph(declared, counts, Shape.PLAIN) | {"edge_type": torch.from_numpy(kinds)}
    run = functools.partial(loaded.outputs, inputs)
    run()
    staged = sum(tensor.nbytes for tensor in inputs.values())
    took = staged + trace(run, loaded.module, *counts).peak_bytes
    peak_bytes, _ = estimator.memory(*counts, by_kind=declared.kind_counts(inputs))
    assert took <= peak_bytes <= 1.01 * took
