"""The table of a graph request's inputs: names, dtypes, shapes and defaults.

Sizes are symbols: N nodes, E edges, G graphs, F features of a node, D features of an edge. A
request determines N, E and G; a model determines F and D.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

#: Every name of ``INPUTS``, as a type for configurations.
InputName = Literal["x", "edge_index", "edge_weight", "edge_attr", "batch"]
Size = Literal["N", "E", "G", "F", "D"]

#: Bytes of one element, by the dtype's name in numpy and torch.
DTYPE_BYTES = {"float32": 4, "float64": 8, "float16": 2, "int64": 8, "int32": 4, "int16": 2,
               "int8": 1, "uint8": 1, "bool": 1}  # fmt: skip
_DTYPES = {"FP32": "float32", "INT32": "int32", "INT64": "int64"}


@dataclass(frozen=True, slots=True)
class Input:
    """One input that a model may take."""

    name: InputName
    #: Protocol datatype, on the wire and in the pool.
    datatype: str
    shape: tuple[int | Size, ...]
    #: Alternative datatype that requests may send.
    also: str | None = None
    #: Exclusive upper bound of its values when they are ids: N for nodes, G for graphs.
    ids_below: Literal["N", "G"] | None = None
    #: Value of every entry when a request omits the input; None when it is required.
    default: float | None = None
    #: True when every model takes it.
    always: bool = False

    @property
    def dtype(self) -> str:
        """Name of its dtype in numpy and torch."""
        return _DTYPES[self.datatype]

    @property
    def optional(self) -> bool:
        """True when a request may omit it."""
        return self.default is not None

    @property
    def per(self) -> tuple[Literal["N", "E"], int]:
        """The size it has one entry for, nodes or edges, and the axis of that size."""
        for axis, size in enumerate(self.shape):
            if size == "N" or size == "E":
                return size, axis
        raise ValueError(f"input '{self.name}' has no entry for a node or an edge")

    def shape_of(self, sizes: Mapping[Size, int]) -> tuple[int, ...]:
        """Return its shape for these sizes, with -1 for a size that is not among them."""
        return tuple(size if isinstance(size, int) else sizes.get(size, -1) for size in self.shape)

    def bytes_each(self, sizes: Mapping[Size, int]) -> int:
        """Return the bytes of its entry for one node or edge, given the numbers of features."""
        per, _ = self.per
        return DTYPE_BYTES[self.dtype] * prod(self.shape_of({**sizes, per: 1}))


INPUTS: dict[str, Input] = {
    each.name: each
    for each in (
        Input("x", "FP32", ("N", "F"), always=True),
        Input("edge_index", "INT64", (2, "E"), also="INT32", ids_below="N", always=True),
        Input("edge_weight", "FP32", ("E",), default=1.0),
        Input("edge_attr", "FP32", ("E", "D")),
        Input("batch", "INT64", ("N",), ids_below="G", default=0.0),
    )
}
#: The input and axis whose length gives a request's number of nodes or edges.
COUNTED_BY: dict[str, tuple[InputName, int]] = {"N": ("x", 0), "E": ("edge_index", 1)}
