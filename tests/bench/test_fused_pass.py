"""One pass for several tasks gives each what a pass of its own gives, to the bit."""

import pytest
import torch

from bench.papers.aggregate_many import LAYOUTS, aggregate_many
from bench.papers.fused_pass import (
    WORTH,
    compared,
    graph_of,
    hybrid,
    in_two_lanes,
    random_features,
    sums,
)
from serve.lane.executors.kernels import Csr, aggregate, normalised

#: Below and above a vector, whole vectors, and what the registers do not hold at once.
WIDTHS = (4, 7, 16, 17, 47, 64, 100, 256, 300)


@pytest.fixture(scope="module")
def graph():
    return graph_of(60, 700)


def pairs_of_equals(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fused_pass_is_a_pass_for_each(graph, width, parts, layout):
    features = random_features(graph, width, parts)
    weights = [torch.rand(graph.slots) for _ in features]
    for mean in (False, True):
        reduce = "mean" if mean else "sum"
        pairs_of_equals(
            aggregate_many(graph, features, layout, mean=mean),
            [aggregate(graph, tensor, None, reduce) for tensor in features],
        )
        pairs_of_equals(
            aggregate_many(graph, features, layout, weights, mean=mean),
            [
                aggregate(graph, tensor, weight, reduce)
                for tensor, weight in zip(features, weights, strict=True)
            ],
        )


def test_nodes_without_edges_get_zeros():
    graph = Csr(torch.tensor([[0, 0], [1, 1]]), 40, replace_loops=False, edges=False)
    features = random_features(graph, 16, 3)
    for layout in LAYOUTS:
        for found, tensor in zip(aggregate_many(graph, features, layout), features, strict=True):
            assert torch.equal(found[1], 2 * tensor[0])
            assert not found[2:].any()


def test_features_of_another_shape_are_refused(graph):
    with pytest.raises(ValueError, match="must be float32"):
        aggregate_many(graph, [torch.randn(60, 8), torch.randn(60, 9)], "in_pairs")
    with pytest.raises(ValueError, match="contiguous"):
        aggregate_many(graph, [torch.randn(60, 8)[:, ::2]], "in_pairs")
    with pytest.raises(ValueError, match="of 4 to 4096"):
        aggregate_many(graph, [torch.randn(60, 3)], "in_pairs")
    with pytest.raises(ValueError, match="at most 16"):
        aggregate_many(graph, random_features(graph, 4, 17), "in_pairs")


def test_all_ways_of_a_case_give_the_same(graph):
    features = random_features(graph, 48, 4)
    for ways in (sums(graph, features), hybrid(graph, features)):
        for way in ways.values():
            pairs_of_equals(way(), ways["apart"]())
    ways = in_two_lanes(graph, 48, 4)
    for way in ways.values():
        for lane, other in zip(way(), ways["apart"](), strict=True):
            pairs_of_equals(lane, other)


def test_a_backward_pass_along_the_same_edges_is_the_gradient(graph):
    tensors = random_features(graph, 16, 2)
    found = hybrid(graph, tensors)["in_pairs"]()[1]
    x = torch.randn(graph.rows, 16, requires_grad=True)
    aggregate(graph, x, normalised(graph, None)).backward(tensors[1])
    assert torch.equal(found, x.grad)


def test_a_fused_pass_is_worth_it_by_the_best_of_its_orders(graph):
    row = compared(sums(graph, random_features(graph, 4, 2)), 3)
    assert row["worth"] == (max(row[layout][0] for layout in LAYOUTS) >= WORTH)
    assert {"apart_ms", "together", "best"} <= row.keys()
