"""One version of a resident graph: immutable, so that a request sees one version throughout.

Edges and features are those the graph was opened with, or was last compacted to, and a patch:
rows that were changed or added since. A change makes a new patch and shares the rest, so readers
of older versions are neither blocked nor disturbed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve import native
from serve.graphs.csr import NO_ROWS, Ids, Rows

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Patch:
    """Rows that replace those of the base."""

    #: Nodes whose in-neighbours are others, ascending, and these.
    nodes: Ids
    rows: Rows
    #: Nodes whose features are others, ascending, and these [P, F].
    featured: Ids
    x: Floats

    @property
    def nbytes(self) -> int:
        """Memory of all its arrays."""
        return self.nodes.nbytes + self.rows.nbytes + self.featured.nbytes + self.x.nbytes


def no_patch(num_features: int) -> Patch:
    """Nothing is another."""
    none = np.empty(0, np.int64)
    return Patch(none, NO_ROWS, none, np.empty((0, num_features), np.float32))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of a graph of N nodes, E edges and F features."""

    version: int
    num_nodes: int
    num_edges: int
    #: In-neighbours of the nodes there were at first.
    base: Rows
    #: Their features [N0, F]: float32, float16 or uint8, in memory or memory-mapped.
    x: NDArray[Any]
    patch: Patch
    topology: native.Topology = field(init=False)

    def __post_init__(self) -> None:
        topology = native.Topology(
            self.num_nodes,
            self.base.starts,
            self.base.values,
            self.base.values.dtype == np.int32,
            self.patch.nodes,
            self.patch.rows.starts,
            np.ascontiguousarray(self.patch.rows.values, np.int64),
        )
        object.__setattr__(self, "topology", topology)

    @property
    def num_features(self) -> int:
        """F."""
        return int(self.x.shape[1])

    @property
    def mapped(self) -> bool:
        """Features lie in a file and are read as they are needed."""
        return isinstance(self.x, np.memmap)

    @property
    def held_bytes(self) -> int:
        """Memory it takes, less what lies in a file."""
        return self.base.nbytes + self.patch.nbytes + (0 if self.mapped else self.x.nbytes)

    def sample(self, ids: Ids, fanouts: Sequence[int], seed: int) -> native.Sample:
        """See ``native.sample_neighbours``."""
        return native.sample_neighbours(self.topology, ids, fanouts, seed)

    def gather(self, nodes: Ids, target: Any) -> None:
        """Features of `nodes` [K] as float32 [K, F] into the buffer `target`."""
        native.gather_rows(self.x, self.patch.featured, self.patch.x, nodes, target)

    def features(self, nodes: Ids) -> Floats:
        """The same as an array of its own."""
        found = np.empty((nodes.size, self.num_features), np.float32)
        self.gather(nodes, found)
        return found

    def patched(self, nodes: Ids) -> tuple[Ids, Ids, Floats]:
        """Where the features of `nodes` [K] are taken from.

        Rows of `x` [K], any where the patch has others; positions in `nodes` of those [P],
        ascending, and their features [P, F].
        """
        there, places = _found(self.patch.featured, nodes)
        at = np.flatnonzero(there)
        return np.where(there, 0, nodes), at, self.patch.x[places[at]]

    def neighbours(self, nodes: Ids) -> Rows:
        """In-neighbours of `nodes` [K], ids as int64, row by row."""
        patched, places = _found(self.patch.nodes, nodes)
        known = ~patched & (nodes < self.base.starts.size - 1)
        lengths = np.zeros(nodes.size, np.int64)
        from_base = self.base.take(nodes[known])
        from_patch = self.patch.rows.take(places[patched])
        lengths[known], lengths[patched] = from_base.lengths, from_patch.lengths
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        values = np.empty(starts[-1], np.int64)
        for which, part in ((known, from_base), (patched, from_patch)):
            at = np.repeat(starts[:-1][which] - part.starts[:-1], part.lengths)
            values[at + np.arange(part.values.size)] = part.values
        return Rows(starts, values)

    def edges(self) -> NDArray[np.int64]:
        """All edges [2, E], sources and destinations, by destination."""
        found = self.neighbours(np.arange(self.num_nodes))
        return np.stack([found.values, found.row_numbers()])


def _found(ascending: Ids, values: Ids) -> tuple[NDArray[np.bool_], Ids]:
    """Which values are among the ascending ones, and where."""
    places = np.searchsorted(ascending, values)
    inside = places < ascending.size
    there = np.zeros(values.size, bool)
    there[inside] = ascending[places[inside]] == values[inside]
    return there, places
