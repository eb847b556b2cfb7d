"""Torch's side of the kernels along edges: tensors in, tensors out.

Everything they need is a tensor, so that tracing sees what a run takes. Features are float32
[N, F], contiguous; nothing here records gradients. The kernels run on one thread.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from serve import native

Reduction = Literal["sum", "mean", "max", "min"]
_REDUCE: dict[str, int] = {"sum": 0, "mean": 1, "max": 2, "min": 3}
_SCORE: dict[str, int] = {"additive": 0, "dynamic": 1, "dot": 2}
#: Slots are counted in 32 bits.
_MOST_SLOTS = 2**31 - 1

_core: Any = native.graph_kernels


class Csr:
    """A graph's edges by destination; see csrc/include/gnnserve/csr.hpp."""

    __slots__ = ("added_loops", "begin", "edge", "rows", "slots", "source", "tensor")

    def __init__(self, edge_index: Tensor, rows: int, *, replace_loops: bool, edges: bool) -> None:
        """Sort `edge_index`, int64 or int32 [2, E] with contiguous rows.

        With `replace_loops` a loop of every node replaces those in it; with `edges` the slots
        remember their edges. Raises IndexError for an edge to a node that is not in [0, rows).
        """
        count = edge_index.shape[1]
        room = count + (rows if replace_loops else 0)
        if room > _MOST_SLOTS:
            raise ValueError(f"{room} edges; at most {_MOST_SLOTS} can be sorted")
        #: Holds the three arrays: int32 [rows + 1 + room (+ room)].
        self.tensor = torch.empty(rows + 1 + room * (1 + edges), dtype=torch.int32)
        self.rows, self.added_loops = rows, replace_loops
        self.begin = self.tensor.data_ptr()
        self.source = self.begin + 4 * (rows + 1)
        #: 0 without `edges`.
        self.edge = self.source + 4 * room if edges else 0
        first = edge_index.data_ptr()
        self.slots: int = _core.build_csr(
            first,
            first + edge_index.stride(0) * edge_index.element_size(),
            edge_index.dtype == torch.int32,
            count,
            rows,
            replace_loops,
            self.begin,
            self.source,
            self.edge,
        )
        if self.slots < 0:
            raise IndexError(f"edge_index holds a node outside [0, {rows})")

    @property
    def room(self) -> int:
        """The most slots there could be: what does not depend on the number of loops."""
        return (self.tensor.numel() - self.rows - 1) // (2 if self.edge else 1)


def spread(graph: Csr, value: Tensor, missing: float) -> Tensor:
    """`value` [E] by slot, `missing` for an added loop that replaces none: float32 [room]."""
    out = torch.empty(graph.room, dtype=torch.float32)
    _core.spread(graph.edge, graph.slots, value.data_ptr(), missing, out.data_ptr())
    return out


def normalised(graph: Csr, weight: Tensor | None) -> Tensor:
    """The weights of a graph convolution by slot, float32 [room]; `weight` by slot, None: ones."""
    out, scratch = (
        torch.empty(graph.room, dtype=torch.float32),
        torch.empty(graph.rows, dtype=torch.float32),
    )
    _core.normalise(
        graph.begin, graph.source, graph.rows, _address(weight), out.data_ptr(), scratch.data_ptr()
    )
    return out


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

    Then `skip_scale` · skip [N, F] and bias [F] are added, and with `relu` negatives become 0.
    """
    out = torch.empty_like(x)
    _core.aggregate(
        graph.begin,
        graph.source,
        graph.rows,
        x.data_ptr(),
        _address(weight),
        x.shape[1],
        _REDUCE[reduce],
        _address(skip),
        skip_scale,
        _address(bias),
        relu,
        out.data_ptr(),
    )
    return out


def attend(
    graph: Csr,
    score: Literal["additive", "dynamic", "dot"],
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
    relu: bool = False,
) -> Tensor:
    """Attention over the slots of each node; see csrc/include/gnnserve/aggregate.hpp.

    `value` is [N, heads · C]; the result is like it, or [N, C] when heads are averaged.
    """
    width = value.shape[1]
    alpha = torch.empty(graph.room * heads, dtype=torch.float32)
    out = torch.empty(graph.rows, width // heads) if average else torch.empty_like(value)
    _core.attend(
        graph.begin,
        graph.source,
        graph.rows,
        _SCORE[score],
        left.data_ptr(),
        right.data_ptr(),
        _address(edge),
        graph.edge,
        graph.added_loops,
        _address(att),
        scale,
        value.data_ptr(),
        heads,
        width // heads,
        average,
        _address(skip),
        _address(bias),
        relu,
        alpha.data_ptr(),
        out.data_ptr(),
    )
    return out


def head_dots(x: Tensor, att: Tensor, heads: int) -> Tensor:
    """Σ_c x[i, h, c] · att[h, c], float32 [N, heads], for x [N, heads · C]."""
    rows, width = x.shape
    out = torch.empty(rows, heads, dtype=torch.float32)
    _core.head_dots(x.data_ptr(), att.data_ptr(), rows, heads, width // heads, out.data_ptr())
    return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
