"""One pass for several tasks gives each what a pass of its own gives."""

import torch

from bench.papers.fused_pass import WORTH, compared, put_together
from serve.lane.executors.kernels import Csr, aggregate


def graph_of(nodes, edges):
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(0, nodes, (2, edges), generator=generator)
    return Csr(pairs, nodes, replace_loops=False, edges=False)


def test_what_is_put_together_is_what_each_task_gets_apart():
    graph = graph_of(50, 400)
    tensors = [torch.randn(50, width) for width in (3, 16, 5)]
    found = put_together(graph, tensors)
    for sums, tensor in zip(found, tensors, strict=True):
        assert sums.is_contiguous()
        torch.testing.assert_close(sums, aggregate(graph, tensor))


def test_a_pass_is_worth_it_by_its_own_gain_and_not_by_the_bound():
    row = compared(graph_of(50, 400), 4, 2, 3)
    assert row["worth"] == (row["together_gain"][1] >= WORTH)
    assert {"apart_ms", "as_one_ms", "together_ms"} <= row.keys()
