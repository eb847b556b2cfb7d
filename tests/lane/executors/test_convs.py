"""Every fused convolution, with every option it covers, against PyG's own forward."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch_geometric.nn import (
    APPNP,
    ARMAConv,
    CGConv,
    ChebConv,
    ClusterGCNConv,
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    GINConv,
    GINEConv,
    GraphConv,
    LGConv,
    MFConv,
    PNAConv,
    ResGatedGraphConv,
    RGCNConv,
    SAGEConv,
    SGConv,
    SimpleConv,
    SSGConv,
    TAGConv,
    TransformerConv,
)

from serve.lane.executors import kernels
from serve.lane.executors.check import needs_exact_sizes
from tests.lane.waits import Counting

EDGE_DIM = 8  # what bench.kit.architectures.wrap says edge_attr has
WEIGHTED = ("x", "edge_index", "edge_weight")
ATTRIBUTED = ("x", "edge_index", "edge_attr")


class TwoLayers(nn.Module):
    """Two layers, so that what a run remembers of its graph is used twice."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, *edges):
        return self.second(self.first(x, *edges).relu(), *edges)


def narrowing(conv, **options):
    """12 -> 8 -> 20: one layer maps first, the other aggregates first."""
    return lambda: TwoLayers(conv(12, 8, **options), conv(8, 20, **options))


def heads(conv, **options):
    def make():
        wide = 3 * 5 if options.get("concat", True) else 5
        return TwoLayers(conv(12, 5, heads=3, **options), conv(wide, 33, heads=1, **options))

    return make


def pna(aggregators, scalers, **options):
    degrees = torch.tensor([1, 4, 16, 8])
    return narrowing(PNAConv, aggregators=aggregators, scalers=scalers, deg=degrees, **options)


def perceptron(*layers):
    return lambda: GINConv(nn.Sequential(*layers), eps=0.3, train_eps=True)


def gine(**options):
    return lambda: TwoLayers(
        GINEConv(nn.Linear(12, 8), eps=0.3, edge_dim=EDGE_DIM, **options),
        GINEConv(nn.Sequential(nn.Linear(8, 100), nn.ReLU()), edge_dim=EDGE_DIM),
    )


def edge_conv(*layers, **options):
    return lambda: EdgeConv(nn.Sequential(*layers), **options)


class Relations(nn.Module):
    """RGCN layers; the largest of an edge's features says which relation it is."""

    def __init__(self, widths=(12, 8, 5), **options):
        super().__init__()
        self.convs = nn.ModuleList(RGCNConv(a, b, EDGE_DIM, **options) for a, b in pairwise(widths))

    def forward(self, x, edge_index, edge_attr):
        relation = edge_attr.argmax(1)
        for conv in self.convs:
            x = conv(x, edge_index, relation).relu()
        return x


class FirstKept(nn.Module):
    """Three GCN2 layers, which all take the first features."""

    def __init__(self, **options):
        super().__init__()
        self.convs = nn.ModuleList(GCN2Conv(12, 0.3, **options) for _ in range(3))

    def forward(self, x, edge_index, edge_weight=None):
        out = x
        for conv in self.convs:
            out = conv(out, x, edge_index, edge_weight).relu()
        return out


