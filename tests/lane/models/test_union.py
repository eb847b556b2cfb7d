"""Graphs merged into one disjoint union and taken apart again, against each by itself."""

import pytest
import torch
from torch_geometric.nn import GCNConv, SAGEConv, global_mean_pool

from serve.errors import ModelError
from serve.lane.measure.probe_signature import probe_inputs, probe_signature
from serve.lane.models.loader import LoadedModel
from serve.lane.models.union import join, rows_wanted, run_union
from serve.models.repository import ModelSpec

SIZES = ((7, 12, 2), (1, 0, 1), (30, 90, 3))


class Nodes(torch.nn.Module):
    """One row per node; `norm` is what else is done to the features."""

    def __init__(self, norm=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.conv = SAGEConv(4, 3)
        self.norm = norm

    def forward(self, x, edge_index):
        return self.norm(self.conv(x, edge_index))


class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = GCNConv(4, 3)

    def forward(self, x, edge_index, edge_weight):
        return self.conv(x, edge_index, edge_weight)


class Graphs(Nodes):
    def forward(self, x, edge_index, batch):
        return global_mean_pool(self.conv(x, edge_index), batch)


class Whole(Nodes):
    """One row per request, whatever `batch` would say."""

    def forward(self, x, edge_index):
        return self.conv(x, edge_index).mean(dim=0, keepdim=True)


def loaded(module, *inputs):
    spec = ModelSpec(
        name="m", version=1, folder="", factory="", args={"in_channels": 4}, inputs=inputs,
        qos_factor=None, weights="", weights_bytes=0,
    )  # fmt: skip
    return LoadedModel(spec, module.eval())


NODES = loaded(Nodes(), "x", "edge_index")
WEIGHTED = loaded(Weighted(), "x", "edge_index", "edge_weight")
GRAPHS = loaded(Graphs(), "x", "edge_index", "batch")


def graphs_for(model, *sizes):
    names = model.spec.inputs
    return [
        {name: value for name, value in probe_inputs(*size, 4, None).items() if name in names}
        for size in sizes
    ]


@pytest.mark.parametrize(
    ("model", "rows"), [(NODES, "node"), (WEIGHTED, "node"), (GRAPHS, "graph")]
)
@pytest.mark.parametrize("sizes", [SIZES, SIZES[:1], SIZES[::-1], ((5, 8, 1),) * 4])
def test_each_gets_what_it_gets_alone(model, rows, sizes):
    graphs = graphs_for(model, *sizes)
    for merged, graph in zip(run_union(model, graphs, rows), graphs, strict=True):
        torch.testing.assert_close(merged, model.run(graph))


def test_graphs_without_nodes_or_edges_take_part():
    sizes = ((0, 0, 0), (3, 0, 1), (0, 0, 0), (4, 6, 1))
    for model, rows in ((NODES, "node"), (GRAPHS, "graph")):
        outputs = run_union(model, graphs_for(model, *sizes), rows)
        assert [len(output) for output in outputs] == (
            [0, 3, 0, 4] if model is NODES else [0, 1, 0, 1]
        )


def test_what_some_leave_out_has_its_default():
    weighted, plain = graphs_for(WEIGHTED, *SIZES[:1], SIZES[2])
    del plain["edge_weight"]
    outputs = run_union(WEIGHTED, [weighted, plain], "node")
    torch.testing.assert_close(outputs[1], WEIGHTED.run(plain))
    pooled, single = graphs_for(GRAPHS, *SIZES[:1], SIZES[2])
    del single["batch"]
    outputs = run_union(GRAPHS, [single, pooled], "graph")
    assert [len(output) for output in outputs] == [1, 2]
    torch.testing.assert_close(outputs[0], GRAPHS.run(single))


def test_narrow_and_wide_edges_mix():
    first, second = graphs_for(NODES, *SIZES[:1], SIZES[2])
    narrow = {**first, "edge_index": first["edge_index"].int()}
    joined, _ = join([narrow, second], NODES.spec.inputs)
    assert joined["edge_index"].dtype == torch.int64
    expected, _ = join([first, second], NODES.spec.inputs)
    assert torch.equal(joined["edge_index"], expected["edge_index"])
    joined, _ = join([narrow, narrow], NODES.spec.inputs)
    assert joined["edge_index"].dtype == torch.int32


def test_another_number_of_rows_is_no_answer():
    whole = loaded(Whole(), "x", "edge_index")
    with pytest.raises(ModelError, match="2 graphs merged gave 1 rows, they should give 2"):
        run_union(whole, graphs_for(whole, *SIZES[:2]), "graph")


def test_the_rows_that_a_graph_is_to_get():
    (three,) = graphs_for(GRAPHS, (30, 90, 3))
    assert (rows_wanted(three, "node"), rows_wanted(three, "graph")) == (30, 3)
    del three["batch"]
    assert rows_wanted(three, "graph") == 1
    for graph in graphs_for(GRAPHS, (0, 0, 0)) + graphs_for(NODES, (0, 0, 0)):
        assert rows_wanted(graph, "node") == rows_wanted(graph, "graph") == 0


@pytest.mark.parametrize(
    ("model", "mergeable"),
    [
        (NODES, True),
        (WEIGHTED, True),
        (GRAPHS, True),
        (loaded(Whole(), "x", "edge_index"), False),
        (loaded(Nodes(lambda x: x - x.mean(dim=0)), "x", "edge_index"), False),
        (loaded(Nodes(lambda x: x + torch.randn(1)), "x", "edge_index"), False),
        (loaded(Nodes(lambda x: x * len(x)), "x", "edge_index"), False),
    ],
    ids=["nodes", "weighted", "pooled", "unpooled", "normalised", "random", "by size"],
)
def test_which_models_may_be_merged_is_found_out(model, mergeable):
    assert probe_signature(model).mergeable is mergeable
