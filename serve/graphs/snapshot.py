"""One version of a resident graph, immutable, so that a request sees one version throughout.

It has a base, the edges and features of the opened or last compacted graph, and a patch: rows that
were changed or added since. A change makes a new patch and shares the base, so readers of older
versions are neither blocked nor disturbed.
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

    #: Nodes with changed in-neighbours, ascending, and these in-neighbours.
    nodes: Ids
    rows: Rows
    #: Nodes with changed features, ascending [P], and these features [P, F].
    featured: Ids
    x: Floats

    @property
    def nbytes(self) -> int:
        """Memory of all its arrays."""
        return self.nodes.nbytes + self.rows.nbytes + self.featured.nbytes + self.x.nbytes


def no_patch(num_features: int) -> Patch:
    """Return an empty patch."""
    none = np.empty(0, np.int64)
    return Patch(none, NO_ROWS, none, np.empty((0, num_features), np.float32))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of a graph of N nodes, E edges and F features."""

    version: int
    num_nodes: int
    num_edges: int
    #: In-neighbours of the base's N0 nodes.
    base: Rows
    #: Features of the base's nodes [N0, F]: float32, float16 or uint8, in memory or memory-mapped.
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
        """True when features lie in a file and are read on demand."""
        return isinstance(self.x, np.memmap)

    @property
    def held_bytes(self) -> int:
        """Memory of all its arrays, without a mapped file."""
        return self.base.nbytes + self.patch.nbytes + (0 if self.mapped else self.x.nbytes)

    def sample(self, ids: Ids, fanouts: Sequence[int], seed: int) -> native.Sample:
        """See ``native.sample_neighbours``."""
        return native.sample_neighbours(self.topology, ids, fanouts, seed)

    def gather(self, nodes: Ids, target: Any) -> None:
        """Write features of `nodes` [K] as float32 [K, F] to the buffer `target`."""
        native.gather_rows(self.x, self.patch.featured, self.patch.x, nodes, target)

    def features(self, nodes: Ids) -> Floats:
        """Return features of `nodes` [K] as a new array [K, F]."""
        found = np.empty((nodes.size, self.num_features), np.float32)
        self.gather(nodes, found)
        return found

    def patched(self, nodes: Ids) -> tuple[Ids, Ids, Floats]:
        """Split a gather of `nodes` [K] into rows of `x` and rows of the patch.

        Returns the rows of `x` [K], where those of patched nodes are arbitrary; the positions of
        patched nodes in `nodes` [P], ascending; and their features [P, F].
        """
        there, places = _found(self.patch.featured, nodes)
        at = np.flatnonzero(there)
        return np.where(there, 0, nodes), at, self.patch.x[places[at]]

    def neighbours(self, nodes: Ids) -> Rows:
        """Return the in-neighbours of `nodes` [K] as int64 ids, a row for each."""
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
        """Return all edges [2, E], sources first, ordered by destination."""
        found = self.neighbours(np.arange(self.num_nodes))
        return np.stack([found.values, found.row_numbers()])


def _found(ascending: Ids, values: Ids) -> tuple[NDArray[np.bool_], Ids]:
    """Return a mask of the values that are in `ascending`, and the places of these."""
    places = np.searchsorted(ascending, values)
    inside = places < ascending.size
    there = np.zeros(values.size, bool)
    there[inside] = ascending[places[inside]] == values[inside]
    return there, places