CASES = {
    "gcn": (narrowing(GCNConv), {}),
    "gcn weighted": (narrowing(GCNConv), {"inputs": WEIGHTED}),
    "gcn improved weighted": (narrowing(GCNConv, improved=True), {"inputs": WEIGHTED}),
    "gcn improved": (narrowing(GCNConv, improved=True), {}),
    "gcn without loops": (narrowing(GCNConv, add_self_loops=False), {}),
    "gcn not normalised": (narrowing(GCNConv, normalize=False), {"inputs": WEIGHTED}),
    "gcn without bias": (narrowing(GCNConv, bias=False), {}),
    "sage": (narrowing(SAGEConv), {}),
    "sage max": (narrowing(SAGEConv, aggr="max"), {}),
    "sage min": (narrowing(SAGEConv, aggr="min"), {}),
    "sage sum, normalised": (narrowing(SAGEConv, aggr="add", normalize=True), {}),
    "sage projecting": (narrowing(SAGEConv, project=True), {}),
    "sage without root": (narrowing(SAGEConv, root_weight=False), {}),
    "sage without bias": (narrowing(SAGEConv, bias=False), {}),
    "graph": (narrowing(GraphConv), {}),
    "graph weighted": (narrowing(GraphConv), {"inputs": WEIGHTED}),
    "graph max weighted": (narrowing(GraphConv, aggr="max"), {"inputs": WEIGHTED}),
    "gin narrowing": (perceptron(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 6)), {}),
    "gin widening": (perceptron(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 6)), {}),
    "gin normed": (perceptron(nn.Linear(12, 5), nn.BatchNorm1d(5), nn.ReLU()), {}),
    "gin mean": (lambda: GINConv(nn.Linear(12, 5), aggr="mean"), {}),
    "gat": (heads(GATConv), {}),
    "gat averaged": (heads(GATConv, concat=False), {}),
    "gat without loops": (heads(GATConv, add_self_loops=False), {}),
    "gat residual": (heads(GATConv, residual=True, negative_slope=0.4), {}),
    "gat attributed": (heads(GATConv, edge_dim=EDGE_DIM), {"inputs": ATTRIBUTED}),
    "gat attributed without loops": (
        heads(GATConv, edge_dim=EDGE_DIM, add_self_loops=False),
        {"inputs": ATTRIBUTED},
    ),
    "gatv2": (heads(GATv2Conv), {}),
    "gatv2 shared": (heads(GATv2Conv, share_weights=True, residual=True), {}),
    "gatv2 averaged": (heads(GATv2Conv, concat=False, add_self_loops=False), {}),
    "transformer": (heads(TransformerConv), {}),
    "transformer averaged": (heads(TransformerConv, concat=False), {}),
    "transformer without root": (heads(TransformerConv, root_weight=False), {}),
    "gine": (gine(), {"inputs": ATTRIBUTED}),
    "gine mean": (gine(aggr="mean"), {"inputs": ATTRIBUTED}),
    "gine of as many features": (
        lambda: GINEConv(nn.Linear(EDGE_DIM, 5), eps=0.2),
        {"inputs": ATTRIBUTED, "features": EDGE_DIM},
    ),
    "edge": (edge_conv(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5)), {}),
    "edge sum": (edge_conv(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5), aggr="add"), {}),
    "edge mean": (edge_conv(nn.Linear(24, 70), nn.ReLU(), nn.Linear(70, 5), aggr="mean"), {}),
    "edge linear": (edge_conv(nn.Linear(24, 5), aggr="min"), {}),
    "edge normed": (edge_conv(nn.Linear(24, 9), nn.BatchNorm1d(9), nn.LeakyReLU()), {}),
    "gated": (narrowing(ResGatedGraphConv), {}),
    "gated wide, without root": (
        lambda: ResGatedGraphConv(12, 150, root_weight=False, bias=False),
        {},
    ),
    "pna": (pna(["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]), {}),
    "pna linear": (pna(["sum", "var"], ["linear", "inverse_linear"]), {}),
    "pna in towers": (pna(["mean", "min"], ["identity"], towers=2, post_layers=2), {}),
    "pna divided": (pna(["max"], ["attenuation"], towers=4, divide_input=True), {}),
    "cheb": (narrowing(ChebConv, K=3), {}),
    "cheb of one term": (narrowing(ChebConv, K=1), {}),
    "cheb weighted": (narrowing(ChebConv, K=4), {"inputs": WEIGHTED}),
    "cheb by rows": (narrowing(ChebConv, K=3, normalization="rw"), {"inputs": WEIGHTED}),
    "cheb not normalised": (narrowing(ChebConv, K=3, normalization=None), {}),
    "cheb not normalised, weighted": (
        narrowing(ChebConv, K=2, normalization=None, bias=False),
        {"inputs": WEIGHTED},
    ),
    "sg": (narrowing(SGConv, K=2), {}),
    "sg weighted": (narrowing(SGConv, K=3, bias=False), {"inputs": WEIGHTED}),
    "sg without loops": (narrowing(SGConv, K=1, add_self_loops=False), {}),
    "ssg": (narrowing(SSGConv, alpha=0.2, K=3), {"inputs": WEIGHTED}),
    "tag": (narrowing(TAGConv), {}),
    "tag weighted": (narrowing(TAGConv, K=2, bias=False), {"inputs": WEIGHTED}),
    "tag not normalised": (narrowing(TAGConv, normalize=False), {"inputs": WEIGHTED}),
    "appnp": (lambda: TwoLayers(APPNP(4, 0.1), APPNP(3, 0.2)), {"inputs": WEIGHTED}),
    "appnp not normalised": (lambda: APPNP(3, 0.1, normalize=False), {}),
    "gcn2": (lambda: FirstKept(), {}),
    "gcn2 of two matrices": (
        lambda: FirstKept(theta=0.5, layer=2, shared_weights=False),
        {"inputs": WEIGHTED},
    ),
    "gcn2 not normalised": (lambda: FirstKept(normalize=False), {}),
    "cluster": (narrowing(ClusterGCNConv), {}),
    "cluster diagonal": (narrowing(ClusterGCNConv, diag_lambda=0.4, bias=False), {}),
    "light": (lambda: TwoLayers(LGConv(), LGConv()), {}),
    "light not normalised": (lambda: LGConv(normalize=False), {"inputs": WEIGHTED}),
    "relations": (lambda: Relations(num_bases=None), {"inputs": ATTRIBUTED}),
    "relations of bases": (lambda: Relations(num_bases=2, aggr="add"), {"inputs": ATTRIBUTED}),
    "relations, largest": (
        lambda: Relations(aggr="max", root_weight=False, bias=False),
        {"inputs": ATTRIBUTED},
    ),
    "relations of blocks": (lambda: Relations(num_blocks=1), {"inputs": ATTRIBUTED}),
    "relations of several blocks": (
        lambda: Relations((12, 8, 20), num_blocks=4),
        {"inputs": ATTRIBUTED},
    ),
    # The generic way.
    "arma": (narrowing(ARMAConv), {}),
    "arma stacked": (narrowing(ARMAConv, num_stacks=2, num_layers=2), {"inputs": WEIGHTED}),
    "mf": (narrowing(MFConv), {}),
    "simple max": (lambda: TwoLayers(SimpleConv(aggr="max"), SimpleConv()), {"inputs": WEIGHTED}),
}


@pytest.mark.parametrize("name", CASES)
def test_gives_what_pyg_gives(agree, name):
    make, options = CASES[name]
    _, other, _ = agree(make, **options)
    assert other.executor == "csr"


#: Layers whose own code, which stays, waits for the device.
WAITING = {"mf"}
#: Those, and layers whose own code looks up the ends of every pair.
EXACT = {*WAITING, "arma", "arma stacked"}


@pytest.mark.parametrize("name", CASES)
def test_waits_for_no_device(twins, name):
    """Else no run on a GPU can be captured."""
    make, options = CASES[name]
    _, other, signature = twins(make, **options)
    wanted = options.get("inputs", ("x", "edge_index"))
    own = {"edge_weight": torch.rand(80), "edge_attr": torch.randn(80, EDGE_DIM)}
    inputs = inputs_of(features=options.get("features", 12)) | own
    with Counting() as counting, kernels.as_on_devices():
        other.run({key: inputs[key] for key in wanted})
    on_devices = not any(name.startswith(one) for one in ("edge", "gated", "gine"))
    assert not (counting.names and on_devices) or name in WAITING, counting.names
    assert (needs_exact_sizes(other, signature) == "") == (on_devices and name not in EXACT)


def test_what_is_no_relation_raises(twins):
    """As PyG does; the kernels must neither read there nor count it to another relation."""

    class Types(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = RGCNConv(12, 5, 3)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index[:, :-1], edge_index[1, 1:] % self.kinds + self.first)

        kinds, first = 3, 0

    _, other, _ = twins(Types)
    other.run(inputs_of())
    for kinds, first in ((4, 0), (1, -1), (1, 3)):
        other.module.kinds, other.module.first = kinds, first
        with pytest.raises(IndexError, match="outside"):
            other.run(inputs_of())
    other.module.kinds, other.module.first = 3, 0
    for row, node in ((0, 30), (0, 59), (1, 30), (1, -1), (0, -1)):
        inputs = inputs_of()
        inputs["edge_index"][row, 7] = node
        with pytest.raises(IndexError, match="outside"):
            other.run(inputs)


class Narrows(nn.Module):
    """Two layers on the same edges, the second without the nodes behind their last."""

    def __init__(self, kind, of_edges):
        super().__init__()
        self.first, self.second = kind(12, 8, EDGE_DIM), kind(8, 5, EDGE_DIM)
        self.of_edges = of_edges

    def forward(self, x, edge_index, edge_attr):
        rows, of_edges = len(x), self.of_edges(edge_attr)
        x = self.first(torch.cat([x, x]), edge_index, of_edges)
        return self.second(x[:rows], edge_index, of_edges)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Narrows(ChebConv, lambda attr: attr[:, 0].abs().contiguous()),
        lambda: Narrows(RGCNConv, lambda attr: attr.argmax(1)),
    ],
)
def test_a_graph_of_other_rows_is_another_one(agree, make):
    agree(make, inputs=ATTRIBUTED)


