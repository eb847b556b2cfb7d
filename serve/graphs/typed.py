"""A resident graph with several types of nodes and edges: its versions and their samples.

Node types have names, such as `paper`. An edge type is named by its three parts, such as
`author__writes__paper`, as in the names of declared inputs (``serve.typed_names``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve import native
from serve.graphs.columns import Column
from serve.graphs.csr import Ids
from serve.graphs.edges import Edges
from serve.graphs.shared_snapshot import SharedSnapshot
from serve.graphs.snapshot import Snapshot
from serve.typed_names import edge_ends, edge_type

_Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class NodeTable:
    """The nodes of one type."""

    num_nodes: int
    #: Features by name.
    columns: Mapping[str, Column]


@dataclass(frozen=True)
class TypedSnapshot:
    """One version of a graph; both mappings are in the order of the names, and never change."""

    version: int
    nodes: Mapping[str, NodeTable]
    edges: Mapping[str, Edges]
    #: Draws for the only types of nodes and edges, where the edges are on several servers.
    _shared: SharedSnapshot | None = None

    @classmethod
    def of(cls, snapshot: Snapshot) -> "TypedSnapshot":
        """Return a graph of one type of nodes and one of edges, whose names are empty."""
        table = NodeTable(snapshot.num_nodes, {"x": snapshot.column})
        edges = {edge_type("", "", ""): snapshot.in_edges}
        shared = snapshot if isinstance(snapshot, SharedSnapshot) else None
        return cls(snapshot.version, {"": table}, edges, shared)

    @property
    def num_nodes(self) -> int:
        """Nodes of all types."""
        return sum(table.num_nodes for table in self.nodes.values())

    @property
    def num_edges(self) -> int:
        """Edges of all types."""
        return sum(edges.num_edges for edges in self.edges.values())

    @cached_property
    def held_bytes(self) -> int:
        """Memory of all its arrays, without mapped files."""
        columns = sum(column.nbytes for column in self.columns.values())
        return columns + sum(edges.nbytes for edges in self.edges.values())

    @property
    def columns(self) -> dict[tuple[str, str], Column]:
        """All features, by node type and name."""
        return {
            (node_type, name): column
            for node_type, table in self.nodes.items()
            for name, column in table.columns.items()
        }

    @cached_property
    def _keys(self) -> dict[str, int]:
        return {name: key for key, name in enumerate(self.edges)}

    def count(self, thing: str) -> int:
        """Return the number of nodes or edges of that type."""
        if thing in self.nodes:
            return self.nodes[thing].num_nodes
        return self.edges[thing].num_edges

    def sample(
        self,
        node_type: str,
        ids: Ids,
        fanouts: Mapping[str, Sequence[int]],
        seed: int,
        *,
        rehearse: bool = False,
    ) -> "TypedSample":
        """Sample the neighbourhood of `ids` [K] of one node type along some edge types.

        `fanouts` has one number per hop for each edge type, as many for all: -1 takes every
        in-neighbour, 0 none. At each hop, every node first reached at the hop before draws from
        each edge type that ends at its type, in the order of the graph. What a node draws depends
        on `seed`, the hop, the edge type and the node alone. With `rehearse` no other server is
        asked, and the sample is one that may be.
        """
        types = {name: at for at, name in enumerate(self.nodes)}
        names = [name for name in self.edges if name in fanouts]
        ends = [edge_ends(name) for name in names]
        hops = zip(*(fanouts[name] for name in names), strict=True)
        drawn = {name: self._drawn(name, ids, fanouts[name], seed, rehearse) for name in names}
        found = native.sample_typed(
            [topology for topology, _ in drawn.values()],
            [(types[source], types[target]) for source, target in ends],
            [self._keys[name] for name in names],
            [table.num_nodes for table in self.nodes.values()],
            types[node_type],
            ids,
            list(chain.from_iterable(hops)),
            seed,
        )
        relations = {name: at for at, name in enumerate(names)}
        network_ns = sum(waited_ns for _, waited_ns in drawn.values())
        return TypedSample(found, types, relations, ids.size, network_ns)

    def _drawn(
        self, name: str, ids: Ids, fanouts: Sequence[int], seed: int, rehearse: bool
    ) -> tuple[native.Topology, int]:
        """Return rows of which to sample, and how long other servers take to give them, in ns."""
        if self._shared is None:
            return self.edges[name].topology, 0
        draw = self._shared.likely_for if rehearse else self._shared.drawn_for
        return draw(ids, fanouts, seed)


@dataclass(frozen=True, slots=True)
class TypedSample:
    """A sampled subgraph; each node type has local ids of its own, the requested nodes' first."""

    _found: native.TypedSample
    _types: Mapping[str, int]
    _relations: Mapping[str, int]
    _num_ids: int
    #: How long other servers took to draw.
    network_ns: int

    def count(self, thing: str) -> int:
        """Return the number of nodes or edges of that type."""
        if thing in self._types:
            return self._found.num_nodes(self._types[thing])
        return self._found.num_edges(self._relations[thing])

    def nodes(self, node_type: str) -> Ids:
        """Return the graph's node of each local id, int64."""
        found = np.empty(self.count(node_type), np.int64)
        self._found.write_nodes(self._types[node_type], found)
        return found

    def positions(self) -> Ids:
        """Return the local id of each requested id, int64."""
        found = np.empty(self._num_ids, np.int64)
        self._found.write_positions(found)
        return found

    def write_edges(self, name: str, target: _Array) -> None:
        """Write the edges of the type `name` in local ids to `target`, int32 or int64 [2, E]."""
        is_int32 = target.dtype == np.int32
        self._found.write_edges(self._relations[name], target, is_int32)
