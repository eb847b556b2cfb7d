"""Cut request-sized subgraphs out of a dataset: breadth-first balls around random roots.

Sizes are log-spaced, so that small and large requests are equally common. A ball that exhausts its
component continues from another root, so a subgraph is connected if its component is large enough.
"""

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serve.graphs.datasets import Dataset
from serve.graphs.generate import distinct

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Some nodes of a dataset and every edge between them."""

    dataset: str
    index: int
    #: Ids in the dataset [N], in the order of the search.
    nodes: Ids
    #: [2, E], ids in [0, N), both directions, sorted by source.
    edge_index: NDArray[np.int64]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, N."""
        return self.nodes.size

    @property
    def num_edges(self) -> int:
        """Number of directed edges, E."""
        return int(self.edge_index.shape[1])


def subgraphs(
    dataset: Dataset,
    count: int = 25,
    *,
    seed: int = 0,
    min_nodes: int = 100,
    max_nodes: int = 8_000,
    max_edges: int | None = None,
) -> tuple[Subgraph, ...]:
    """Cut `count` subgraphs with log-spaced node counts from `min_nodes` to `max_nodes`.

    No subgraph is larger than the dataset. One with more than `max_edges` edges is cut back to the
    nodes that the search found first. Raises ValueError for inconsistent arguments.
    """
    if not (count >= 1 and 1 <= min_nodes <= max_nodes and (max_edges is None or max_edges >= 0)):
        raise ValueError(f"count {count}, nodes {min_nodes}..{max_nodes}, edges {max_edges}")
    top = min(max_nodes, dataset.num_nodes)
    sizes = np.geomspace(min(min_nodes, top), top, count).round().astype(int)
    name = zlib.crc32(dataset.name.encode())
    pool = []
    for index, size in enumerate(sizes.tolist()):
        rng = np.random.default_rng([seed, name, index])
        nodes, edges = _induced(dataset, _ball(dataset, size, rng))
        if max_edges is not None and edges.shape[1] > max_edges:
            nodes, edges = _first_nodes(nodes, edges, max_edges)
        pool.append(Subgraph(dataset.name, index, nodes, edges))
    return tuple(pool)


def _ball(dataset: Dataset, size: int, rng: np.random.Generator) -> Ids:
    """Return `size` nodes in breadth-first order, each level in random order."""
    seen = np.zeros(dataset.num_nodes, dtype=bool)
    levels: list[Ids] = []
    left = size
    for root in rng.permutation(dataset.num_nodes):
        level = np.array([root]) if not seen[root] else np.empty(0, dtype=np.int64)
        while left and level.size:
            rng.shuffle(level)
            level = level[:left]
            seen[level] = True
            levels.append(level)
            left -= level.size
            near, _ = _neighbours(dataset, level)
            level = distinct(near[~seen[near]])
        if not left:
            break
    return np.concatenate(levels)


def _neighbours(dataset: Dataset, nodes: Ids) -> tuple[Ids, Ids]:
    """Return the concatenated neighbours of `nodes`, and the number of each node's."""
    starts = dataset.offsets[nodes]
    counts = dataset.offsets[nodes + 1] - starts
    shift = np.repeat(starts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    return dataset.edge_index[1, shift + np.arange(shift.size)].astype(np.int64), counts


def _induced(dataset: Dataset, nodes: Ids) -> tuple[Ids, Ids]:
    """Return `nodes` and the edges among them [2, E] in local ids."""
    local = np.full(dataset.num_nodes, -1, dtype=np.int64)
    local[nodes] = np.arange(nodes.size)
    near, counts = _neighbours(dataset, nodes)
    dst = local[near]
    inside = dst >= 0
    return nodes, np.stack([np.repeat(np.arange(nodes.size), counts)[inside], dst[inside]])


def _first_nodes(nodes: Ids, edges: Ids, max_edges: int) -> tuple[Ids, Ids]:
    """Return the longest prefix of nodes with at most `max_edges` edges; at least one node."""
    newest = edges.max(axis=0)
    edges_within = np.cumsum(np.bincount(newest, minlength=nodes.size))
    keep = max(1, int(np.searchsorted(edges_within, max_edges, side="right")))
    return nodes[:keep], edges[:, newest < keep]
