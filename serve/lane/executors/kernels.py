"""The kernels along edges, as torch operators: ``torch.ops.gnnserve``.

The compiled module defines them (csrc/torch/operators.cpp); this module adds the shape functions
that export and tracing need. Features are float32 [N, F], contiguous. Sums and means of `aggregate`
have gradients; attention has them in ``attention_gradients``, and nothing else has. On the
processor they run on one thread; a process that uses a GPU adds it
(``serve.lane.cuda.graph_kernels``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor

from serve import native

Reduction = Literal["sum", "mean", "max", "min"]
Score = Literal["additive", "dynamic", "dot"]
Gate = Literal["none", "relu", "sigmoid"]
#: Both ends of a pair in `edge_index` that is no edge: a captured run of a fixed size fills up with
#: these. See csrc/include/gnnserve/csr.hpp.
NO_EDGE = -1
#: Ways in which GPUs go over edges, in the order of csrc/include/gnnserve/pieces.hpp. Processors
#: have the first only.
VARIANTS = ("usual", "short_pieces", "few_ahead", "shuffled")
#: Reductions with gradients.
DIFFERENTIABLE: tuple[Reduction, ...] = ("sum", "mean")
_REDUCE: dict[str, int] = {"sum": 0, "mean": 1, "max": 2, "min": 3}
_GATE: dict[str, int] = {"none": 0, "relu": 1, "sigmoid": 2}
_SCORE: dict[str, int] = {"additive": 0, "dynamic": 1, "dot": 2}


class Csr:
    """A graph's edges by destination; see csrc/include/gnnserve/csr.hpp."""

    __slots__ = ("_reversed", "added_loops", "edges", "rows", "tensor", "variant")

    def __init__(
        self, edge_index: Tensor, rows: int, *, replace_loops: bool, edges: bool, variant: int = 0
    ) -> None:
        """Sort `edge_index`, int64 or int32 [2, E] with contiguous rows.

        With `replace_loops`, one loop for each node replaces the loops in it; with `edges`, slots
        record their edges. Pairs of ``NO_EDGE`` are left out. `variant` is a place in ``VARIANTS``.
        Raises IndexError for an edge to a node outside [0, rows); on a GPU such an edge ends the
        process, as with torch's own indexing.
        """
        #: int32 [rows + 1 + room (+ room)]: the begin of each node's slots, the source of each slot
        #: and, with `edges`, its edge. `room` is the upper bound of slots, as if no loop were
        #: replaced.
        self.tensor: Tensor = _csr(edge_index, rows, replace_loops, edges)
        self.rows, self.added_loops, self.edges = rows, replace_loops, edges
        self.variant = variant
        self._reversed: Csr | None = None

    @property
    def slots(self) -> int:
        """Number of slots; reading it waits for the device."""
        return int(self.tensor[self.rows])

    @property
    def degrees(self) -> Tensor:
        """Slots of each node, int32 [rows]."""
        return self.tensor[: self.rows + 1].diff()

    def part(self, first: int, rows: int) -> "Csr":
        """Return so many nodes from `first` on as a graph of their own, for `aggregate`.

        Its nodes' slots, and weights by slot, are where they are here: its first does not begin
        at 0. This graph must not record edges.
        """
        made = object.__new__(Csr)
        begin = self.tensor[first : first + rows + 1]
        made.tensor = torch.cat([begin, self.tensor[self.rows + 1 :]])
        made.rows, made.added_loops, made.edges = rows, self.added_loops, False
        made.variant = self.variant
        made._reversed = None
        return made

    @property
    def reversed(self) -> "Csr":
        """The slots by source, added loops too; as its edges it records the slots here."""
        if self._reversed is None:
            begin, slots = self.rows + 1, self.slots
            targets = torch.arange(self.rows, dtype=torch.int32).repeat_interleave(
                self.degrees, output_size=slots
            )
            pairs = torch.stack([targets, self.tensor[begin : begin + slots]])
            self._reversed = Csr(pairs, self.rows, replace_loops=False, edges=True)
        return self._reversed


def spread(graph: Csr, value: Tensor, missing: float) -> Tensor:
    """Return `value` [E] by slot, float32 [room]; added loops that replace none get `missing`."""
    made: Tensor = _spread(graph.tensor, graph.rows, value, missing)
    return made