def test_a_graph_of_layers_is_made_once_a_run(twins, monkeypatch):
    """Six Chebyshev convolutions of a recurrent layer read one Laplacian."""
    _, other, _ = twins(lambda: TwoLayers(ChebConv(12, 8, K=3), ChebConv(8, 5, K=2)))
    made, csr = [], kernels._csr
    monkeypatch.setattr(kernels, "_csr", lambda *given: made.append(given) or csr(*given))
    other.run(inputs_of())
    assert len(made) == 2  # by source, for degrees, and by target


def inputs_of(nodes=30, edges=80, features=12):
    torch.manual_seed(1)
    return {"x": torch.randn(nodes, features), "edge_index": torch.randint(nodes, (2, edges))}


def test_takes_int32_edges(twins):
    eager, other, _ = twins(narrowing(GCNConv))
    inputs = inputs_of()
    expected = eager.run(inputs)
    given = other.run(inputs | {"edge_index": inputs["edge_index"].int()})
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("conv", [GCNConv, SAGEConv])
def test_an_edge_to_nowhere_raises(twins, conv):
    """What a model makes of its edges was checked by nobody: the kernels must not read there."""
    _, other, _ = twins(narrowing(conv))
    inputs = inputs_of()
    inputs["edge_index"][1, 7] = 30
    with pytest.raises(IndexError, match=r"outside \[0, 30\)"):
        other.run(inputs)


