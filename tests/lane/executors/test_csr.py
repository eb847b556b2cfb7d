from types import MethodType

import pytest
import torch
from torch import nn
from torch_geometric.nn import CGConv, GCNConv, SAGEConv

from serve.lane.executors import CannotRun, kernels
from tests.lane.executors.test_convs import CASES


class Doubled(GCNConv):
    """A user's layer: what it calls a message is its own."""

    def message(self, x_j, edge_weight):
        return 2 * super().message(x_j, edge_weight)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.known, self.own = SAGEConv(12, 12), Doubled(12, 12)
        self.edges = CGConv(12)

    def forward(self, x, edge_index):
        return self.edges(self.own(self.known(x, edge_index), edge_index), edge_index)


def test_only_known_layers_are_replaced(agree):
    _, other, _ = agree(Mixed)
    assert "forward" in vars(other.module.known)
    assert "forward" not in vars(other.module.own)


def test_a_model_without_a_known_layer_is_refused(twins):
    with pytest.raises(CannotRun, match=r"\(Doubled\): it is not among those known"):
        twins(lambda: Doubled(12, 3))


def test_a_model_without_convolutions_is_refused(twins):
    with pytest.raises(CannotRun, match="no graph convolution"):
        twins(lambda: nn.Linear(12, 3), inputs=("x",))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: SAGEConv(12, 3, aggr="std"), "aggr is std"),
        (lambda: SAGEConv(12, 3, aggr=["mean", "max"]), r"aggr is \['mean', 'max'\]"),
        (lambda: GCNConv(12, 3, flow="target_to_source"), "flow is target_to_source"),
    ],
)
def test_options_that_are_not_covered_are_named(twins, make, why):
    with pytest.raises(CannotRun, match=why):
        twins(make)


def test_a_layer_somebody_hooked_into_is_left_alone(twins):
    def make():
        conv = SAGEConv(12, 3)
        conv.lin_l.register_forward_hook(lambda *_: None)
        return conv

    with pytest.raises(CannotRun, match="has hooks"):
        twins(make)


class Dropping(nn.Module):
    """Drops features out in training, or at every run as it is told."""

    def __init__(self):
        super().__init__()
        self.conv, self.dropout, self.always = GCNConv(12, 12), nn.Dropout(), False

    def forward(self, x, edge_index):
        self.dropout.train(self.always)
        return self.dropout(self.conv(x, edge_index))


def test_a_layer_that_drops_nothing_costs_no_call_and_one_that_does_still_does(agree):
    _, other, _ = agree(Dropping)
    x = torch.ones(50, 12)
    assert other.module.dropout.forward(x) is x
    assert not isinstance(other.module.dropout.forward, MethodType)
    other.module.always = True
    out = other.run({"x": x, "edge_index": torch.arange(50).repeat(2, 1)})
    dropped = (out == 0).float().mean()
    assert 0.3 < dropped < 0.7


def test_without_the_extension_there_is_no_csr(twins, monkeypatch):
    monkeypatch.setattr(kernels, "UNAVAILABLE", "the compiled extension is missing")
    with pytest.raises(CannotRun, match="extension is missing"):
        twins(lambda: SAGEConv(12, 3))


@pytest.mark.parametrize("name", ["gcn", "gine", "edge", "edge sum", "gated"])
def test_memory_is_linear_in_nodes_and_edges(twins, name):
    """Also for self-loops, which the kernels drop: room is made for all that could stay."""
    from serve.estimate.memory import peak_at
    from serve.lane.measure.memory import measure_memory
    from serve.lane.measure.probe_graphs import Shape, probe_graph
    from serve.lane.measure.tracing import trace

    make, options = CASES[name]
    _, other, signature = twins(make, **options)
    memory = measure_memory(other, signature, max_bytes=1 << 28)
    assert memory.warning == ""
    for shape in (Shape.PLAIN, Shape.LOOPS, Shape.STAR):
        inputs = probe_graph(500, 4_000, shape, other.spec.inputs, signature)
        found = trace(lambda inputs=inputs: other.run(inputs), other.module, 500, 4_000)
        assert found.peak_bytes == pytest.approx(peak_at(memory.activations, 500, 4_000), rel=0.01)
        assert torch.isfinite(other.run(inputs)).all()
