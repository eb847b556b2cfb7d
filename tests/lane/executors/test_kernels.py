"""The operators against the same written in plain torch, and against torch's own rules for them."""

import pytest
import torch

from serve.lane.executors import kernels
from serve.lane.executors.kernels import Csr

ROWS, WIDTH, HEADS = 9, 12, 3
operators = torch.ops.gnnserve


@pytest.fixture
def graph():
    """Edges [2, E] with loops, repeated ones and a node that nothing ends in."""
    generator = torch.Generator().manual_seed(3)
    edge_index = torch.randint(ROWS - 1, (2, 40), generator=generator)
    edge_index[:, :3] = torch.tensor([[4, 4, 1], [4, 4, 2]])
    return edge_index


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def with_loops(edge_index):
    kept = edge_index[:, edge_index[0] != edge_index[1]]
    return torch.cat([torch.arange(ROWS).expand(2, -1), kept], dim=1)


def slots_of(made):
    """(source, target) of every slot."""
    begin = made.tensor[: ROWS + 1].long()
    target = torch.repeat_interleave(torch.arange(ROWS), begin.diff())
    return made.tensor[ROWS + 1 :][: len(target)].long(), target


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("replace_loops", [False, True])
def test_slots_are_the_edges_by_destination(graph, dtype, replace_loops):
    made = Csr(graph.to(dtype), ROWS, replace_loops=replace_loops, edges=False)
    source, target = slots_of(made)
    expected = with_loops(graph) if replace_loops else graph
    order = torch.argsort(expected[1], stable=True)
    assert torch.equal(torch.stack([source, target]), expected[:, order])


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_aggregate(graph, reduce):
    made = Csr(graph, ROWS, replace_loops=False, edges=True)
    x, skip, bias, weight = random(ROWS, WIDTH), random(ROWS, WIDTH), random(WIDTH), random(40)
    by_slot = kernels.spread(made, weight, 0.0)
    given = kernels.aggregate(
        made, x, by_slot, reduce, skip=skip, skip_scale=0.5, bias=bias, relu=True
    )
    name = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    index = graph[1][:, None].expand(-1, WIDTH)
    messages = weight[:, None] * x[graph[0]]
    reduced = torch.zeros(ROWS, WIDTH).scatter_reduce(0, index, messages, name, include_self=False)
    torch.testing.assert_close(given, (reduced + 0.5 * skip + bias).relu())


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("gate", ["none", "relu", "sigmoid"])
@pytest.mark.parametrize("width", [WIDTH, 64, 150])
def test_combine(graph, width, gate, reduce):
    """In whole blocks of columns and in what is left of one."""
    made = Csr(graph, ROWS, replace_loops=False, edges=True)
    x, value, skip = random(ROWS, width), random(ROWS, width) + 1, random(ROWS, width) - 1
    target, edge, edge_map, bias = (
        random(ROWS, width) * 3, random(40, 5), random(5, width), random(width),
    )  # fmt: skip
    gates = {"none": lambda m: m, "relu": torch.relu, "sigmoid": torch.sigmoid}

    def expected(messages):
        name = {"max": "amax", "min": "amin"}.get(reduce, reduce)
        index = graph[1][:, None].expand(-1, width)
        return torch.zeros(ROWS, width).scatter_reduce(0, index, messages, name, include_self=False)

    given = kernels.combine(
        made, width, gate, reduce, x=x, target=target, edge=edge, edge_map=edge_map, value=value,
        skip=skip, skip_scale=0.5, bias=bias,
    )  # fmt: skip
    messages = gates[gate](x[graph[0]] + target[graph[1]] + edge @ edge_map) * value[graph[0]]
    torch.testing.assert_close(given, expected(messages) + 0.5 * skip + bias, rtol=1e-5, atol=1e-5)
    rows, same = random(40, width), random(width)
    given = kernels.combine(made, width, gate, reduce, edge=rows, target=same)
    torch.testing.assert_close(given, expected(gates[gate](rows + same)), rtol=1e-5, atol=1e-5)


def test_normalise(graph):
    made = Csr(graph, ROWS, replace_loops=True, edges=False)
    source, target = slots_of(made)
    degree = torch.bincount(target, minlength=ROWS).float()
    expected = (degree[source] * degree[target]).rsqrt()
    torch.testing.assert_close(kernels.normalised(made, None)[: len(source)], expected)


