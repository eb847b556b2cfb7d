import logging
from dataclasses import replace

import pytest
import torch
from torch_geometric.nn import CGConv, GATConv, GCNConv, GINEConv, GraphConv, SAGEConv
from torch_geometric.utils import coalesce

from serve.lane.executors import VARIANTS, kernels
from serve.lane.executors import choose as choosing
from serve.lane.executors.check import disagreement, needs_exact_sizes, takes_narrow_edges
from serve.lane.executors.choose import ExecutorOptions, choose
from serve.lane.executors.csr import CannotRun
from serve.lane.measure.probe_graphs import Shape
from serve.lane.measure.where_measured import Processor

LIMIT = 1 << 30


@pytest.fixture
def fresh(twins, monkeypatch):
    """The eager model and its signature; loading it again gives a new one of the same weights."""

    def build(make):
        from bench.kit.architectures import wrap

        def load(_=None):
            torch.manual_seed(5)
            return wrap(make(), "model", ("x", "edge_index"), 12)

        monkeypatch.setattr(choosing, "load_model", lambda _: load()[0])
        return load()

    return build


def test_takes_the_faster_one(fresh, monkeypatch):
    eager, signature = fresh(lambda: SAGEConv(12, 3))
    for ratios, expected in (([0.2, 0.9], "csr"), ([1.2, 1.1], "eager")):
        monkeypatch.setattr(choosing, "_race", lambda *_, ratios=ratios: [ratios])
        chosen = choose(eager, signature, ExecutorOptions(max_bytes=LIMIT))
        assert chosen.loaded.executor == expected
        assert f"{min(ratios):.2f} to {max(ratios):.2f}" in chosen.reason


def test_races_over_sizes_within_memory(fresh):
    eager, signature = fresh(lambda: SAGEConv(12, 3))
    fast = choose(eager, signature, ExecutorOptions("csr", LIMIT)).loaded
    (ratios,) = choosing._race([eager, fast], signature, LIMIT, Processor())
    assert all(ratio > 0 for ratio in ratios)
    short = choosing._race([eager, fast], signature, 1 << 16, Processor())
    assert len(short[0]) < len(choosing._SIZES)


@pytest.mark.parametrize("wanted", ["eager", "csr"])
def test_what_is_asked_for_is_taken(fresh, wanted):
    eager, signature = fresh(lambda: SAGEConv(12, 3))
    assert choose(eager, signature, ExecutorOptions(wanted, LIMIT)).loaded.executor == wanted


@pytest.mark.parametrize("wanted", ["auto", "csr"])
def test_falls_back_with_the_reason(fresh, wanted, caplog):
    eager, signature = fresh(lambda: CGConv(12))
    with caplog.at_level(logging.WARNING):
        chosen = choose(eager, signature, ExecutorOptions(wanted, LIMIT))
    assert chosen.loaded is eager
    assert "CGConv" in chosen.reason
    assert chosen.reason in caplog.text


def test_an_executor_that_answers_otherwise_never_serves(fresh, monkeypatch):
    from serve.lane.executors.convs import FusedSAGE

    honest = FusedSAGE.fused
    monkeypatch.setattr(FusedSAGE, "fused", lambda *given: honest(*given) * 1.001)
    eager, signature = fresh(lambda: SAGEConv(12, 3))
    chosen = choose(eager, signature, ExecutorOptions("csr", LIMIT))
    assert chosen.loaded is eager
    assert "another answer" in chosen.reason


class Reciprocal(torch.nn.Module):
    """A layer, and the reciprocal of degrees: infinite for nodes without edges."""

    def __init__(self, factor):
        super().__init__()
        self.conv, self.factor = SAGEConv(12, 3), factor

    def forward(self, x, edge_index):
        degrees = torch.zeros(len(x)).index_add_(0, edge_index[1], torch.ones(edge_index.shape[1]))
        return torch.cat([self.factor * self.conv(x, edge_index), 1 / degrees[:, None]], dim=1)