def normalised(graph: Csr, weight: Tensor | None) -> Tensor:
    """Return a graph convolution's weights by slot, float32 [room].

    `weight` is by slot; None stands for ones.
    """
    made: Tensor = _normalise(graph.tensor, graph.rows, graph.edges, weight)
    return made


def aggregate(
    graph: Csr,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: Reduction = "sum",
    *,
    skip: Tensor | None = None,
    skip_scale: float = 1.0,
    bias: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Reduce weight[slot] · x[source] over the slots of each node: float32 [N, F].

    Then `skip_scale` · skip [N, F] and bias [F] are added, and with `relu` negatives become 0. A
    sum or mean on the processor has gradients, but none with respect to `weight`.
    """
    if torch.is_grad_enabled() and any(
        one is not None and one.requires_grad for one in (x, skip, bias)
    ):
        return _with_gradients(graph, x, weight, reduce, skip, skip_scale, bias, relu)
    made: Tensor = _aggregate(
        graph.tensor, x, weight, _REDUCE[reduce], skip, skip_scale, bias, relu, graph.variant
    )
    return made


def _with_gradients(
    graph: Csr, x: Tensor, weight: Tensor | None, reduce: Reduction, skip: Tensor | None,
    skip_scale: float, bias: Tensor | None, relu: bool,
) -> Tensor:  # fmt: skip
    out = cast("Tensor", _Aggregated.apply(x, graph, weight, reduce))  # type: ignore[no-untyped-call]
    if skip is not None:
        out = torch.add(out, skip, alpha=skip_scale)
    if bias is not None:
        out = out + bias
    return out.relu() if relu else out


class _Aggregated(torch.autograd.Function):
    """Sum or mean over the slots of each node.

    The gradient is the sum over the reversed slots: it gathers too, so that no two threads or
    orders of edges can give other bits (no atomics).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, graph: Csr, weight: Tensor | None, reduce: Reduction
    ) -> Tensor:
        if reduce not in DIFFERENTIABLE:
            raise ValueError(f"'{reduce}' has no gradient; known: {', '.join(DIFFERENTIABLE)}")
        if weight is not None and weight.requires_grad:
            raise ValueError("weights of edges have no gradient")
        ctx.graph, ctx.weight, ctx.reduce = graph, weight, reduce
        return aggregate(graph, x, weight, reduce)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        graph, weight = ctx.graph, ctx.weight
        gradient = gradients[0].contiguous()
        if ctx.reduce == "mean":
            gradient = gradient / graph.degrees.clamp(min=1).unsqueeze(1)
        if weight is not None:
            weight = spread(graph.reversed, weight[: graph.slots], 0.0)
        return aggregate(graph.reversed, gradient, weight), None, None, None


