"""Which models need the nodes of one graph side by side."""

import pytest
import torch
from torch_geometric.nn import global_add_pool
from torch_geometric.utils import softmax

from bench.kit.padded_models import load
from serve.interface import InputSlot, Interface, TensorSlot
from serve.lane.measure.batch_order import needs_sorted_batch
from serve.lane.measure.probe_signature import probe_signature

#: Authors and papers, each in one of three graphs, and who wrote what.
TYPED = Interface(
    (
        InputSlot("x.a", "FP32", ("A", 2)),
        InputSlot("x.p", "FP32", (2, "P")),
        InputSlot("writes", "INT64", (2, "W"), index=("A", "P")),
        InputSlot("batch.a", "INT64", ("A",), index=("G",)),
        InputSlot("batch.p", "INT64", ("P",), index=("G",)),
    ),
    (TensorSlot("pooled", "FP32", ("G", 2)), TensorSlot("y", "FP32", (2, "P"))),
)
GRAPHS = {
    "x.a": torch.arange(12.0).reshape(6, 2),
    "x.p": torch.tensor([[1.0, 2, 4, 8, 16], [3, 5, 7, 11, 13]]),
    "writes": torch.tensor([[0, 1, 2, 3, 4, 5, 5], [0, 1, 2, 3, 3, 4, 4]]),
    "batch.a": torch.tensor([0, 0, 0, 1, 1, 2]),
    "batch.p": torch.tensor([0, 0, 0, 1, 2]),
}


def typed(arrays):
    """Pools what the authors of each paper have, and tells each paper its share of that."""
    author, paper = arrays["writes"]
    share = softmax(arrays["x.p"].sum(0), arrays["batch.p"])
    had = torch.zeros(share.shape[0], 2).index_add_(0, paper, arrays["x.a"][author])
    return global_add_pool(had, arrays["batch.p"]), (had * share[:, None] + arrays["x.p"].T).T


@pytest.mark.parametrize("short", [False, True], ids=["declared", "short"])
@pytest.mark.parametrize("name", ["gps", "dense", "attention pooling"])
def test_models_that_make_a_block_of_each_graph_need_it(name, short):
    assert probe_signature(load(name, short=short)).needs_sorted_batch


def test_a_model_that_only_pools_does_not():
    assert not needs_sorted_batch(typed, TYPED, GRAPHS, deterministic=True)


def test_a_model_that_counts_from_where_a_graph_begins_does():
    def first_of_each(arrays):
        pooled, y = typed(arrays)
        starts = torch.searchsorted(arrays["batch.a"], torch.arange(3)).clamp(max=5)
        return pooled + arrays["x.a"][starts], y

    assert needs_sorted_batch(first_of_each, TYPED, GRAPHS, deterministic=True)
    # Of a model that draws at random, another answer tells nothing.
    assert not needs_sorted_batch(first_of_each, TYPED, GRAPHS, deterministic=False)


def test_a_model_that_raises_does_whether_or_not_it_draws_at_random():
    def strict(arrays):
        if (arrays["batch.a"].diff() < 0).any():
            raise ValueError("batch is not sorted")
        return typed(arrays)

    assert needs_sorted_batch(strict, TYPED, GRAPHS, deterministic=False)


def test_order_within_a_graph_stays():
    def positions(arrays):
        in_graph = torch.stack([
            (arrays["batch.a"][:at] == graph).sum() for at, graph in enumerate(arrays["batch.a"])
        ])  # fmt: skip
        pooled, y = typed(arrays)
        return pooled + global_add_pool(arrays["x.a"] * in_graph[:, None], arrays["batch.a"]), y

    assert not needs_sorted_batch(positions, TYPED, GRAPHS, deterministic=True)


def test_a_model_without_graphs_is_not_asked():
    def never(arrays):
        raise AssertionError

    whole = Interface(TYPED.inputs[:3], TYPED.outputs[1:])
    assert not needs_sorted_batch(never, whole, GRAPHS, deterministic=True)
