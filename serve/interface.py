"""The inputs and outputs that a model declares: names, datatypes and symbolic shapes.

A shape is made of numbers and symbols. A symbol is a count: of nodes, edges, labelled pairs or
whatever else a request brings any number of. An input whose shape holds a symbol tells its count.
An index input names, by a symbol, the things that its values point to. A symbol that is pointed to
and in no shape counts graphs: it is one more than the largest value.

    x           FP32  ["N", 16]
    edge_index  INT64 [2, "E"]   values are nodes: in [0, N)
    batch       INT64 ["N"]      values are graphs: in [0, G), and G is what they say

Models with the short form of inputs (``serve.inputs``) declare nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt, prod
from typing import Any

import msgspec
import numpy as np

from serve.errors import InvalidInput

#: Datatypes that inputs and outputs may have, by the protocol's name, and their name in numpy and
#: torch.
DTYPES = {
    "FP32": "float32",
    "FP64": "float64",
    "FP16": "float16",
    "INT64": "int64",
    "INT32": "int32",
    "INT16": "int16",
    "INT8": "int8",
    "UINT8": "uint8",
    "BOOL": "bool",
}

Dim = int | str


#: Most kinds of things whose mix estimates are made for; each of them is in every traced graph.
MOST_KINDS = 64


def is_float(datatype: str) -> bool:
    """Return True for a datatype of floating-point numbers."""
    return datatype.startswith("FP")


@dataclass(frozen=True)
class TensorSlot:
    """One input or output."""

    name: str
    #: A key of ``DTYPES``.
    datatype: str
    shape: tuple[Dim, ...]

    @property
    def dtype(self) -> str:
        """Name of its dtype in numpy and torch."""
        return DTYPES[self.datatype]

    @property
    def symbols(self) -> tuple[str, ...]:
        """Symbols of its shape, in order."""
        return tuple(dim for dim in self.shape if isinstance(dim, str))

    @property
    def symbol_axis(self) -> int:
        """Axis of its first symbol; raises IndexError for a shape without one."""
        return self.shape.index(self.symbols[0])

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.dtype).itemsize

    def shape_for(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return its shape for these sizes, with -1 for a symbol that is not among them."""
        return tuple(sizes.get(dim, -1) if isinstance(dim, str) else dim for dim in self.shape)


@dataclass(frozen=True)
class InputSlot(TensorSlot):
    """One input."""

    #: Symbol that bounds its values, or one for each row; empty when it is no index.
    index: tuple[str, ...] = ()
    #: A request may leave it out; forward then gets the default, or None without one.
    optional: bool = False
    default: float | None = None
    #: Values lie in [low, high). Integers outside are refused; floats are only drawn from there.
    low: float | None = None
    high: float | None = None
    #: The range of each column, where integers of different columns have different ones.
    columns: tuple[tuple[int, int], ...] = ()

    @property
    def is_links(self) -> bool:
        """True for an index with two rows: sources and targets."""
        return bool(self.index) and len(self.shape) == 2 and self.shape[0] == 2

    @property
    def row_bounds(self) -> tuple[str, ...]:
        """Symbol that bounds each row of an index of several rows, or all of it."""
        rows = self.shape[0] if self.shape else None
        if len(self.index) == 1 and isinstance(rows, int):
            return self.index * rows
        return self.index

    @property
    def is_kind(self) -> bool:
        """True for integers that are no index, such as types of edges, and for booleans."""
        return not self.index and not is_float(self.datatype)

    @property
    def num_kinds(self) -> int:
        """Kinds that a value tells apart, where `is_kind`."""
        low, high = (0, 2) if self.datatype == "BOOL" else self.bounds
        return int(high) - int(low)

    @property
    def bounds(self) -> tuple[float, float]:
        """Range to draw values from: as declared, else [0, 1)."""
        return (
            0.0 if self.low is None else self.low,
            1.0 if self.high is None else self.high,
        )


@dataclass(frozen=True, slots=True)
class KindCounts:
    """How many things of a request are of the same kind, for each of ``Interface.kinds``."""

    #: Things of the first kind, which has the least value.
    firsts: tuple[int, ...]
    #: Things of the most common one of the other kinds.
    others: tuple[int, ...]

    @property
    def most(self) -> tuple[int, ...]:
        """Things of the most common kind."""
        return tuple(map(max, self.firsts, self.others))


