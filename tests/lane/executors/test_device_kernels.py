"""The executor on the device's kernels, which run thread by thread on this processor for it.

All but the hardware is as on a GPU: the kernels' source, their launches, the C functions and what
is between them and torch. csrc/tests/simt.hpp stands in for CUDA.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch_geometric.nn import GATConv, SAGEConv

from serve.lane.cuda.graph_kernels import OPERATORS, simulated_kernels
from serve.lane.executors import VARIANTS, kernels, runs_on_csr
from serve.lane.executors.csr import NAMES
from serve.lane.measure.probe_graphs import Shape, probe_graph
from serve.native_cuda import library_path
from tests.lane.executors.test_convs import CASES, TwoLayers

SIMT = library_path("libgnnserve_simt.so")
operators = torch.ops.gnnserve
pytestmark = pytest.mark.skipif(SIMT is None, reason="only an editable install builds it")


@pytest.fixture(scope="module")
def device():
    return SimpleNamespace(**simulated_kernels(str(SIMT)))


@pytest.fixture
def on_device(device, monkeypatch):
    """The executor's kernels are the device's."""
    for name in OPERATORS:
        monkeypatch.setattr(kernels, f"_{name}", getattr(device, name))


@pytest.mark.parametrize(
    "name",
    [
        "gcn improved weighted", "gcn not normalised", "sage", "sage max", "graph weighted",
        "graph max weighted", "gin narrowing", "gin mean", "gat residual", "gat averaged",
        "gat attributed", "gat attributed without loops", "gatv2 averaged", "gatv2 shared",
        "transformer", "cheb weighted", "cheb not normalised", "sg without loops", "appnp",
        "cluster diagonal", "relations", "relations, largest",
    ],
)  # fmt: skip
def test_gives_what_pyg_gives(on_device, agree, name):
    make, options = CASES[name]
    agree(make, **options)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_give_what_pyg_gives(on_device, twins, monkeypatch, name):
    """Columns enough for shuffles, and nodes with neighbours enough for groups and pieces."""
    taken = set()
    for operator in ("_aggregate", "_attend"):
        kernel = getattr(kernels, operator)

        def told(*given, kernel=kernel, operator=operator):
            taken.add((operator, given[-1]))
            return kernel(*given)

        monkeypatch.setattr(kernels, operator, told)
    eager, other, signature = twins(
        lambda: TwoLayers(SAGEConv(64, 64), GATConv(64, 3)), features=64, executor=name
    )
    assert other.executor == name
    assert runs_on_csr(name)
    for shape in (Shape.PLAIN, Shape.STAR):
        inputs = probe_graph(40, 1_500, shape, eager.spec.inputs, signature)
        torch.testing.assert_close(other.run(inputs), eager.run(inputs), rtol=1e-4, atol=1e-4)
    assert taken == {(each, NAMES.index(name)) for each in ("_aggregate", "_attend")}


@pytest.mark.parametrize("name", ["relations", "cheb weighted"])
def test_graphs_that_layers_sort_themselves_are_of_the_variant(on_device, twins, monkeypatch, name):
    make, options = CASES[name]
    eager, other, signature = twins(make, executor="csr_shuffled", **options)
    taken = set()
    kernel = kernels._aggregate
    monkeypatch.setattr(
        kernels, "_aggregate", lambda *given: taken.add(given[-1]) or kernel(*given)
    )
    inputs = probe_graph(40, 200, Shape.PLAIN, eager.spec.inputs, signature)
    torch.testing.assert_close(other.run(inputs), eager.run(inputs), rtol=1e-4, atol=1e-4)
    assert NAMES.index("csr_shuffled") in taken


@pytest.mark.parametrize("variant", [-1, len(kernels.VARIANTS)])
def test_a_variant_that_is_none_is_refused(device, star, variant):
    graph, x = device.csr(star, 30, False, False), torch.randn(30, 24)
    with pytest.raises(ValueError, match="no such variant"):
        device.aggregate(graph, x, None, 0, None, 1.0, None, False, variant)
    with pytest.raises(ValueError, match="no such variant"):
        device.attend(
            graph, False, False, 2, x, x, x, 3, 0.2, False, None, None, None, None, variant
        )


@pytest.fixture(scope="module")
def star():
    """Most of the edges end in one node, some of them loops, and one node has few."""
    generator = torch.Generator().manual_seed(2)
    edge_index = torch.randint(30, (2, 3000), generator=generator)
    edge_index[1, 400:] = 11
    return edge_index


@pytest.mark.parametrize("loops", [False, True])
def test_heavy_nodes_are_as_on_the_processor(device, star, loops):
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn(30, 24, generator=generator), torch.randn(24, generator=generator)
    weight = torch.rand(3000, generator=generator)
    graphs = [csr(star, 30, loops, True) for csr in (device.csr, operators.csr.default)]
    for graph, made in zip(graphs, (device, None), strict=True):
        begin = graph[:31]
        assert begin.diff().max() > 2048, made
    for run, expected in (
        (device.spread(graphs[0], 30, weight, 2.0), operators.spread(graphs[1], 30, weight, 2.0)),
        (
            device.normalise(graphs[0], 30, True, None),
            operators.normalise(graphs[1], 30, True, None),
        ),
        *(
            (
                device.aggregate(graphs[0], x, None, reduce, x, 0.5, bias, True),
                operators.aggregate(graphs[1], x, None, reduce, x, 0.5, bias, True),
            )
            for reduce in range(4)
        ),
        (
            device.attend(graphs[0], True, loops, 2, x, x, x, 3, 0.2, False, None, None, x, bias),
            operators.attend(
                graphs[1], True, loops, 2, x, x, x, 3, 0.2, False, None, None, x, bias
            ),
        ),
    ):
        if run.dim() == 1:
            slots = int(graphs[0][30])
            run, expected = run[:slots], expected[:slots]
        torch.testing.assert_close(run, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", [0, 5, 11, 12])
def test_a_part_of_a_graph_is_a_graph(on_device, star, first):
    """Heavy nodes in it are reduced in pieces, whose slots are those of the whole."""
    x = torch.randn(30 - first, 24)
    source, target = star[0] % (30 - first), star[1]
    part = kernels.Csr(torch.stack([source, target]), 30, replace_loops=False, edges=False).part(
        first, 30 - first
    )
    within = target >= first
    alone = operators.csr(
        torch.stack([source[within], target[within] - first]), 30 - first, False, False
    )
    for reduce, number in (("sum", 0), ("mean", 1), ("max", 2)):
        expected = operators.aggregate(alone, x, None, number, None, 1.0, None, False)
        found = kernels.aggregate(part, x, None, reduce)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_same_graph_has_the_same_answer_bit_by_bit(device, star):
    x = torch.randn(30, 24)
    runs = [
        device.aggregate(device.csr(star, 30, True, False), x, None, 0, None, 1.0, None, False)
        for _ in range(2)
    ]
    assert torch.equal(*runs)


def test_memory_is_linear_in_nodes_and_edges(on_device, twins):
    """Also where nodes are heavy: they take room whether there are any or not."""
    from serve.estimate.memory import covers, peak_at
    from serve.lane.measure.memory import measure_memory
    from serve.lane.measure.tracing import trace

    make, options = CASES["gat attributed"]
    _, other, signature = twins(make, **options)
    memory = measure_memory(other, signature, max_bytes=4 << 20)
    assert memory.warning == ""
    for shape in (Shape.PLAIN, Shape.STAR):
        inputs = probe_graph(1_000, 20_000, shape, other.spec.inputs, signature)
        run = lambda inputs=inputs: other.run(inputs)  # noqa: E731
        peak = trace(run, other.module, 1_000, 20_000).peak_bytes
        assert covers(peak_at(memory.activations, 1_000, 20_000), peak)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("csr", (torch.zeros(3, 4).long(), 5, False, False), r"\[2, E\]"),
        ("csr", (torch.zeros(2, 4), 5, False, False), "int64 or int32"),
        ("csr", (torch.zeros(4, 2).long().t(), 5, False, False), "contiguous rows"),
        ("head_dots", (torch.zeros(3, 6), torch.zeros(5), 2), "att must be .* of 6"),
        ("head_dots", (torch.zeros(6, 3).t(), torch.zeros(6), 2), "x must be .* contiguous"),
        ("head_dots", (torch.zeros(3, 6).double(), torch.zeros(6), 2), "x must be float32"),
    ],
)
def test_wrong_arguments_are_refused(device, name, arguments, told):
    with pytest.raises(ValueError, match=told):
        getattr(device, name)(*arguments)


def test_what_cannot_be_launched_is_an_error(device, tmp_path):
    """By a library whose launches all fail."""
    source = tmp_path / "failing.c"
    functions = "".join(f"int gnnserve_graph_{name}() {{ return 98; }}\n" for name in OPERATORS)
    source.write_text(functions + "long gnnserve_graph_csr_scratch() { return 0; }\n")
    library = tmp_path / "libfailing.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=600)
    arguments = {
        "csr": (torch.zeros(2, 4).long(), 5, False, False),
        "head_dots": (torch.zeros(3, 6), torch.zeros(6), 2),
    }
    try:
        failing = simulated_kernels(str(library))
        for name, given in arguments.items():
            told = rf"gnnserve::{name} .* \(cudaError 98\)"
            with pytest.raises(RuntimeError, match=told):
                failing[name](*given)
    finally:
        simulated_kernels(str(SIMT))


def test_a_library_that_is_another_one_is_refused(device, tmp_path):
    with pytest.raises(RuntimeError, match=r"none\.so"):
        simulated_kernels(str(tmp_path / "none.so"))
    with pytest.raises(RuntimeError, match="has no gnnserve_graph_csr_scratch"):
        simulated_kernels(str(library_path("libgnnserve_device.so")))
    # What was there before goes on.
    assert device.csr(torch.zeros(2, 1).long(), 1, False, False).numel() == 3


def test_cuda_gets_its_operators(device):
    """Registered as for the library of CUDA, in a process of its own."""
    script = (
        "import torch\n"
        "from serve import native\n"
        "from serve.lane.executors import kernels\n"
        "from serve.lane.cuda.graph_kernels import OPERATORS\n"
        f"native.use_device_operators({str(SIMT)!r})\n"
        f"native.use_device_operators({str(SIMT)!r})\n"
        "for name in OPERATORS:\n"
        "    has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "    assert has(f'gnnserve::{name}', 'CUDA'), name\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)
