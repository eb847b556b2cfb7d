"""The inputs of a graph request: one table, read by everyone who handles them.

Sizes are symbols: N nodes, E edges, G graphs, F features of a node, D features of an edge. A
request fixes N, E and G; a model fixes F and D.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

#: Every name of ``INPUTS``, as a type for configurations.
InputName = Literal["x", "edge_index", "edge_weight", "edge_attr", "batch"]
Size = Literal["N", "E", "G", "F", "D"]

ITEM_BYTES = {"FP32": 4, "INT32": 4, "INT64": 8}
_DTYPES = {"FP32": "float32", "INT32": "int32", "INT64": "int64"}


@dataclass(frozen=True, slots=True)
class Input:
    """One input that a model may take."""

    name: InputName
    #: On the wire, in the protocol's words, and in the pool.
    datatype: str
    shape: tuple[int | Size, ...]
    #: Another datatype that requests may use.
    also: str | None = None
    #: What each of its values counts up to: N, a node; G, a graph. None: values are not ids.
    ids_below: Literal["N", "G"] | None = None
    #: Value of every entry where a request leaves the input out; None: it may not.
    default: float | None = None
    #: Every model takes it.
    always: bool = False

    @property
    def dtype(self) -> str:
        """Name of its dtype, of numpy and of torch."""
        return _DTYPES[self.datatype]

    @property
    def optional(self) -> bool:
        """Whether a request may leave it out."""
        return self.default is not None

    @property
    def per(self) -> tuple[Literal["N", "E"], int]:
        """What it has one entry for, and the axis that counts them."""
        for axis, size in enumerate(self.shape):
            if size == "N" or size == "E":
                return size, axis
        raise ValueError(f"input '{self.name}' has no entry for a node or an edge")

    def shape_of(self, sizes: Mapping[Size, int]) -> tuple[int, ...]:
        """Its shape for these sizes; -1 for a size that is not among them."""
        return tuple(size if isinstance(size, int) else sizes.get(size, -1) for size in self.shape)

    def bytes_each(self, sizes: Mapping[Size, int]) -> int:
        """Bytes of its entries for one node or edge, for these numbers of features."""
        per, _ = self.per
        return ITEM_BYTES[self.datatype] * prod(self.shape_of({**sizes, per: 1}))


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
#: The input, and its axis, whose length is the number of nodes or edges of a request.
COUNTED_BY: dict[str, tuple[InputName, int]] = {"N": ("x", 0), "E": ("edge_index", 1)}