class Rewires(nn.Module):
    """Changes its edges between layers, in place and not, in a tensor of its own."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(12, 12) for _ in range(4))

    def forward(self, x, edge_index):
        first, second, third, fourth = self.convs
        x = first(x, edge_index)
        own = edge_index.clone()
        x = second(x, own)
        own[1] = own[1].flip(0)
        x = third(x, own)
        return fourth(x, edge_index.flip(0))


def test_edges_changed_between_layers_are_seen(agree):
    agree(Rewires)


class Overwrites(nn.Module):
    """Changes the request's own edges between layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv(12, 12), SAGEConv(12, 12)

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        edge_index[1] = edge_index[1].flip(0)
        return self.second(x, edge_index)


def test_a_request_changed_in_place_is_seen(twins):
    eager, other, _ = twins(Overwrites)
    inputs = inputs_of()
    copy = {name: value.clone() for name, value in inputs.items()}
    torch.testing.assert_close(other.run(inputs), eager.run(copy))


class Unusual(nn.Module):
    """Calls its layers in ways that only PyG's forward covers."""

    def __init__(self):
        super().__init__()
        self.sage, self.gat = SAGEConv(12, 12), GATConv(12, 12)

    def forward(self, x, edge_index):
        x = self.sage((x, x), edge_index, size=(len(x), len(x)))
        x, (_, alpha) = self.gat(x, edge_index, return_attention_weights=True)
        return x * alpha.mean()


def test_calls_that_are_not_covered_go_to_pyg(agree):
    agree(Unusual)


def test_nothing_of_a_run_is_kept(twins):
    _, other, _ = twins(narrowing(GCNConv))
    graphs = other.module.first.forward.graphs
    other.run(inputs_of())
    assert graphs._made == {}
    inputs = inputs_of()
    inputs["edge_index"][0, 0] = -1
    with pytest.raises(IndexError):
        other.run(inputs)
    assert graphs._made == {}


def test_the_generic_way_reads_messages_in_one_kernel(twins, monkeypatch):
    """Every propagation goes through it, the graph is sorted once a layer, nothing is kept."""
    _, other, _ = twins(narrowing(ARMAConv, num_layers=3))
    sorted_edges, reduced = [], []
    aggregate, csr = kernels.aggregate, kernels._csr
    monkeypatch.setattr(
        kernels, "aggregate", lambda *given: reduced.append(given) or aggregate(*given)
    )
    monkeypatch.setattr(kernels, "_csr", lambda *given: sorted_edges.append(given) or csr(*given))
    other.run(inputs_of())
    layer = other.module.first
    assert len(reduced) == 2 * 3
    assert 1 <= len(sorted_edges) <= 2
    assert layer.forward.graphs._recent is None


class Halved(LGConv):
    """A user's own message, though of the right form."""

    def message(self, x_j, edge_weight):
        return super().message(x_j, edge_weight) / 2


@pytest.mark.parametrize("make", [Halved, lambda: CGConv(12)])
def test_other_messages_keep_their_code(make):
    from serve.lane.executors.graphs import Graphs
    from serve.lane.executors.propagate import Propagated

    with pytest.raises(ValueError, match=r"not among those known|its message"):
        Propagated(make().eval(), Graphs())