class Centre(torch.nn.Module):
    """A mean over all nodes, which is no number where there are none."""

    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(12, 3)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index).mean(dim=0, keepdim=True)


def test_answers_that_are_no_finite_numbers_are_compared_too(agree, twins, monkeypatch):
    agree(Centre)
    agree(lambda: Reciprocal(1.0))
    eager, _, signature = twins(lambda: Reciprocal(1.0))
    _, other, _ = twins(lambda: Reciprocal(1.5))
    isolated = torch.rand(5, 12), torch.tensor([[0, 1], [1, 2]])
    graphs = [("with isolated nodes", dict(zip(("x", "edge_index"), isolated, strict=True)))]
    monkeypatch.setattr("serve.lane.executors.check._graphs", lambda *_: graphs)
    assert "with isolated nodes it is off by" in disagreement(eager, other, signature)


def test_a_model_that_refuses_all_graphs_cannot_be_compared(twins, monkeypatch):
    eager, other, signature = twins(lambda: SAGEConv(12, 3))
    narrow = {"x": torch.rand(5, 2), "edge_index": torch.tensor([[0], [1]])}
    monkeypatch.setattr("serve.lane.executors.check._graphs", lambda *_: [("narrow", narrow)])
    assert disagreement(eager, other, signature) == "the model answers no probe graph"


def test_a_model_of_chance_cannot_be_compared(twins):
    import msgspec

    eager, other, signature = twins(lambda: SAGEConv(12, 3))
    signature = msgspec.structs.replace(signature, deterministic=False)
    assert "not give the same answer" in disagreement(eager, other, signature)


class _Gpu(Processor):
    """The processor in the place of a GPU."""

    name = "cuda:0"


@pytest.fixture
def variants(fresh, monkeypatch):
    """Chooses among variants of the given ratios by shape; returns the choice and what raced.

    Where they come first, those in `busy_for` take `busy` times as long.
    """

    def build(ratios, wanted="csr", site=None, busy_for=(), busy=1.0):
        eager, signature = fresh(lambda: SAGEConv(12, 3))
        raced = []

        def race(contenders, signature, max_bytes, site, sizes=(), shape=Shape.PLAIN):
            names = [one.executor for one in contenders]
            if names[0] == "eager":
                return [[0.5]]
            raced.append((*names, shape))
            if names[0] == "csr":
                return [ratios[names[1]][shape]]
            slower = busy if names[0] in busy_for else 1.0
            return [[1 / (slower * ratio) for ratio in ratios[names[0]][shape]]]

        monkeypatch.setattr(choosing, "_race", race)
        options = ExecutorOptions(wanted, LIMIT, site=site or _Gpu())
        return choose(eager, signature, options), raced

    return build


def _ratios(**of):
    """Times of variants as shares of those of `csr`, alike where nothing is given."""
    return {name: of.get(name, {shape: [1.0] for shape in Shape}) for name in VARIANTS}


@pytest.mark.parametrize("wanted", ["auto", "csr"])
def test_the_fastest_variant_serves_on_a_gpu(variants, wanted):
    ratios = _ratios(
        csr_few_ahead={Shape.PLAIN: [0.9, 0.9], Shape.STAR: [0.9, 0.9]},
        csr_shuffled={Shape.PLAIN: [0.9, 0.8], Shape.STAR: [0.7]},
    )
    chosen, raced = variants(ratios, wanted)
    assert chosen.loaded.executor == "csr_shuffled"
    assert "csr_shuffled takes 0.70 to 0.90 of csr's time" in chosen.reason
    assert sorted(raced, key=str) == sorted(
        (
            (*pair, shape)
            for name in VARIANTS
            for pair in (("csr", name), (name, "csr"))
            for shape in (Shape.PLAIN, Shape.STAR)
        ),
        key=str,
    )


