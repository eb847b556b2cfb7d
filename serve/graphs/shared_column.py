"""The features of a graph that is shared out over several servers, as one of them holds them.

Each server has the features of the nodes of its own part, and those of the hot nodes, which are on
all servers. It gets others from where they are, while a request is prepared. Edges are all on each
server, or shared out with the features, see ``shared_snapshot``.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from serve.graphs.columns import Column
from serve.graphs.csr import Ids, Rows
from serve.graphs.edges import Edges
from serve.graphs.features import FeatureKeeper
from serve.graphs.partition import Parts
from serve.graphs.shared_changes import ChangeOrder

#: Place of a node whose features are not here.
_ELSEWHERE = -1
_DIGEST_BYTES = 16
Places = NDArray[np.int32]


class RowsOf(NamedTuple):
    """What tells servers that they mean the same rows."""

    graph: str
    #: Digest of what was read: topology, parts and number of features.
    files: bytes
    #: Digest of all changes since, in their order; of features alone where all edges are here.
    changes: bytes = b""


class RowSource(Protocol):
    """Gets rows from the servers that hold them. Any thread may call any method."""

    @property
    def part(self) -> int:
        """Part of the nodes whose features this server holds."""
        ...

    @property
    def changes(self) -> ChangeOrder | None:
        """What orders changes of these graphs; None where each server makes its own."""
        ...

    def asked(
        self, of: RowsOf, nodes: Ids, parts: Parts, num_features: int
    ) -> AbstractContextManager[Callable[[NDArray[Any], Ids], int]]:
        """Ask for the rows of `nodes` [K], which are of `parts` [K].

        Yields what waits for them and writes them to the rows `at` [K] of a target; it returns for
        how long it waited, in ns, and raises NotReady, which names who did not give them.
        """
        ...

    def expected_ns(self, parts: Parts, num_features: int) -> int:
        """Return what it takes to get a row of each of the `parts` [K], as far as is known."""
        ...

    def drawn(
        self,
        of: RowsOf,
        nodes: Ids,
        parts: Parts,
        num_nodes: int,
        fanout: int,
        hop_seed: int,
    ) -> tuple[Rows, int]:
        """Have the servers of the `parts` [K] draw in-neighbours for the `nodes` [K] of theirs.

        Returns these, each of the graph's `num_nodes` nodes, and for how long it waited, in ns;
        raises NotReady, which names who did not draw. See ``shared_sampling.drawn``.
        """
        ...

    def hold(self, column: "SharedColumn", edges: Edges | None = None) -> None:
        """Give other servers rows of that version from now on, and of those before for a while.

        With `edges`, which are those of the same nodes, draw for them too.
        """
        ...


@dataclass(frozen=True)
class SharedColumn(Column):
    """A feature [N, F] of which rows are elsewhere.

    What it has as a ``Column`` are the rows that are here, each in the place of a node.
    """

    #: Place of each node [N], or -1.
    places: Places
    #: Part of each node [N].
    parts: Parts
    #: Number of parts.
    part_count: int
    of_rows: RowsOf
    source: RowSource

    @property
    def nbytes(self) -> int:
        """See ``Column``."""
        return super().nbytes + self.places.nbytes + self.parts.nbytes

    def here(self, nodes: Ids) -> NDArray[np.bool_]:
        """Mark those of `nodes` [K] that this server holds."""
        held: NDArray[np.bool_] = self.places[nodes] != _ELSEWHERE
        return held

    def all_here(self, nodes: Ids) -> bool:
        """Return True when all of `nodes`, which may be none of the graph, are held here."""
        known = not nodes.size or 0 <= nodes.min() <= nodes.max() < self.places.size
        return bool(known and self.here(nodes).all())

    def gather(self, nodes: Ids, target: NDArray[Any]) -> int:
        """See ``Column``; raises NotReady when others did not give their rows."""
        places = self.places[nodes]
        away = np.flatnonzero(places == _ELSEWHERE)
        if not away.size:
            return super().gather(places.astype(np.int64), target)
        missing = nodes[away]
        parts, width = self.parts[missing], self.shape[0]
        with self.source.asked(self.of_rows, missing, parts, width) as arrive:
            self._gather_here(places, target)
            return arrive(target, away)

    def rehearse(self, nodes: Ids, target: NDArray[Any]) -> int:
        """See ``Column``."""
        places = self.places[nodes]
        self._gather_here(places, target)
        missing = nodes[places == _ELSEWHERE]
        return self.source.expected_ns(self.parts[missing], self.shape[0])

    def rows_here(self, nodes: Ids) -> NDArray[Any] | None:
        """Return the rows of `nodes` [K] as they are stored; None when one of them is not here."""
        if not self.all_here(nodes):
            return None
        places = self.places[nodes].astype(np.int64)
        # Changed rows need not fit the smaller type of the others.
        dtype = self.dtype if self.changed.size else self.base.dtype
        found = np.empty((nodes.size, *self.shape), dtype)
        super().gather(places, found)
        return found

    def own_bytes(self, other: "SharedColumn") -> int:
        """Return the memory of the arrays that it does not have in common with another version."""
        pairs: list[tuple[NDArray[Any], NDArray[Any]]] = [
            (self.base, other.base),
            (self.changed, other.changed),
            (self.rows, other.rows),
            (self.places, other.places),
            (self.parts, other.parts),
        ]
        return sum(mine.nbytes for mine, its in pairs if mine is not its)

    def publish(self) -> None:
        """See ``Column``."""
        self.source.hold(self)

    def updated(self, nodes: Ids, rows: NDArray[Any]) -> "SharedColumn":
        """See ``Column``; nodes that are added are of all parts in turn.

        Servers that make the same changes have the same rows, and know it by the digest.
        """
        if not nodes.size:
            return self
        known, places, parts = self.places.size, self.places, self.parts
        if (count := int(nodes.max()) + 1) > known:
            added = added_parts(known, count, self.part_count).astype(parts.dtype)
            here = added == self.source.part
            ends = np.cumsum(here) + int(places.max(initial=_ELSEWHERE))
            parts = np.concatenate([parts, added])
            places = np.concatenate([places, np.where(here, ends, _ELSEWHERE).astype(np.int32)])
        at = places[nodes]
        mine = at != _ELSEWHERE
        held = super().updated(at[mine].astype(np.int64), rows[mine])
        found = replace(self, changed=held.changed, rows=held.rows, places=places, parts=parts)
        return found.noted(nodes, rows)

    def noted(self, *change: NDArray[Any]) -> "SharedColumn":
        """Return the same features after a change, by which versions are told apart."""
        if not any(array.size for array in change):
            return self
        digest = hashlib.blake2b(self.of_rows.changes, digest_size=_DIGEST_BYTES)
        for array in change:
            # Where one array ends and the next begins: edges that are removed are not edges added.
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return replace(self, of_rows=self.of_rows._replace(changes=digest.digest()))

    def compacted(self, num_nodes: int, keeper: FeatureKeeper) -> "SharedColumn":
        """See ``Column``."""
        count = int(self.places.max(initial=_ELSEWHERE)) + 1
        held = super().compacted(count, keeper)
        return replace(self, base=held.base, changed=held.changed, rows=held.rows)

    def _gather_here(self, places: Places, target: NDArray[Any]) -> None:
        """Write the rows that are here; others are arbitrary."""
        here = places != _ELSEWHERE
        if here.any():
            any_row = places[here.argmax()]
            super().gather(np.where(here, places, any_row).astype(np.int64), target)


def shared_files(column: Column | None) -> bytes | None:
    """Return the digest of the files that a shared column is of; None for any other column."""
    return column.of_rows.files if isinstance(column, SharedColumn) else None


def graph_state(version: int, column: Column) -> str:
    """Return what tells versions of a graph apart on all servers; empty where it is not shared out.

    The number tells changes of edges apart where all servers have all of them.
    """
    if not isinstance(column, SharedColumn):
        return ""
    return f"{version}:{column.of_rows.files.hex()}:{column.of_rows.changes.hex()}"


def added_parts(known: int, count: int, part_count: int) -> Ids:
    """Return the parts of nodes that are added to the first `known` to make them `count`."""
    return np.arange(known, count) % part_count


def places_of(held: NDArray[np.bool_]) -> Places:
    """Return the place of each node among those that are held, or -1, [N]."""
    places = np.full(held.size, _ELSEWHERE, np.int32)
    places[held] = np.arange(np.count_nonzero(held), dtype=np.int32)
    return places
