"""Parts of a graph for several machines, and what a request then has to fetch from others.

Features, hundreds of bytes a node, are shared out: a request gathers those of its nodes from the
parts that they belong to. Edges, 4 bytes each, are whole on every machine, or shared out too: then
the parts draw for their nodes, hop by hop. The sample is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.errors import ConfigError
from serve.graphs.csr import Ids, Rows
from serve.graphs.generate import both_directions
from serve.graphs.shared_sampling import drawn, joined_sample, seed_of_hop
from serve.graphs.snapshot import Snapshot

#: `metis` keeps neighbours together (Karypis and Kumar, SIAM J. Sci. Comput. 20(1), 1998).
METHODS = ("metis", "random")
#: What a part of a node is stored as.
MOST_PARTS = 1 << 16
Parts = NDArray[np.uint16]
Marks = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Fetches:
    """What requests fetch from other machines than the one they are at, on average."""

    #: Nodes whose features a request gathers.
    nodes: float
    #: Share of them whose features are elsewhere; and if the hot nodes' features are everywhere.
    remote_share: float
    cold_remote_share: float
    #: Other machines that it asks.
    asked: float
    #: Hops that reach nodes which neither are of its part nor hot: so often it waits for others to
    #: draw where edges are shared out.
    rounds: float


def partition(snapshot: Snapshot, count: int, method: str, seed: int = 0) -> Parts:
    """Return the part of each node, [N], of `count` parts of about as many nodes.

    Edges count in both directions. `method` is one of `METHODS`. Raises ConfigError for another,
    for a number of parts that is impossible, and where METIS is not installed.
    """
    if method not in METHODS:
        raise ConfigError(f"method '{method}' is not one of {', '.join(METHODS)}")
    num_nodes = snapshot.num_nodes
    if not 1 <= count <= min(num_nodes, MOST_PARTS):
        raise ConfigError(
            f"parts: {count}, of a graph of {num_nodes} nodes 1 to {min(num_nodes, MOST_PARTS)}"
        )
    if method == "random":
        equal = np.arange(num_nodes) % count
        return np.random.default_rng(seed).permutation(equal).astype(np.uint16)
    try:
        import pymetis
    except ImportError:
        raise ConfigError("METIS is not installed: pip install 'gnnserve[cluster]'") from None
    ends = snapshot.edges()
    sources, targets = both_directions(ends[0], ends[1], num_nodes)
    starts = np.searchsorted(sources, np.arange(num_nodes + 1))
    adjacency = pymetis.CSRAdjacency(adj_starts=starts, adjacent=targets)
    found = pymetis.part_graph(count, adjacency, options=pymetis.Options(seed=seed))
    return np.asarray(found.vertex_part, np.uint16)


def cut_share(snapshot: Snapshot, parts: Parts) -> float:
    """Return the share of edges whose ends are in different parts."""
    sources, targets = snapshot.edges()
    return float(np.mean(parts[sources] != parts[targets])) if sources.size else 0.0


def imbalance(parts: Parts, count: int) -> float:
    """Return how many times the mean the largest part has, in nodes."""
    return float(np.bincount(parts, minlength=count).max() * count / parts.size)


def hottest(snapshot: Snapshot, share: float) -> Marks:
    """Mark the share of nodes that are in-neighbours of most others, [N]."""
    return hottest_of(snapshot.edges()[0], snapshot.num_nodes, share)


def hottest_of(sources: NDArray[Any], num_nodes: int, share: float) -> Marks:
    """Mark the share of `num_nodes` nodes that are most often in `sources`, [N]."""
    return hottest_by(np.bincount(sources, minlength=num_nodes), share)


def hottest_by(degrees: NDArray[np.int64], share: float) -> Marks:
    """Mark the share of the nodes that have the most of `degrees`, [N]."""
    hot = np.zeros(degrees.size, bool)
    hot[np.argsort(-degrees, kind="stable")[: int(share * degrees.size)]] = True
    return hot


def fetches(
    snapshot: Snapshot,
    parts: Parts,
    hot: Marks,
    requests: Sequence[NDArray[np.int64]],
    fanouts: Sequence[int],
) -> Fetches:
    """Sample `requests`, the ids of each, and count what they fetch.

    Each is at the machine whose part has most of its ids. `hot` marks nodes whose features are
    everywhere, [N].
    """
    counted = np.zeros(5)
    for seed, ids in enumerate(requests):
        home = int(np.bincount(parts[ids]).argmax())
        elsewhere = ~hot & (parts != home)
        rounds = 0

        def draw(nodes: Ids, hop: int, seed: int = seed, away: Marks = elsewhere) -> Rows:
            nonlocal rounds
            rounds += bool(away[nodes].any())
            return drawn(snapshot.in_edges, nodes, fanouts[hop], seed_of_hop(seed, hop))

        sample = joined_sample(ids, fanouts, snapshot.num_nodes, seed, draw)
        nodes = np.empty(sample.num_nodes, np.int64)
        sample.write_nodes(nodes)
        remote = nodes[parts[nodes] != home]
        cold, asked = np.count_nonzero(~hot[remote]), np.unique(parts[remote]).size
        counted += np.array([nodes.size, remote.size, cold, asked, rounds])
    gathered, remote_in_all, cold_in_all, asked_in_all, rounds_in_all = counted.tolist()
    return Fetches(
        gathered / len(requests), remote_in_all / gathered, cold_in_all / gathered,
        asked_in_all / len(requests), rounds_in_all / len(requests),
    )  # fmt: skip


def held_edges(snapshot: Snapshot, parts: Parts, hot: Marks) -> NDArray[np.int64]:
    """Return the in-edges of the nodes of each part, and of the hot ones, by part."""
    return held_of(snapshot.in_edges.degrees(np.arange(snapshot.num_nodes)), parts, hot)


def held_of(degrees: NDArray[np.int64], parts: Parts, hot: Marks) -> NDArray[np.int64]:
    """Return the sum of `degrees` [N] of the nodes of each part, and of the hot ones, by part."""
    cold = np.bincount(parts[~hot], weights=degrees[~hot], minlength=int(parts.max()) + 1)
    return cold.astype(np.int64) + int(degrees[hot].sum())
