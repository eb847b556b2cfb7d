"""One version of a graph whose edges are shared out as its features are, as one server holds it.

It has the in-edges and the features of the same nodes: those of its part, and the hot ones. Where
a sample reaches another node, an owner of that node draws for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from serve import native
from serve.graphs.columns import Column
from serve.graphs.csr import Ids, Rows, joined, offsets
from serve.graphs.edges import check_ids, check_there
from serve.graphs.shared_column import SharedColumn
from serve.graphs.shared_sampling import Draw, drawn, joined_rows, seed_of_hop
from serve.graphs.snapshot import Snapshot

#: Nodes that are looked at for each part, to find some that are here.
_LOOKED_AT = 64


@dataclass(frozen=True, slots=True)
class SharedSnapshot(Snapshot):
    """One version of a graph of N nodes, E edges and F features.

    `in_edges` has the rows of the nodes that are here, and the number of all edges, E. That counts
    an edge once when it is removed, as the repeats that go with it may be elsewhere.
    """

    column: SharedColumn

    def sampled(self, ids: Ids, fanouts: Sequence[int], seed: int) -> tuple[native.Sample, int]:
        """See ``Snapshot``; raises NotReady when another server did not draw."""
        topology, waited_ns = self.drawn_for(ids, fanouts, seed)
        return native.sample_neighbours(topology, ids, fanouts, seed), waited_ns

    def sample(self, ids: Ids, fanouts: Sequence[int], seed: int) -> native.Sample:
        """See ``Snapshot``; raises NotReady when another server did not draw."""
        return self.sampled(ids, fanouts, seed)[0]

    def rehearsed(self, ids: Ids, fanouts: Sequence[int], seed: int) -> tuple[native.Sample, int]:
        """See ``Snapshot``: nodes that are elsewhere have neighbours as nodes here have them."""
        topology, expected_ns = self.likely_for(ids, fanouts, seed)
        return native.sample_neighbours(topology, ids, fanouts, seed), expected_ns

    def drawn_for(self, ids: Ids, fanouts: Sequence[int], seed: int) -> tuple[native.Topology, int]:
        """Return the rows that a sample draws, and for how long it waited for others, in ns.

        Who samples these with the same ids, fan-outs and seed takes all of each. Raises NotReady.
        """
        waited_ns = 0

        def draw(nodes: Ids, hop: int) -> Rows:
            nonlocal waited_ns
            found, hop_ns = self._rows(nodes, fanouts[hop], seed_of_hop(seed, hop))
            waited_ns += hop_ns
            return found

        return self._joined(ids, fanouts, draw), waited_ns

    def likely_for(
        self, ids: Ids, fanouts: Sequence[int], seed: int
    ) -> tuple[native.Topology, int]:
        """Return what `drawn_for` may return, without asking other servers."""
        expected_ns = 0
        rng = np.random.default_rng(seed)

        def draw(nodes: Ids, hop: int) -> Rows:
            nonlocal expected_ns
            here = self.column.here(nodes)
            mine = drawn(self.in_edges, nodes[here], fanouts[hop], seed_of_hop(seed, hop))
            away = nodes[~here]
            theirs = self._likely(away.size, fanouts[hop], rng)
            if away.size:
                each = theirs.values.size // away.size
                parts = self.column.parts[away]
                expected_ns += self.column.source.expected_ns(parts, each)
            return _in_place(here, mine, theirs)

        return self._joined(ids, fanouts, draw), expected_ns

    def next(
        self,
        column: Column,
        num_nodes: int,
        remove: NDArray[np.int64],
        add: NDArray[np.int64],
    ) -> "SharedSnapshot":
        """See ``Snapshot``; only rows that are here change, and what is not there is not removed.

        Whether it is there `check_removed` tells, before the change is ordered.
        """
        assert isinstance(column, SharedColumn)
        for name, ends in (("remove_edges", remove), ("add_edges", add)):
            check_ids(name, ends, num_nodes)
        mine = self.in_edges.those_there(remove[:, column.here(remove[1])], num_nodes)
        added = add[:, column.here(add[1])]
        edges = self.in_edges.updated(mine, added, num_sources=num_nodes, num_nodes=num_nodes)
        gone = np.unique(remove, axis=1).shape[1]
        edges = replace(edges, num_edges=max(0, self.num_edges + add.shape[1] - gone))
        return replace(
            self, version=self.version + 1, in_edges=edges, column=column.noted(remove, add)
        )

    def check_removed(self, remove: NDArray[np.int64]) -> None:
        """See ``Snapshot``; raises NotReady when another server did not tell."""
        check_ids("remove_edges", remove, self.num_nodes)
        nodes = np.unique(remove[1])
        rows, _ = self._rows(nodes, native.ALL_NEIGHBOURS, 0)
        check_there(nodes, rows, remove, self.num_nodes)

    def publish(self) -> None:
        """See ``Snapshot``."""
        self.column.source.hold(self.column, self.in_edges)

    def _joined(self, ids: Ids, fanouts: Sequence[int], draw: Draw) -> native.Topology:
        check_ids("node_ids", ids, self.num_nodes)
        return joined_rows(ids, fanouts, self.num_nodes, draw)

    def _rows(self, nodes: Ids, fanout: int, hop_seed: int) -> tuple[Rows, int]:
        """Return what each of `nodes`, which are distinct, draws, and how long others took."""
        here = self.column.here(nodes)
        mine = drawn(self.in_edges, nodes[here], fanout, hop_seed)
        if here.all():
            return mine, 0
        away = nodes[~here]
        source, parts = self.column.source, self.column.parts[away]
        of_rows = self.column.of_rows
        theirs, waited_ns = source.drawn(of_rows, away, parts, self.num_nodes, fanout, hop_seed)
        return _in_place(here, mine, theirs), waited_ns

    def _likely(self, count: int, fanout: int, rng: np.random.Generator) -> Rows:
        """Return `count` rows of lengths and nodes that rows here have."""
        looked_at = rng.integers(0, self.num_nodes, _LOOKED_AT * self.column.part_count)
        known, values = looked_at[self.column.here(looked_at)], self.base.values
        lengths = np.zeros(count, np.int64)
        if known.size and values.size:
            lengths = self.in_edges.degrees(rng.choice(known, count))
        if fanout != native.ALL_NEIGHBOURS:
            lengths = np.minimum(lengths, fanout)
        at = rng.integers(0, max(1, values.size), int(lengths.sum()))
        return Rows(offsets(lengths), values[at].astype(np.int64))


def _in_place(here: NDArray[np.bool_], mine: Rows, theirs: Rows) -> Rows:
    """Return the rows of nodes, of which `here` marks those in `mine`."""
    places = np.empty(here.size, np.int64)
    places[here] = np.arange(np.count_nonzero(here))
    places[~here] = np.arange(np.count_nonzero(here), here.size)
    return joined([mine, theirs]).take(places)
