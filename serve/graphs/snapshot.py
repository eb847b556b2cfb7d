"""One version of a resident graph, immutable, so that a request sees one version throughout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve import native
from serve.graphs.columns import Column
from serve.graphs.csr import Ids, Rows
from serve.graphs.edges import Edges, found_in

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of a graph of N nodes, E edges and F features."""

    version: int
    in_edges: Edges
    #: Features [N, F], read as float32.
    column: Column

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.in_edges.num_nodes

    @property
    def num_edges(self) -> int:
        """E."""
        return self.in_edges.num_edges

    @property
    def num_features(self) -> int:
        """F."""
        return self.column.shape[0]

    @property
    def base(self) -> Rows:
        """In-neighbours without the changes since."""
        return self.in_edges.base

    @property
    def x(self) -> NDArray[Any]:
        """Features without the changes since: float32, float16 or uint8, perhaps memory-mapped."""
        return self.column.base

    @property
    def mapped(self) -> bool:
        """True when features lie in a file and are read on demand."""
        return self.column.mapped

    @property
    def held_bytes(self) -> int:
        """Memory of all its arrays, without a mapped file."""
        return self.in_edges.nbytes + self.column.nbytes

    def sample(self, ids: Ids, fanouts: Sequence[int], seed: int) -> native.Sample:
        """See ``native.sample_neighbours``."""
        return native.sample_neighbours(self.in_edges.topology, ids, fanouts, seed)

    def sampled(self, ids: Ids, fanouts: Sequence[int], seed: int) -> tuple[native.Sample, int]:
        """Return a sample, and for how long it waited for other servers, in ns."""
        return self.sample(ids, fanouts, seed), 0

    def rehearsed(self, ids: Ids, fanouts: Sequence[int], seed: int) -> tuple[native.Sample, int]:
        """Return what `sampled` may return, without asking other servers."""
        return self.sampled(ids, fanouts, seed)

    def next(
        self,
        column: Column,
        num_nodes: int,
        remove: NDArray[np.int64],
        add: NDArray[np.int64],
    ) -> "Snapshot":
        """Return the version of these features, with some edges [2, E] removed and added.

        Raises InvalidInput, which names tensor, index and rule.
        """
        edges = self.in_edges.updated(remove, add, num_sources=num_nodes, num_nodes=num_nodes)
        return replace(self, version=self.version + 1, in_edges=edges, column=column)

    def check_removed(self, remove: NDArray[np.int64]) -> None:
        """Raise InvalidInput for edges [2, E] that are not there, where `next` does not."""

    def publish(self) -> None:
        """Let other servers know of this version, before requests see it."""
        self.column.publish()

    def gather(self, nodes: Ids, target: NDArray[np.float32]) -> int:
        """Write features of `nodes` [K] as float32 [K, F] to `target`; see ``Column.gather``."""
        return self.column.gather(nodes, target)

    def features(self, nodes: Ids) -> Floats:
        """Return features of `nodes` [K] as a new array [K, F]."""
        found = np.empty((nodes.size, self.num_features), np.float32)
        self.gather(nodes, found)
        return found

    def patched(self, nodes: Ids) -> tuple[Ids, Ids, Floats]:
        """Split a gather of `nodes` [K] into rows of `x` and changed rows.

        Returns the rows of `x` [K], where those of changed nodes are arbitrary; the positions of
        changed nodes in `nodes` [P], ascending; and their features [P, F].
        """
        there, places = found_in(self.column.changed, nodes)
        at = np.flatnonzero(there)
        return np.where(there, 0, nodes), at, self.column.rows[places[at]]

    def edges(self) -> NDArray[np.int64]:
        """Return all edges [2, E], sources first, ordered by destination."""
        return self.in_edges.all()
