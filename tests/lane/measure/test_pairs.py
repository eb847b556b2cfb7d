"""Estimates of models that work on pairs of things in one graph."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

from bench.kit import gallery
from serve.estimate import ModelEstimator, Overhead
from serve.estimate.graph_sizes import graph_sizes
from serve.graphs.random_inputs import declared_inputs
from serve.interface import InputSlot, Interface, TensorSlot
from serve.lane.measure.calibrate import calibrate
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.measure.tracing import trace
from serve.lane.models.declared import DeclaredForward
from serve.lane.models.loader import LoadedModel
from serve.models.repository import ModelSpec


class Blocks(nn.Module):
    """Multiplies each pair of things of one graph, found without comparing all things."""

    def forward(self, x, batch):
        sizes = torch.bincount(batch)
        begins = sizes.cumsum(0) - sizes
        mates = sizes[batch]
        source = torch.repeat_interleave(torch.arange(len(x)), mates)
        nth = torch.arange(len(source)) - (mates.cumsum(0) - mates)[source]
        target = begins[batch][source] + nth
        return torch.zeros(len(sizes), 8).index_add_(0, batch[source], x[source] * x[target])


class Pooled(nn.Module):
    """Compares all things, whatever graphs they are in."""

    def forward(self, x, batch):
        return torch.zeros(int(batch.max()) + 1, 8).index_add_(0, batch, torch.cdist(x, x) @ x)


DECLARED = Interface(
    (InputSlot("x", "FP32", ("N", 8)), InputSlot("batch", "INT64", ("N",), index=("G",))),
    (TensorSlot("y", "FP32", ("G", 8)),),
)


@functools.cache
def measured(model):
    if isinstance(model, str):
        loaded = gallery.load(model)
    else:
        spec = ModelSpec(
            name="m", version=1, folder="", factory="", args={}, weights="", weights_bytes=0,
            inputs=("x", "batch"), interface=DECLARED, qos_factor=None,
        )  # fmt: skip
        module = model().eval()
        loaded = LoadedModel(spec, module, declared=DeclaredForward(module, DECLARED, "m:1"))
    found = calibrate(loaded, probe_signature(loaded), budget_s=0.3, max_bytes=64 << 20)
    return loaded, ModelEstimator(found, Overhead())


def split(sizes, name="N"):
    """Return the graph of each thing, of graphs of these sizes."""
    return np.repeat(np.arange(len(sizes)), sizes)


SPLITS = ([900], [1] * 900, [30] * 30, [450] + [1] * 450, [300, 300, 300], [9] * 100)


@pytest.mark.parametrize("model", [Blocks, "schnet"])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_memory_follows_the_sizes_of_graphs(model, sizes):
    loaded, estimator = measured(model)
    assert estimator.counts_graphs
    interface = loaded.spec.interface
    arrays = declared_inputs(
        interface, (900,), np.random.default_rng(3), graphs=lambda things: split(sizes)
    )
    sizes_of = graph_sizes(loaded.spec.batches, arrays, (900,))
    counts = 900, *estimator.graphs.told(sizes_of)
    assert counts == (900, sum(size**2 for size in sizes))
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    run = functools.partial(loaded.outputs, inputs)
    run()
    took = sum(t.nbytes for t in inputs.values()) + trace(run, loaded.module, 900).peak_bytes
    estimate, _ = estimator.memory(*counts)
    assert took <= estimate <= 1.9 * took
    assert estimate <= estimator.memory(900)[0]


def test_time_follows_the_sizes_of_graphs():
    _, estimator = measured(Blocks)
    one, many = estimator.fitted_ns(2_000, 2_000**2), estimator.fitted_ns(2_000, 2_000)
    assert one > 3 * many
    assert estimator.fitted_ns(2_000) == one


def test_pairs_are_not_counted_where_all_things_are_compared():
    assert measured(Pooled)[1].calibration.memory.curve is not None
    assert not measured(Pooled)[1].counts_graphs


def test_pairs_are_not_counted_where_memory_is_linear():
    assert not measured("molecules")[1].counts_graphs


def test_a_union_has_the_pairs_of_its_parts():
    _, estimator = measured(Blocks)
    parts = [(900, 900 * 30), (900, 900 * 30)]
    union, whole = estimator.union(parts), estimator.estimate(1_800, 1_800 * 30)
    assert union.peak_bytes >= whole.peak_bytes
    assert union.peak_bytes < 0.2 * estimator.memory(1_800)[0]
    # Of a part whose pairs were not counted, all things are in one graph.
    assert estimator.union([(900,), parts[1]]).peak_bytes > 2 * union.peak_bytes


def test_a_run_is_learned_from_at_its_pairs():
    _, estimator = measured(Blocks)
    counts = 900, 900 * 30
    for _ in range(20):
        estimator.observe_union([counts], 3 * estimator.fitted_ns(*counts))
    assert estimator.estimate(*counts).run_ns == pytest.approx(
        3 * estimator.fitted_ns(*counts), rel=0.1
    )


def test_pairs_are_counted_of_what_tells_graphs():
    slots = (
        InputSlot("x.a", "FP32", ("A", 2)),
        InputSlot("batch.a", "INT64", ("A",), index=("G",)),
        InputSlot("x.b", "FP32", ("B", 2)),
        InputSlot("batch.b", "INT32", ("B",), index=("G",), optional=True),
        InputSlot("edges", "INT64", (2, "E"), index=("A", "B")),
    )
    declared = Interface(slots, ())
    assert [slot.name for slot in declared.batches] == ["batch.a", "batch.b"]
    arrays = {"batch.a": np.array([1, 0, 1]), "batch.b": np.array([], np.int32)}
    counts = tuple({"A": 3, "B": 0, "E": 5}[symbol] for symbol in declared.counts)
    batches = [(slot.name, declared.counts.index(slot.symbols[0])) for slot in declared.batches]
    assert [one.pairs for one in graph_sizes(batches, arrays, counts)] == [5, 0]
    assert [one.pairs for one in graph_sizes(batches, {}, counts)] == [9, 0]
