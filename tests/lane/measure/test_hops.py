import pytest
import torch
from torch_geometric.nn import APPNP, GATConv, GCNConv, GINConv, SAGEConv

from serve.lane.measure.hops import FARTHEST_HOPS, probe_reach


class Net(torch.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return x


class Mean(torch.nn.Module):
    def forward(self, x, edge_index):
        return x - x.mean(dim=0)


class Rowwise(torch.nn.Module):
    def forward(self, x, edge_index):
        return x * 2


class Raises(torch.nn.Module):
    def forward(self, x, edge_index):
        raise RuntimeError("no path for me")


class Loaded:
    """As much of a LoadedModel as is looked at."""

    def __init__(self, module, inputs=("x", "edge_index")):
        torch.manual_seed(0)
        self.module = module.eval()
        self.spec = type("Spec", (), {"inputs": inputs})

    def run(self, inputs):
        with torch.inference_mode():
            return self.module(*(inputs[name] for name in ("x", "edge_index")))


def gin():
    return GINConv(torch.nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (lambda: Net(SAGEConv(4, 4)), (1, 1)),
        (lambda: Net(SAGEConv(4, 8), SAGEConv(8, 4), SAGEConv(4, 4)), (3, 3)),
        (lambda: Net(GATConv(4, 4), GATConv(4, 4)), (2, 2)),
        (lambda: Net(gin(), gin()), (2, 2)),
        # A neighbour's degree is a hop further than the neighbour.
        (lambda: Net(GCNConv(4, 4), GCNConv(4, 4)), (2, 3)),
        (lambda: Net(APPNP(5, 0.1)), (5, 6)),
        (lambda: Net(*(SAGEConv(4, 4) for _ in range(8))), (8, 8)),
        (Rowwise, (0, 0)),
        (Mean, (None, None)),
        (Raises, (None, None)),
        (lambda: Net(*(SAGEConv(4, 4) for _ in range(FARTHEST_HOPS + 1))), (None, None)),
    ],
)
def test_how_far_models_look(module, expected):
    assert probe_reach(Loaded(module()), 4) == expected


def test_a_model_that_needs_more_than_a_graph_holds_is_not_looked_at():
    assert probe_reach(Loaded(Rowwise(), ("x", "edge_index", "edge_attr")), 4) == (None, None)