def attention(score, made):
    """What one score needs, and its value for every slot: arguments, [slots, heads]."""
    source, target = slots_of(made)
    if score == "additive":
        left, right = random(ROWS, HEADS), random(ROWS, HEADS) + 1
        sums = left[source] + right[target]
        return (left, right, None), torch.where(sums > 0, sums, 0.2 * sums)
    left, right, att = random(ROWS, WIDTH), random(ROWS, WIDTH) + 1, random(WIDTH)
    parts = [part.view(-1, HEADS, WIDTH // HEADS) for part in (left[source], right[target], att)]
    if score == "dot":
        return (left, right, None), 0.2 * (parts[0] * parts[1]).sum(-1)
    sums = parts[0] + parts[1]
    return (left, right, att), (parts[2] * torch.where(sums > 0, sums, 0.2 * sums)).sum(-1)


@pytest.mark.parametrize("score", ["additive", "dynamic", "dot"])
@pytest.mark.parametrize("average", [False, True])
def test_attend(graph, score, average):
    made = Csr(graph, ROWS, replace_loops=True, edges=False)
    source, target = slots_of(made)
    (left, right, att), scores = attention(score, made)
    value = random(ROWS, WIDTH)
    given = kernels.attend(
        made, score, left, right, value, HEADS, scale=0.2, average=average, att=att
    )
    powers = (scores - scores.max()).exp()
    shares = powers / torch.zeros(ROWS, HEADS).index_add(0, target, powers)[target]
    messages = shares[:, :, None] * value.view(ROWS, HEADS, -1)[source]
    expected = torch.zeros(ROWS, HEADS, WIDTH // HEADS).index_add(0, target, messages)
    expected = expected.mean(1) if average else expected.flatten(1)
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


def test_head_dots():
    x, att = random(ROWS, WIDTH), random(1, HEADS, WIDTH // HEADS)
    expected = (x.view(ROWS, HEADS, -1) * att).sum(-1)
    torch.testing.assert_close(kernels.head_dots(x, att, HEADS), expected)


def calls(edge_index):
    """One call of every operator; what it gives has nothing in it that is not written."""
    plain = Csr(edge_index, ROWS, replace_loops=False, edges=True).tensor
    looped = Csr(edge_index, ROWS, replace_loops=True, edges=False).tensor
    x, bias, weight = random(ROWS, WIDTH), random(WIDTH), random(40).abs()
    scores = random(ROWS, HEADS)
    return {
        "csr": (edge_index, ROWS, False, True),
        "spread": (plain, ROWS, weight, 1.0),
        "normalise": (plain, ROWS, True, weight),
        "aggregate": (plain, x, weight, 1, x, 2.0, bias, True),
        "attend": (
            looped, False, True, 0, scores, scores, x, HEADS, 0.2, False, None, None, x, bias,
        ),
        "head_dots": (x, bias, HEADS),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["csr", "spread", "normalise", "aggregate", "attend", "head_dots"])
def test_torch_can_trace_the_operators(graph, name):
    """Schema, shapes without data, shapes that are symbols."""
    torch.library.opcheck(getattr(operators, name).default, calls(graph)[name])


@pytest.mark.parametrize(
    ("name", "place", "wrong", "told"),
    [
        ("csr", 0, torch.zeros(3, 4, dtype=torch.int64), r"\[2, E\]"),
        ("csr", 0, torch.zeros(2, 4), "int64 or int32"),
        ("csr", 1, 5, r"outside \[0, 5\)"),
        ("spread", 1, 500, "fewer nodes"),
        ("normalise", 3, torch.zeros(3), "weight must be float32 .* of 40 elements"),
        ("aggregate", 1, torch.zeros(ROWS, WIDTH).double(), "x must be float32"),
        ("aggregate", 1, torch.zeros(WIDTH, ROWS).t(), "contiguous"),
        ("aggregate", 2, torch.zeros(3), "weight is too short"),
        ("aggregate", 6, torch.zeros(3), "bias must be"),
        ("attend", 7, 5, "heads do not fit"),
        ("attend", 3, 1, "needs att"),
        ("attend", 11, torch.zeros(40, HEADS), "remembers its edges"),
        ("head_dots", 1, torch.zeros(3), "att must be"),
    ],
)
def test_wrong_arguments_are_refused(graph, name, place, wrong, told):
    """Whoever calls them, they must not read what is not there."""
    arguments = list(calls(graph)[name])
    arguments[place] = wrong
    with pytest.raises((ValueError, IndexError), match=told):
        getattr(operators, name).default(*arguments)