def combine(
    graph: Csr,
    width: int,
    gate: Gate,
    reduce: Reduction = "sum",
    *,
    x: Tensor | None = None,
    target: Tensor | None = None,
    edge: Tensor | None = None,
    edge_map: Tensor | None = None,
    value: Tensor | None = None,
    skip: Tensor | None = None,
    skip_scale: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Reduce gate(x[j] + target[i] + edge[e] · edge_map) · value[j] over the slots of each node i.

    `x`, `value` and `skip` [N, width], `target` [N, width] or [width], `edge` [E, D] with
    `edge_map` [D, width], or without it [E, width]. The result is float32 [N, width]; the other
    arguments are those of `aggregate`. Only for devices in `combining`.
    """
    made: Tensor = _combine(
        graph.tensor, graph.rows, width, graph.edges, x, target, edge, edge_map, value,
        _GATE[gate], _REDUCE[reduce], skip, skip_scale, bias,
    )  # fmt: skip
    return made


def attend(
    graph: Csr,
    score: Score,
    left: Tensor,
    right: Tensor,
    value: Tensor,
    heads: int,
    *,
    scale: float,
    average: bool,
    att: Tensor | None = None,
    edge: Tensor | None = None,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend over the slots of each node; see csrc/include/gnnserve/aggregate.hpp.

    `value` is [N, heads · C]; the result is like it, or [N, C] when heads are averaged.
    """
    made: Tensor = _attend(
        graph.tensor, graph.edges, graph.added_loops, _SCORE[score], left, right, value, heads,
        scale, average, att, edge, skip, bias, graph.variant,
    )  # fmt: skip
    return made


def attend_kept(
    graph: Csr, score: Score, left: Tensor, right: Tensor, value: Tensor, heads: int, *,
    scale: float, average: bool, att: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what `attend` does, and the weights of the slots, float32 [room, heads]."""
    made: tuple[Tensor, Tensor] = _attend_kept(
        graph.tensor, graph.edges, graph.added_loops, _SCORE[score], left, right, value, heads,
        scale, average, att, None, None, None,
    )  # fmt: skip
    return made


def attention_gradient(
    graph: Csr, score: Score, left: Tensor, right: Tensor, value: Tensor, alpha: Tensor, heads: int,
    gradient: Tensor, *, scale: float, average: bool, att: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of `left`, `right`, `value` and `att` from that of the result.

    `alpha` is what `attend_kept` gave. Of averaged heads, `gradient` is that of each head. The
    gradient of `att` is [heads · C] for dynamic scores, else it has no elements.
    """
    made: tuple[Tensor, Tensor, Tensor, Tensor] = _attention_gradient(
        graph.tensor, graph.edges, graph.reversed.tensor, _SCORE[score], left, right, value, alpha,
        heads, scale, average, att, gradient,
    )  # fmt: skip
    return made


def head_dots(x: Tensor, att: Tensor, heads: int) -> Tensor:
    """Return Σ_c x[i, h, c] · att[h, c], float32 [N, heads], for x [N, heads · C]."""
    made: Tensor = _head_dots(x, att, heads)
    return made


# Shape functions: the output of each operator for tensors without data, as under export.


def _fake_csr(edge_index: Tensor, rows: int, replace_loops: bool, edges: bool) -> Tensor:
    slots = edge_index.shape[1] + (rows if replace_loops else 0)
    return edge_index.new_empty([rows + 1 + slots * (2 if edges else 1)], dtype=torch.int32)


def _fake_spread(graph: Tensor, rows: int, value: Tensor, missing: float) -> Tensor:
    return value.new_empty([_room(graph, rows, True)])


def _fake_normalise(graph: Tensor, rows: int, edges: bool, weight: Tensor | None) -> Tensor:
    return graph.new_empty([_room(graph, rows, edges)], dtype=torch.float32)


def _fake_aggregate(graph: Tensor, x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_combine(graph: Tensor, rows: int, width: int, *_: Any) -> Tensor:
    return graph.new_empty([rows, width], dtype=torch.float32)


def _fake_attend(
    graph: Tensor, edges: bool, added_loops: bool, score: int, left: Tensor, right: Tensor,
    value: Tensor, heads: int, scale: float, average: bool, *_: Any,
) -> Tensor:  # fmt: skip
    rows, width = value.shape
    return value.new_empty([rows, width // heads if average else width])


def _fake_head_dots(x: Tensor, att: Tensor, heads: int) -> Tensor:
    return x.new_empty([x.shape[0], heads])


def _room(graph: Tensor, rows: int, edges: bool) -> int:
    return (graph.shape[0] - rows - 1) // (2 if edges else 1)


_FAKES: dict[str, Callable[..., Tensor]] = {
    "csr": _fake_csr,
    "spread": _fake_spread,
    "normalise": _fake_normalise,
    "aggregate": _fake_aggregate,
    "combine": _fake_combine,
    "attend": _fake_attend,
    "head_dots": _fake_head_dots,
}


def _define() -> str:
    """Define the operators; returns the reason when that is impossible, else an empty text."""
    try:
        native.define_operators()
    except RuntimeError as error:
        return str(error)
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"gnnserve::{name}", fake)
    return ""


#: Reason why there are no kernels; empty when there are.
UNAVAILABLE = _define()
#: Types of devices, as torch names them, whose tensors the operators take.
devices = {"cpu"}
#: Types of devices that have `combine` too.
combining = {"cpu"}


@contextmanager
def as_on_devices() -> Iterator[None]:
    """Have layers use only operators that GPUs have too, while open."""
    had = set(combining)
    combining.clear()
    try:
        yield
    finally:
        combining.update(had)


if not UNAVAILABLE:
    # Overloads are called directly: looking one up costs as much as a small kernel.
    _operators: Any = torch.ops.gnnserve
    (
        _csr, _spread, _normalise, _aggregate, _combine, _attend, _attend_kept,
        _attention_gradient, _head_dots,
    ) = (
        _operators.csr.default,
        _operators.spread.default,
        _operators.normalise.default,
        _operators.aggregate.default,
        _operators.combine.default,
        _operators.attend.default,
        _operators.attend_kept.default,
        _operators.attention_gradient.default,
        _operators.head_dots.default,
    )  # fmt: skip