@pytest.mark.parametrize(
    "ratios",
    [
        {Shape.PLAIN: [0.97], Shape.STAR: [0.95]},
        # Many small graphs must not pay for one with a hub.
        {Shape.PLAIN: [1.1, 1.1], Shape.STAR: [0.3]},
    ],
)
def test_a_variant_that_gains_little_or_not_everywhere_does_not_serve(variants, ratios):
    chosen, _ = variants(_ratios(csr_short_pieces=ratios))
    assert chosen.loaded.executor == "csr"
    assert chosen.reason == ""


def test_a_variant_must_win_both_races(variants):
    """The one that was fast by chance is not."""
    half = {shape: [0.5] for shape in Shape}
    ratios = _ratios(csr_few_ahead=half, csr_shuffled={shape: [0.8] for shape in Shape})
    chosen, _ = variants(ratios, busy_for=("csr_few_ahead",), busy=1.95)
    assert chosen.loaded.executor == "csr_shuffled"


def test_a_variant_that_answers_otherwise_never_serves(variants, monkeypatch):
    honest = choosing.disagreement

    def disagreement(eager, found, *more):
        return "it is off" if found.executor in VARIANTS else honest(eager, found, *more)

    monkeypatch.setattr(choosing, "disagreement", disagreement)
    half = {shape: [0.5] for shape in Shape}
    chosen, _ = variants(_ratios(csr_short_pieces=half))
    assert chosen.loaded.executor == "csr"
    assert "csr_short_pieces" in chosen.reason
    assert "it is off" in chosen.reason


def test_variants_do_not_race_on_the_processor(variants):
    chosen, raced = variants(_ratios(), site=Processor())
    assert (chosen.loaded.executor, raced) == ("csr", [])


def test_variants_race_on_graphs_of_both_shapes(fresh):
    """On the processor all of them are one."""
    eager, signature = fresh(lambda: SAGEConv(12, 3))
    chosen = choose(eager, signature, ExecutorOptions("csr", 1 << 20, site=_Gpu()))
    assert chosen.loaded.executor in ("csr", *VARIANTS)


@pytest.fixture
def compiler(fresh, monkeypatch, tmp_path):
    """Stands in for compiling and loading: the names compiled, and what they then run."""
    compiled, problem = [], {}

    def compile_apart(spec, signature, name, package, timeout_s):
        if name in problem:
            raise CannotRun(problem[name])
        compiled.append(name)

    def with_executor(loaded, name, *package):
        if name not in ("compiled", "csr_compiled"):
            return real(loaded, name, *package)
        return replace(loaded, executor=name)

    real = choosing.with_executor
    monkeypatch.setattr(choosing, "compile_apart", compile_apart)
    monkeypatch.setattr(choosing, "with_executor", with_executor)
    return compiled, problem, tmp_path


@pytest.mark.parametrize(
    ("make", "expected"),
    [(lambda: SAGEConv(12, 3), "csr_compiled"), (lambda: CGConv(12), "compiled")],
)
def test_auto_compiles_where_it_may(fresh, compiler, monkeypatch, make, expected):
    """Over our kernels where they run the model, else what PyG wrote."""
    compiled, _, folder = compiler
    eager, signature = fresh(make)
    monkeypatch.setattr(
        choosing, "_race", lambda found, *_: [[0.9 / place] for place in range(1, len(found))]
    )
    told = []
    chosen = choose(
        eager,
        signature,
        ExecutorOptions(max_bytes=LIMIT, package=folder, compiling=lambda: told.append(1)),
    )
    assert chosen.loaded.executor == expected
    assert (compiled, told) == ([expected], [1])
    assert f"{expected} takes" in chosen.reason

    compiled.clear()
    assert choose(eager, signature, ExecutorOptions(max_bytes=LIMIT)).loaded.executor != expected
    assert not compiled


@pytest.mark.parametrize(
    ("wanted", "served"), [("csr_compiled", "csr"), ("compiled", "eager"), ("auto", "csr")]
)
def test_without_a_compiler_the_next_best_serves(fresh, compiler, monkeypatch, wanted, served):
    _, problem, folder = compiler
    problem |= {"compiled": "there is no g++", "csr_compiled": "there is no g++"}
    eager, signature = fresh(lambda: SAGEConv(12, 3))
    monkeypatch.setattr(choosing, "_race", lambda found, *_: [[0.5] for _ in found[1:]])
    chosen = choose(eager, signature, ExecutorOptions(wanted, LIMIT, folder))
    assert chosen.loaded.executor == served
    assert "there is no g++" in chosen.reason


