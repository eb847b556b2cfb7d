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
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    SAGEConv,
    SGConv,
    TAGConv,
    TransformerConv,
)

from serve.lane.executors import attention_gradients, kernels
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
    "gat": (lambda: GATConv(12, 4, heads=2), lambda: GATConv(8, 5, heads=3, concat=False)),
    "gat-wide": (lambda: GATConv(12, 20, heads=4, residual=True), lambda: GATConv(80, 3)),
    "gatv2": (lambda: GATv2Conv(12, 4, heads=2), lambda: GATv2Conv(8, 19, 3, concat=False)),
    "gatv2-shared": (
        lambda: GATv2Conv(12, 16, 2, share_weights=True, residual=True),
        lambda: GATv2Conv(32, 3, add_self_loops=False),
    ),
    "transformer": (
        lambda: TransformerConv(12, 4, 2),
        lambda: TransformerConv(8, 18, 3, concat=False, root_weight=False),
    ),
    "gat-dropout": (lambda: GATConv(12, 4, heads=2, dropout=0.5), lambda: GCNConv(8, 4)),
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


@given(
    nodes=st.integers(1, 20), edges=st.integers(0, 60), seed=st.integers(0, 99),
    score=st.sampled_from(["additive", "dynamic", "dot"]), heads=st.sampled_from([1, 3, 4]),
    channels=st.sampled_from([1, 3, 4, 7, 16, 21]), loops=st.booleans(), average=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_gradient_of_attention_is_that_of_dense_matrices(
    nodes, edges, seed, score, heads, channels, loops, average
):
    _, pairs = graph(nodes, edges, seed)
    sorted_ = kernels.Csr(pairs, nodes, replace_loops=loops, edges=False)
    generator = torch.Generator().manual_seed(seed)

    def made(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    width = heads * channels
    scored = heads if score == "additive" else width
    given_ = [made(nodes, scored), made(nodes, scored), made(nodes, width)]
    given_ += [made(1, heads, channels)] if score == "dynamic" else []
    scale = 0.3
    out = attention_gradients.attend(
        sorted_, score, *given_[:3], heads, scale=scale, average=average,
        att=given_[3] if score == "dynamic" else None,
    )  # fmt: skip
    exact = [one.detach().double().requires_grad_() for one in given_]
    expected = dense_attention(sorted_, score, exact, heads, scale)
    expected = expected.mean(1) if average else expected.reshape(nodes, width)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    torch.autograd.backward((out * weights).sum())
    torch.autograd.backward((expected * weights).sum())
    for one, other in zip(given_, exact, strict=True):
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=1e-4, atol=1e-4)


def dense_attention(sorted_, score, tensors, heads, scale):
    """Return [N, H, C] over a matrix of the counts of slots, in float64."""
    left, right, value = (one.view(sorted_.rows, heads, -1) for one in tensors[:3])
    begin, source = sorted_.tensor[: sorted_.rows + 1].tolist(), sorted_.tensor[sorted_.rows + 1 :]
    out = []
    for row in range(sorted_.rows):
        sources = source[begin[row] : begin[row + 1]].long()
        pairs = left[sources], right[row]
        if score == "dot":
            scores = scale * (pairs[0] * pairs[1]).sum(-1)
        else:
            scores = nn.functional.leaky_relu(pairs[0] + pairs[1], scale)
            scores = scores.squeeze(-1) if score == "additive" else (scores * tensors[3]).sum(-1)
        out.append((scores.softmax(0).unsqueeze(-1) * value[sources]).sum(0))
    return torch.stack(out)


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
    with pytest.raises(CannotRun, match="it drops out weights of its attention"):
        train_with_csr(Layers(GATConv(12, 8, dropout=0.5)).train(), "one")
    with pytest.raises(CannotRun, match="features of edges in attention have no gradient here"):
        train_with_csr(Layers(GATConv(12, 8, edge_dim=3)).train(), "one")


def test_a_step_forgets_its_graph():
    _, fused, after = twins(*LAYERS["gcn"])
    x, edges = graph()
    before, _ = gradients(fused, x, edges, after=after)
    edges.copy_(edges.flip(1))
    other, _ = gradients(fused, x, edges.flip(0), after=after)
    assert not torch.equal(before, other)
