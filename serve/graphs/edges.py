"""The edges of one type in a resident graph: base rows, and rows that changed since.

Immutable: a change makes new patched rows and shares the base, so readers of older versions are
neither blocked nor disturbed.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serve import native
from serve.errors import InvalidInput
from serve.graphs.csr import NO_ROWS, Ids, Rows, grouped, joined

NO_IDS: Ids = np.empty(0, np.int64)
#: A patch of more entries than these and than 1/8 of the base is compacted into a new base.
PATCH_SHARE = 8
_LEAST_PATCHED_EDGES = 1 << 16


@dataclass(frozen=True, slots=True)
class Edges:
    """In-neighbours of `num_nodes` nodes, by destination."""

    num_nodes: int
    num_edges: int
    #: In-neighbours of the base's nodes.
    base: Rows
    #: Nodes with other in-neighbours than in the base, ascending, and these in-neighbours.
    changed: Ids = field(default_factory=lambda: NO_IDS)
    rows: Rows = NO_ROWS
    topology: native.Topology = field(init=False)

    def __post_init__(self) -> None:
        topology = native.Topology(
            self.num_nodes,
            self.base.starts,
            self.base.values,
            self.base.values.dtype == np.int32,
            self.changed,
            self.rows.starts,
            np.ascontiguousarray(self.rows.values, np.int64),
        )
        object.__setattr__(self, "topology", topology)

    @classmethod
    def of(cls, base: Rows) -> "Edges":
        """Return edges without a patch."""
        return cls(base.starts.size - 1, base.values.size, base)

    @property
    def nbytes(self) -> int:
        """Memory of all its arrays."""
        return self.base.nbytes + self.changed.nbytes + self.rows.nbytes

    def own_bytes(self, other: "Edges") -> int:
        """Return the memory of the arrays that it does not have in common with another version."""
        pairs = (self.base, other.base), (self.rows, other.rows)
        rows_bytes = sum(mine.nbytes for mine, its in pairs if mine is not its)
        return rows_bytes + (0 if self.changed is other.changed else self.changed.nbytes)

    @property
    def needs_compacting(self) -> bool:
        """True when the patch is so large that copying it for each change is slow."""
        most = max(_LEAST_PATCHED_EDGES, self.base.values.size // PATCH_SHARE)
        return self.rows.values.size + self.changed.size > most

    def degrees(self, nodes: Ids) -> Ids:
        """Return the number of in-neighbours of each of `nodes`, [K]."""
        patched, places = found_in(self.changed, nodes)
        known = ~patched & (nodes < self.base.starts.size - 1)
        found = np.zeros(nodes.size, np.int64)
        for which, rows, at in (
            (known, self.base, nodes[known]),
            (patched, self.rows, places[patched]),
        ):
            found[which] = rows.starts[at + 1] - rows.starts[at]
        return found

    def neighbours(self, nodes: Ids) -> Rows:
        """Return the in-neighbours of `nodes` [K] as int64 ids, a row for each."""
        patched, places = found_in(self.changed, nodes)
        known = ~patched & (nodes < self.base.starts.size - 1)
        lengths = np.zeros(nodes.size, np.int64)
        from_base = self.base.take(nodes[known])
        from_patch = self.rows.take(places[patched])
        lengths[known], lengths[patched] = from_base.lengths, from_patch.lengths
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        values = np.empty(starts[-1], np.int64)
        for which, part in ((known, from_base), (patched, from_patch)):
            at = np.repeat(starts[:-1][which] - part.starts[:-1], part.lengths)
            values[at + np.arange(part.values.size)] = part.values
        return Rows(starts, values)

    def those_there(self, edges: NDArray[np.int64], num_sources: int) -> NDArray[np.int64]:
        """Return those of `edges` [2, K] that are among these."""
        nodes = np.unique(edges[1])
        return edges[:, are_in(nodes, self.neighbours(nodes), edges, num_sources)]

    def all(self) -> NDArray[np.int64]:
        """Return all edges [2, E], sources first, ordered by destination."""
        found = self.neighbours(np.arange(self.num_nodes))
        return np.stack([found.values, found.row_numbers()])

    def updated(
        self,
        remove: NDArray[np.int64],
        add: NDArray[np.int64],
        *,
        num_sources: int,
        num_nodes: int,
        of: str = "",
    ) -> "Edges":
        """Return the edges [2, E] without those to `remove`, then with those to `add`.

        The graph has `num_sources` and `num_nodes` nodes to come from and to go to. Raises
        InvalidInput, which names tensor, with `of` behind its name, index and rule.
        """
        for name, ends in (("remove_edges", remove), ("add_edges", add)):
            check_ids(f"{name}{of}", ends, np.array([[num_sources], [num_nodes]]))
        nodes = np.unique(np.concatenate([remove[1], add[1]]))
        old = self.neighbours(nodes)
        sources, ends = old.values, old.row_numbers()
        if remove.size:
            check_there(nodes, old, remove, num_sources, of)
            present = ends * num_sources + sources
            removed = np.searchsorted(nodes, remove[1]) * num_sources + remove[0]
            kept = ~np.isin(present, removed)
            sources, ends = sources[kept], ends[kept]
        sources = np.concatenate([sources, add[0]])
        ends = np.concatenate([ends, np.searchsorted(nodes, add[1])])
        rows = grouped(ends, sources, nodes.size)
        # Counted over the changed rows only: summing over the graph would cost O(N).
        num_edges = self.num_edges + rows.values.size - old.values.size
        return Edges(num_nodes, num_edges, self.base, *self._merged(nodes, rows))

    def compacted(self, num_sources: int) -> "Edges":
        """Return the same edges without a patch."""
        base = Rows(*native.build_rows(self.all(), self.num_nodes, num_sources))
        return Edges(self.num_nodes, self.num_edges, base)

    def _merged(self, nodes: Ids, rows: Rows) -> tuple[Ids, Rows]:
        """Merge new rows into the patch; new ones replace old ones."""
        if not nodes.size:
            return self.changed, self.rows
        kept = np.flatnonzero(~np.isin(self.changed, nodes))
        found = np.concatenate([self.changed[kept], nodes])
        order = np.argsort(found)
        return found[order], joined([self.rows.take(kept), rows]).take(order)


def found_in(ascending: Ids, values: Ids) -> tuple[NDArray[np.bool_], Ids]:
    """Return a mask of the values that are in `ascending`, and the places of these."""
    places = np.searchsorted(ascending, values)
    inside = places < ascending.size
    there = np.zeros(values.size, bool)
    there[inside] = ascending[places[inside]] == values[inside]
    return there, places


def are_in(nodes: Ids, rows: Rows, edges: NDArray[np.int64], num_sources: int) -> NDArray[np.bool_]:
    """Mark the `edges` [2, K] that are in the rows of in-neighbours of `nodes`, ascending."""
    present = rows.row_numbers() * num_sources + rows.values
    return np.isin(np.searchsorted(nodes, edges[1]) * num_sources + edges[0], present)


def check_there(
    nodes: Ids, rows: Rows, remove: NDArray[np.int64], num_sources: int, of: str = ""
) -> None:
    """Raise InvalidInput, with the place, unless all edges to `remove` are there; see `are_in`."""
    missing = ~are_in(nodes, rows, remove, num_sources)
    if missing.any():
        at = int(missing.argmax())
        source, end = remove[:, at].tolist()
        raise InvalidInput(
            f"tensor 'remove_edges{of}' [:, {at}]: there is no edge {source} → {end}"
        )


def check_ids(name: str, ids: NDArray[np.int64], bound: int | NDArray[np.int64]) -> None:
    """Raise InvalidInput, with the place, unless all ids are in [0, `bound`)."""
    bad = (ids < 0) | (ids >= bound)
    if bad.any():
        at = np.unravel_index(int(bad.argmax()), ids.shape)
        where = ", ".join(str(int(i)) for i in at)
        limit = np.broadcast_to(bound, ids.shape)[at]
        raise InvalidInput(f"tensor '{name}' [{where}] is {ids[at]}; it must be in [0, {limit})")