class Lopsided(torch.nn.Module):
    """A fused layer, and edges used by the model itself."""

    def __init__(self, use):
        super().__init__()
        self.conv, self.use = SAGEConv(12, 3), use

    def forward(self, x, edge_index):
        return self.conv(x, edge_index) + self.use(x, edge_index)


def by_scatter(x, edge_index):
    return torch.zeros(len(x), 3).scatter_add_(
        0, edge_index.t(), torch.ones(edge_index.shape[1], 2)
    )


def by_widening(x, edge_index):
    return torch.zeros(1) + (edge_index.long() < 0).any()


@pytest.mark.parametrize(
    ("make", "narrow"),
    [
        (lambda: SAGEConv(12, 3), True),
        (lambda: GATConv(12, 3), True),
        (lambda: Lopsided(by_scatter), False),
        (lambda: Lopsided(by_widening), False),
    ],
    ids=["sage", "gat", "raises", "takes more memory"],
)
def test_edges_stay_narrow_only_where_nothing_widens_them(agree, make, narrow):
    _, fast, signature = agree(make)
    assert takes_narrow_edges(fast, signature, Processor()) == narrow


def by_pairs(x, edge_index):
    """Numbers edges among all pairs of nodes, as PyG's coalesce does."""
    pairs = coalesce(edge_index)
    return torch.zeros(1) + (pairs[0] < 0).any()


def by_adding(x, edge_index):
    numbers = torch.add(edge_index[1], edge_index[0], alpha=len(x))
    return torch.zeros(1) + (numbers < 0).any()


@pytest.mark.parametrize("use", [by_pairs, by_adding])
def test_edges_that_a_model_computes_with_stay_wide(agree, use):
    """On graphs larger than those tried, the numbers leave int32's range."""
    _, fast, signature = agree(lambda: Lopsided(use))
    assert not takes_narrow_edges(fast, signature, Processor())


def by_counting(x, edge_index):
    """Counts nodes by a comparison, which is false for what is no number."""
    return (x[:, :1] > 0).sum()


def by_marking(x, edge_index):
    """Marks nodes with an edge; -1 is the last node, as torch indexes."""
    seen = torch.zeros(len(x), 1)
    seen[edge_index[1]] = 1
    return seen


class Centred(torch.nn.Module):
    """A layer whose answers depend on all nodes, whether there are edges between them or not."""

    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(12, 3)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index) - x.mean()


@pytest.mark.parametrize(
    ("make", "options", "takes"),
    [
        (lambda: GCNConv(12, 3), {}, True),
        (lambda: GATConv(12, 3, edge_dim=4), {"inputs": ("x", "edge_index", "edge_attr")}, True),
        (lambda: GraphConv(12, 3), {"inputs": ("x", "edge_index", "edge_weight")}, True),
        (Centred, {}, False),
        (lambda: Lopsided(by_scatter), {}, False),
        (lambda: Lopsided(by_counting), {}, False),
        (lambda: Lopsided(by_marking), {}, False),
        # Devices run it by PyG's code, which reads the edges itself.
        (
            lambda: GINEConv(torch.nn.Linear(12, 3), edge_dim=4),
            {"inputs": ("x", "edge_index", "edge_attr")},
            False,
        ),
    ],
    ids=[
        "gcn",
        "gat",
        "graph",
        "of all nodes",
        "reads edges itself",
        "counts nodes",
        "marks nodes",
        "not on devices",
    ],
)
def test_spare_room_is_for_models_whose_answers_it_leaves_alone(twins, make, options, takes):
    _, fast, signature = twins(make, **options)
    assert (needs_exact_sizes(fast, signature) == "") == takes
    assert "cpu" in kernels.combining
