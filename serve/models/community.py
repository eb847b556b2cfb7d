"""A small labelled graph from a seed: five communities that features alone do not reveal.

A planted-partition graph (Condon and Karp, 2001): most edges stay inside a community, the rest
lead to the others. Features are the community's centre under heavy noise, so a node alone says
little and its neighbourhood says much. For training and for tests; needs numpy only.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

NUM_NODES, NUM_CLASSES, NUM_FEATURES = 2_000, 5, 32
#: Mean number of neighbours, and the share of them in the node's own community.
_DEGREE, _INSIDE = 9.0, 0.75
#: Distance of a centre from the origin per feature, in standard deviations of the noise.
_SIGNAL = 0.25
_TRAIN_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class LabelledGraph:
    """A graph with one class per node and a split into training and test nodes."""

    #: float32 [N, F]
    x: Floats
    #: int64 [2, E], both directions of every edge, sorted, no self-loops.
    edge_index: Ints
    #: int64 [N]
    y: Ints
    #: bool [N], disjoint; together they cover all nodes.
    train_mask: Bools
    test_mask: Bools

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return int(self.y.max()) + 1


def community_graph(seed: int = 0) -> LabelledGraph:
    """Return the graph of that seed: 2,000 nodes, 32 features, 5 classes. Deterministic.

    The models shipped in `configs/models` were trained on the training nodes of seed 0.
    """
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(NUM_NODES) % NUM_CLASSES).astype(np.int64)
    centres = _SIGNAL * rng.standard_normal((NUM_CLASSES, NUM_FEATURES))
    noise = rng.standard_normal((NUM_NODES, NUM_FEATURES))
    return LabelledGraph(
        x=(centres[y] + noise).astype(np.float32),
        edge_index=_planted_edges(rng, y),
        y=y,
        **_split(rng, NUM_NODES),
    )


def labelled(x: Floats, edge_index: Ints, y: Ints, seed: int = 0) -> LabelledGraph:
    """Return the arrays with a seeded split into equal halves for training and test."""
    return LabelledGraph(x, edge_index, y, **_split(np.random.default_rng(seed), len(y)))


def _split(rng: np.random.Generator, num_nodes: int) -> dict[str, Bools]:
    train = rng.permutation(num_nodes) < num_nodes * _TRAIN_SHARE
    return {"train_mask": train, "test_mask": ~train}


def _planted_edges(rng: np.random.Generator, y: Ints) -> Ints:
    """Return undirected edges as [2, E]: `_INSIDE` of them within a community, the rest across."""
    drawn = int(NUM_NODES * _DEGREE / 2)
    one = rng.integers(NUM_NODES, size=drawn)
    order = np.argsort(y, kind="stable")
    size = NUM_NODES // NUM_CLASSES
    # A node's own community, or one of the others by a shift of 1 to NUM_CLASSES - 1.
    shift = rng.integers(1, NUM_CLASSES, size=drawn) * (rng.random(drawn) >= _INSIDE)
    other = order[(y[one] + shift) % NUM_CLASSES * size + rng.integers(size, size=drawn)]
    low, high = np.minimum(one, other), np.maximum(one, other)
    pairs = np.unique(np.stack([low, high])[:, low != high], axis=1)
    both = np.concatenate([pairs, pairs[::-1]], axis=1)
    return both[:, np.lexsort((both[1], both[0]))].astype(np.int64)