@dataclass(frozen=True)
class Interface:
    """All inputs and outputs of a model, in the order of its forward."""

    inputs: tuple[InputSlot, ...]
    outputs: tuple[TensorSlot, ...]

    @cached_property
    def by_name(self) -> dict[str, InputSlot]:
        """Inputs by name."""
        return {slot.name: slot for slot in self.inputs}

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Symbols that count nodes: those pointed to; without any, the first symbol."""
        bound = tuple(dict.fromkeys(s for slot in self.inputs for s in slot.symbols))
        pointed = {symbol for slot in self.inputs for symbol in slot.index} - self.divided.keys()
        return tuple(symbol for symbol in bound if symbol in pointed) or bound[:1]

    @cached_property
    def divided(self) -> dict[str, tuple[InputSlot, ...]]:
        """Symbols of shapes that count graphs, and the `batch` of each kind of nodes in them.

        Attributes of graphs have such shapes.
        """
        bound = {symbol for slot in self.inputs for symbol in slot.symbols}
        found: dict[str, tuple[InputSlot, ...]] = {}
        for slot in self.inputs:
            one_each = len(slot.symbols) == len(slot.shape) == len(slot.index) == 1
            if one_each and slot.name.partition(".")[0] == "batch" and slot.index[0] in bound:
                found[slot.index[0]] = (*found.get(slot.index[0], ()), slot)
        return found

    @cached_property
    def counts(self) -> tuple[str, ...]:
        """Symbols that a request's shapes tell: of nodes, then all others."""
        bound = dict.fromkeys(s for slot in self.inputs for s in slot.symbols)
        return (*self.nodes, *(symbol for symbol in bound if symbol not in self.nodes))

    @cached_property
    def graphs(self) -> dict[str, tuple[InputSlot, ...]]:
        """Symbols that count graphs, and what tells each: an index for each kind of things."""
        found: dict[str, tuple[InputSlot, ...]] = {}
        for slot in self.inputs:
            for symbol in dict.fromkeys(slot.index):
                if symbol not in self.counts:
                    found[symbol] = (*found.get(symbol, ()), slot)
        return found

    def numbers_graphs(self, slot: InputSlot) -> bool:
        """Return True for an index whose largest value tells how many graphs there are."""
        return any(slot is each for slots in self.graphs.values() for each in slots)

    @cached_property
    def batches(self) -> tuple[InputSlot, ...]:
        """Inputs that tell the graph of each of some things."""
        return tuple(
            slot
            for slot in self.inputs
            if len(slot.symbols) == len(slot.shape) == 1
            and slot.index
            and slot.index[0] in self.graphs
        )

    @cached_property
    def orders(self) -> tuple[InputSlot, ...]:
        """Inputs in which nodes of one graph may have to be side by side."""
        return (*self.batches, *(slot for slots in self.divided.values() for slot in slots))

    @cached_property
    def kinds(self) -> tuple[InputSlot, ...]:
        """Inputs that say of what kind each of some things is, at most one for each symbol."""
        found = {
            slot.symbols[0]: slot
            for slot in reversed(self.inputs)
            if slot.is_kind
            and len(slot.symbols) == len(slot.shape) == 1
            and 2 <= slot.num_kinds <= MOST_KINDS
        }
        return tuple(slot for slot in self.inputs if slot in found.values())

    def kind_counts(self, arrays: Mapping[str, Any]) -> KindCounts | None:
        """Count things by kind; values are in their declared ranges.

        Returns None when a request leaves out one of the inputs that tell kinds.
        """
        if any(slot.name not in arrays for slot in self.kinds):
            return None
        counted = [_by_kind(np.asarray(arrays[slot.name]), slot) for slot in self.kinds]
        return KindCounts(
            tuple(int(counts[0]) for counts in counted),
            tuple(int(counts[1:].max()) for counts in counted),
        )

    def totals(self, counts: Sequence[int]) -> tuple[int, int]:
        """Return the number of nodes and of all other things, for reports."""
        nodes = len(self.nodes)
        return sum(counts[:nodes]), sum(counts[nodes:])

    def spread(self, num_nodes: int, num_edges: int) -> tuple[int, ...]:
        """Return counts with these totals, as evenly as whole numbers allow.

        Where shapes tell the number of graphs, there are as many as each has nodes.
        """
        others = [s for s in self.counts[len(self.nodes) :] if s not in self.divided]
        given = dict(zip(self.nodes, _shares(num_nodes, len(self.nodes)), strict=True))
        given |= zip(others, _shares(num_edges, len(others)), strict=True)
        for symbol, slots in self.divided.items():
            given[symbol] = isqrt(min(given[slot.symbols[0]] for slot in slots))
        return tuple(given[symbol] for symbol in self.counts)

    def with_nodes_in_each(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the counts with a graph at least and no more than nodes, so that none is empty."""
        given = dict(zip(self.counts, counts, strict=True))
        for symbol, slots in self.divided.items():
            nodes = min(given[slot.symbols[0]] for slot in slots)
            given[symbol] = min(max(1, given[symbol]), nodes)
        return tuple(given.values())

    @property
    def is_simple(self) -> bool:
        """True when numbers of nodes and edges tell all counts."""
        return len(self.nodes) == 1 and len(self.counts) <= 2

    @property
    def is_joinable(self) -> bool:
        """True when every input and output has things that it belongs to.

        Only then a disjoint union of requests has inputs, and outputs for each of them: what
        belongs to a request as a whole has no place in it.
        """
        return all(slot.symbols for slot in (*self.inputs, *self.outputs))

    def sizes(self, counts: Sequence[int]) -> dict[str, int]:
        """Return each symbol's count; there may be as many graphs as things in any."""
        sizes = dict(zip(self.counts, counts, strict=True))
        for symbol, slots in self.graphs.items():
            sizes[symbol] = max(sizes[slot.symbols[0]] if slot.symbols else 1 for slot in slots)
        return sizes

    def counts_of(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the counts that the inputs' shapes tell, which have the declared ranks.

        Raises InvalidInput when two of them disagree, naming both.
        """
        found: dict[str, tuple[int, str]] = {}
        for slot in self.inputs:
            for dim, size in zip(slot.shape, shapes.get(slot.name, ()), strict=False):
                if isinstance(dim, str):
                    other, by = found.setdefault(dim, (size, slot.name))
                    if other != size:
                        raise InvalidInput(
                            f"tensor '{slot.name}': {size} {dim}, but '{by}' has {other} {dim}"
                        )
        return tuple(found[symbol][0] for symbol in self.counts)

    def largest(self, arrays: Mapping[str, Any]) -> dict[str, int]:
        """Return the largest value, by name, of each index in `arrays` that numbers graphs.

        One without values has none.
        """
        told = (slot for slots in self.graphs.values() for slot in slots)
        found = {slot.name: arrays.get(slot.name) for slot in told}
        return {
            name: int(values.max())
            for name, values in found.items()
            if values is not None and values.shape[0]
        }

    def graph_counts(self, largest: Mapping[str, int], sizes: dict[str, int]) -> None:
        """Set the numbers of graphs in `sizes`, by what ``largest`` returns.

        An index that a request leaves out means one graph, none where there is nothing to point.
        """
        for symbol, slots in self.graphs.items():
            for slot in slots:
                value = largest.get(slot.name)
                least = min(1, prod(slot.shape_for(sizes))) if value is None else value + 1
                sizes[symbol] = max(sizes.get(symbol, 0), least)

    def bytes_per(self, slots: Iterable[TensorSlot]) -> tuple[tuple[float, ...], float]:
        """Return the bytes of `slots` for one more of each count, and those of fixed size.

        A tensor with two symbols is not linear; its bytes are those at a count of 1 of the others.
        """
        per = dict.fromkeys(self.counts, 0.0)
        fixed = 0.0
        for slot in slots:
            size = float(slot.element_bytes * prod(d for d in slot.shape if isinstance(d, int)))
            if not slot.symbols:
                fixed += size
                continue
            counted, *_ = slot.symbols
            # Each thing of any kind may be in a graph of its own.
            of_graphs = [each.symbols[0] for each in self.graphs.get(counted, ()) if each.symbols]
            for symbol in dict.fromkeys(of_graphs or [counted]):
                per[symbol] += size
        return tuple(per.values()), fixed


def interface_json(interface: Interface) -> str:
    """Return the interface as JSON, as clients find it in a model's metadata."""
    return msgspec.json.encode(interface).decode()


def _by_kind(values: np.ndarray[Any, Any], slot: InputSlot) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of things of each kind, from the least value on."""
    low = 0 if slot.datatype == "BOOL" else int(slot.bounds[0])
    counted = values if low == 0 else values.astype(np.int64) - low
    return np.bincount(counted, minlength=slot.num_kinds)


def _shares(total: int, count: int) -> list[int]:
    return [(total + i) // count for i in range(count)][::-1]
