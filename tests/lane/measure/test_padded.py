"""Estimates of models that pad the graphs of a batch to the largest."""

import functools

import numpy as np
import pytest

from bench.kit import gallery
from bench.kit.padded_models import MODELS, load, request
from bench.kit.uneven_batches import uneven_graphs
from serve.estimate import ModelEstimator, Overhead
from serve.estimate.graph_sizes import GraphSizes, GraphTerms, graph_sizes
from serve.lane.measure.calibrate import calibrate
from serve.lane.measure.memory import measure_memory
from serve.lane.measure.padded import pads
from serve.lane.measure.probe import ModelProbe
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.measure.tracing import trace
from serve.lane.measure.where_measured import Processor


@functools.cache
def measured(name, short=False):
    loaded = load(name, short=short)
    found = calibrate(loaded, probe_signature(loaded), budget_s=0.3, max_bytes=64 << 20)
    return loaded, ModelEstimator(found, Overhead())


def needed(loaded, inputs):
    """Bytes of inputs and tensors at the peak of a run."""
    found = trace(lambda: loaded.outputs(inputs), loaded.module)
    return sum(tensor.nbytes for tensor in inputs.values()) + found.peak_bytes


def told(loaded, estimator, counts, inputs):
    return counts + estimator.graphs.told(graph_sizes(loaded.spec.batches, inputs, counts))


@pytest.mark.parametrize("name", ["gps", "dense", "attention pooling"])
@pytest.mark.parametrize("short", [False, True], ids=["declared", "short"])
def test_memory_of_uneven_batches_is_never_under_and_near(name, short):
    loaded, estimator = measured(name, short)
    assert estimator.counts_graphs
    assert estimator.calibration.memory.curve is None
    rng = np.random.default_rng(4)
    errors = []
    for sizes in uneven_graphs(rng, 20 if short else 200):
        counts, inputs = request(loaded, sizes, rng)
        need = needed(loaded, inputs)
        estimate, reserve = estimator.memory(*told(loaded, estimator, counts, inputs))
        assert estimate >= 0.999 * need - 8192, sizes
        assert reserve >= need, sizes
        if need > 1_000_000:
            errors.append(estimate / need - 1)
    assert np.median(errors) < 0.02
    assert max(errors) < 0.25


def test_a_model_that_pads_and_is_not_linear_either_is_bounded_and_says_so():
    loaded, estimator = measured("compared")
    assert estimator.counts_graphs
    assert "upper bound" in estimator.calibration.warning
    rng = np.random.default_rng(5)
    for sizes in uneven_graphs(rng, 40):
        counts, inputs = request(loaded, sizes[:20], rng)
        estimate, _ = estimator.memory(*told(loaded, estimator, counts, inputs))
        assert needed(loaded, inputs) <= estimate, sizes


@pytest.mark.parametrize("name", ["gps", "dense"])
def test_a_union_is_padded_to_the_largest_graph_of_all(name):
    loaded, estimator = measured(name)
    rng = np.random.default_rng(6)
    for _ in range(60):
        each = [sizes[:40] for sizes in uneven_graphs(rng, int(rng.integers(2, 6)))]
        parts = []
        for sizes in each:
            counts, inputs = request(loaded, sizes, rng)
            parts.append(told(loaded, estimator, counts, inputs))
        counts, inputs = request(loaded, [size for sizes in each for size in sizes], rng)
        need = needed(loaded, inputs)
        union = estimator.union(parts)
        assert union.peak_bytes >= need, each
        whole, _ = estimator.memory(*told(loaded, estimator, counts, inputs))
        staged = estimator.input_bytes(*counts) + 512 * len(parts)
        assert union.peak_bytes == whole + staged


def test_one_graph_is_meant_where_sizes_are_not_told():
    _, estimator = measured("dense")
    one = estimator.graphs.told([GraphSizes(900**2, 1, 900)])
    assert estimator.memory(900, 2_700) == estimator.memory(900, 2_700, *one)


@pytest.mark.parametrize("name", MODELS)
def test_models_that_pad_are_found(name):
    loaded = load(name)
    assert pads(ModelProbe(loaded, probe_signature(loaded), Processor()))


@pytest.mark.parametrize("name", ["molecules", "schnet", "gine", "nnconv", "graphsage"])
def test_other_models_keep_their_estimates(name):
    loaded = gallery.load(name)
    signature = probe_signature(loaded)
    assert not pads(ModelProbe(loaded, signature, Processor()))
    assert not measure_memory(loaded, signature, max_bytes=16 << 20).graphs.padded


def test_terms_of_graphs():
    padded = GraphTerms((0,), padded=True)
    sizes = graph_sizes([("batch", 0)], {"batch": np.array([0, 3, 3, 1, 3])}, (5, 7))
    assert sizes == [GraphSizes(pairs=11, graphs=4, most=3)]
    counts = (5, 7, *padded.told(sizes))
    assert padded.terms(counts, 2) == (5, 7, 11, 4, 12, 36)
    assert padded.terms((5, 7), 2) == (5, 7, 25, 1, 5, 25)
    union = padded.joined([counts, (2, 0), (6, 1, 6, 6, 1)], 2)
    assert union == (13, 8, 21, 11, 3)
    assert GraphTerms((0,)).terms((5, 7), 2) == (5, 7, 25)
    assert GraphTerms().joined([(5, 7), (1, 2)], 2) == (6, 9)


def test_kinds_of_things_share_their_graphs():
    batches = [("batch.a", 0), ("batch.b", 1)]
    arrays = {"batch.a": np.array([0, 4]), "batch.b": np.array([1, 1, 1])}
    sizes = graph_sizes(batches, arrays, (2, 3))
    assert sizes == [GraphSizes(2, 5, 1), GraphSizes(9, 5, 3)]
    terms = GraphTerms((0, 1), padded=True)
    counts = (2, 3, *terms.told(sizes))
    assert terms.terms(counts, 2) == (2, 3, 2, 9, 5, 5, 5, 15, 5, 45)
