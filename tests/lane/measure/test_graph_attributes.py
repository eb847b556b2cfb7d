"""Models that take an attribute of each graph, whose rows tell how many graphs there are."""

import numpy as np
import pytest

from bench.kit.padded_models import declared, load, request
from bench.kit.uneven_batches import uneven_graphs
from serve.estimate import ModelEstimator, Overhead
from serve.graphs.random_inputs import declared_inputs
from serve.lane.measure.calibrate import calibrate
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.measure.tracing import trace

COUNTS = declared("of graphs").counts


def test_graphs_are_counted_apart_from_nodes():
    interface = declared("of graphs")
    assert (interface.nodes, interface.counts) == (("N",), ("N", "E", "G"))
    assert interface.spread(100, 300) == (100, 300, 10)
    assert interface.spread(0, 0) == (0, 0, 0)
    assert interface.with_nodes_in_each((4, 9, 20)) == (4, 9, 4)
    assert interface.with_nodes_in_each((4, 9, 0)) == (4, 9, 1)
    assert interface.with_nodes_in_each((0, 0, 1)) == (0, 0, 0)


@pytest.mark.parametrize("counts", [(9, 20, 3), (3, 0, 3), (1, 1, 1), (0, 0, 0)])
def test_every_graph_has_a_node(counts):
    made = declared_inputs(declared("of graphs"), counts, np.random.default_rng(0))
    assert np.unique(made["batch"]).tolist() == list(range(counts[2]))
    assert made["u"].shape == (counts[2], 2)


def test_such_a_model_runs_and_merges():
    found = probe_signature(load("of graphs"))
    assert found.mergeable
    assert not found.needs_sorted_batch


def test_a_model_that_pads_as_well_needs_a_sorted_batch():
    assert probe_signature(load("dense of graphs")).needs_sorted_batch


@pytest.mark.parametrize("name", ["of graphs", "dense of graphs"])
def test_memory_is_never_under_however_nodes_are_divided(name):
    loaded = load(name)
    found = calibrate(loaded, probe_signature(loaded), budget_s=0.1, max_bytes=64 << 20)
    estimator = ModelEstimator(found, Overhead())
    rng = np.random.default_rng(6)
    for sizes in uneven_graphs(rng, 40):
        counts, inputs = request(loaded, sizes[:50], rng)
        traced = trace(lambda: loaded.outputs(inputs), loaded.module)  # noqa: B023
        need = sum(tensor.nbytes for tensor in inputs.values()) + traced.peak_bytes
        estimate, reserve = estimator.memory(*counts)
        assert estimate >= 0.999 * need - 8192, sizes
        assert reserve >= need, sizes
