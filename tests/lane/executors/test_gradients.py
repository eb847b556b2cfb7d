"""Training on csr: gradients of every layer that it covers are PyG's, and alike bit by bit."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric.nn import (
    APPNP,
    ARMAConv,
    ChebConv,
    GATConv,
    GCNConv,
    GINConv,
    GraphConv,
    SAGEConv,
    SGConv,
    TAGConv,
)

from serve.lane.executors import kernels
from serve.lane.executors.csr import CannotRun, train_with_csr

NODES, EDGES, FEATURES = 60, 300, 12


def graph(nodes=NODES, edges=EDGES, seed=3):
    """Return features and edges with loops, repeated edges and nodes that nothing leads to."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, max(1, nodes * 3 // 4), (2, edges), generator=generator)
    return torch.randn(nodes, FEATURES, generator=generator), pairs


class Layers(nn.Module):
    """Layers with a dropout between them."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, edge_index, *more):
        for number, layer in enumerate(self.layers):
            if number:
                x = nn.functional.dropout(x.relu(), 0.3, self.training)
            x = layer(x, edge_index, *more)
        return x


def gradients(module, *given_, after=lambda: None):
    """Return the output and the gradients of a made-up loss."""
    torch.manual_seed(7)
    for one in given_:
        one.grad = None
    out = module(*given_)
    after()
    loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
    torch.autograd.backward(loss)
    wanted = {name: one.grad for name, one in module.named_parameters()}
    wanted |= {f"input {number}": one.grad for number, one in enumerate(given_)}
    return out.detach(), wanted


def twins(*makes):
    made = []
    for _ in range(2):
        torch.manual_seed(5)
        made.append(Layers(*(make() for make in makes)).train())
    plain, fused = made
    return plain, fused, train_with_csr(fused, "layers")


def mlp(*widths):
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return nn.Sequential(layers[0], nn.BatchNorm1d(widths[1]), nn.ReLU(), *layers[1:])


LAYERS = {
    "gcn": (lambda: GCNConv(12, 8), lambda: GCNConv(8, 20)),
    "gcn-improved": (lambda: GCNConv(12, 8, improved=True), lambda: GCNConv(8, 9, bias=False)),
    "sage": (lambda: SAGEConv(12, 8), lambda: SAGEConv(8, 20)),
    "sage-sum": (lambda: SAGEConv(12, 8, aggr="sum", project=True), lambda: SAGEConv(8, 20)),
    "gin": (lambda: GINConv(mlp(12, 8, 8)), lambda: GINConv(mlp(8, 20, 4))),
    "gin-eps": (lambda: GINConv(mlp(12, 8, 8), train_eps=True), lambda: GINConv(mlp(8, 9, 4))),
    "graph": (lambda: GraphConv(12, 8), lambda: GraphConv(8, 20, aggr="mean")),
    "cheb": (lambda: ChebConv(12, 8, K=3), lambda: ChebConv(8, 4, K=2)),
    "arma": (lambda: ARMAConv(12, 8), lambda: ARMAConv(8, 4)),
    "tag": (lambda: TAGConv(12, 8), lambda: TAGConv(8, 4)),
    "sg": (lambda: SGConv(12, 8, K=2), lambda: SGConv(8, 4)),
    "appnp": (lambda: nn_linear(12, 8), lambda: APPNP(4, 0.1)),
    "sage-max": (lambda: SAGEConv(12, 8, aggr="max"), lambda: GCNConv(8, 4)),
    "gat": (lambda: GATConv(12, 4, heads=2), lambda: GCNConv(8, 4)),
}


def nn_linear(*widths):
    class Mapped(nn.Linear):
        def forward(self, x, edge_index):
            return super().forward(x)

    return Mapped(*widths)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_pyg(name):
    plain, fused, after = twins(*LAYERS[name])
    x, edges = graph()
    given_ = [x.requires_grad_(), edges]
    expected, wanted = gradients(plain, *given_)
    found, got = gradients(fused, *given_, after=after)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert got.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-4, atol=1e-4, msg=key)
    again, same = gradients(fused, *given_, after=after)
    assert torch.equal(found, again)
    assert all(one is None or torch.equal(one, same[key]) for key, one in got.items())


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", ["gcn", "graph", "tag"])
def test_weights_of_edges_count_and_get_gradients_where_they_are_learned(name, learned):
    plain, fused, after = twins(*LAYERS[name])
    x, edges = graph()
    weight = torch.rand(EDGES, generator=torch.Generator().manual_seed(4)).requires_grad_(learned)
    expected, wanted = gradients(plain, x, edges, weight)
    found, got = gradients(fused, x, edges, weight, after=after)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for key, gradient in wanted.items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-4, atol=1e-4, msg=key)
    assert (got["input 2"] is not None) == learned


@given(
    nodes=st.integers(1, 20), edges=st.integers(0, 60), seed=st.integers(0, 99),
    reduce=st.sampled_from(kernels.DIFFERENTIABLE), loops=st.booleans(), weighted=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_gradient_is_that_of_a_dense_matrix(nodes, edges, seed, reduce, loops, weighted):
    x, pairs = graph(nodes, edges, seed)
    sorted_ = kernels.Csr(pairs, nodes, replace_loops=loops, edges=True)
    slots = sorted_.slots
    weight = torch.rand(len(sorted_.tensor), generator=torch.Generator().manual_seed(1))
    weight = weight[: (len(sorted_.tensor) - nodes - 1) // 2] if weighted else None
    dense = torch.zeros(nodes, nodes, dtype=torch.float64)
    begin = sorted_.tensor[: nodes + 1].tolist()
    source = sorted_.tensor[nodes + 1 :].tolist()
    for row in range(nodes):
        for slot in range(begin[row], begin[row + 1]):
            dense[row, source[slot]] += 1.0 if weight is None else float(weight[slot])
    if reduce == "mean":
        dense /= sorted_.degrees.clamp(min=1).unsqueeze(1)
    assert sorted_.reversed.slots == slots
    skip = torch.randn(nodes, FEATURES, generator=torch.Generator().manual_seed(2))
    given_ = [one.requires_grad_() for one in (x, skip, torch.ones(FEATURES))]
    out = kernels.aggregate(
        sorted_, given_[0], weight, reduce, skip=given_[1], skip_scale=0.5, bias=given_[2],
        relu=True,
    )  # fmt: skip
    exact = [one.detach().double().requires_grad_() for one in given_]
    expected = (dense @ exact[0] + 0.5 * exact[1] + exact[2]).relu()
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
    scale = torch.linspace(-1, 1, out.numel()).view(out.shape)
    torch.autograd.backward((out * scale).sum())
    torch.autograd.backward((expected * scale).sum())
    for one, other in zip(given_, exact, strict=True):
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=1e-4, atol=1e-5)


def test_what_has_no_gradient_says_so():
    x, edges = graph()
    sorted_ = kernels.Csr(edges, NODES, replace_loops=False, edges=True)
    with pytest.raises(ValueError, match="'max' has no gradient; known: sum, mean"):
        kernels.aggregate(sorted_, x.requires_grad_(), None, "max")
    weight = torch.ones(EDGES, requires_grad=True)
    with pytest.raises(ValueError, match="weights of edges have no gradient"):
        kernels.aggregate(sorted_, x, weight)
    with pytest.raises(CannotRun, match="aggr is max"):
        train_with_csr(Layers(SAGEConv(12, 8, aggr="max")).train(), "one")
    with pytest.raises(CannotRun, match="its attention has no gradient here"):
        train_with_csr(Layers(GATConv(12, 8)).train(), "one")


def test_a_step_forgets_its_graph():
    _, fused, after = twins(*LAYERS["gcn"])
    x, edges = graph()
    before, _ = gradients(fused, x, edges, after=after)
    edges.copy_(edges.flip(1))
    other, _ = gradients(fused, x, edges.flip(0), after=after)
    assert not torch.equal(before, other)
