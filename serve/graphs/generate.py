"""Seeded random graphs with given node and edge counts and heavy-tailed degrees.

A configuration model: every node gets a degree from a power law, one stub per edge end, and stubs
are paired. Part of the pairs stay within a block of neighbouring ids: without such locality, a ball
around a node would be almost a tree, unlike real neighbourhoods. Self-loops and repeated edges are
dropped and replaced until the count is exact.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Exponent of the power law of degrees; 2 to 3 in most measured networks.
DEGREE_EXPONENT = 2.5
#: Share of stubs that are paired within their own block.
LOCAL_SHARE = 0.75
#: Nodes of a block ÷ mean degree.
BLOCK_DEGREES = 5.0

Edges = NDArray[np.int32]
Keys = NDArray[np.int64]


def generate_edges(num_nodes: int, num_edges: int, rng: np.random.Generator) -> Edges:
    """Return edges [2, E] in both directions, sorted by source, without loops or repeats.

    E is `num_edges` rounded down to an even number. Raises ValueError when a simple graph
    cannot have that many.
    """
    wanted = num_edges // 2
    if num_nodes < 1 or not 0 <= wanted <= num_nodes * (num_nodes - 1) // 2:
        raise ValueError(f"{num_nodes} nodes cannot have {num_edges} directed edges")
    if wanted == 0:
        return np.zeros((2, 0), dtype=np.int32)
    stubs = _stubs(num_nodes, 2 * wanted, rng)
    keys = _exactly(wanted, _pair(stubs, num_nodes, rng), stubs, num_nodes, rng)
    return both_directions(keys // num_nodes, keys % num_nodes, num_nodes)


def exact_edges(num_nodes: int, num_edges: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return exactly `num_edges` edges [2, E]: as `generate_edges` as far as those go.

    The rest, such as one edge of an odd number, have random ends.
    """
    most = num_nodes * (num_nodes - 1)
    simple = generate_edges(num_nodes, min(num_edges, most), rng).astype(np.int64)
    rest = rng.integers(0, num_nodes, (2, num_edges - simple.shape[1]))
    return np.concatenate([simple, rest], axis=1)


def both_directions(
    src: NDArray[np.integer[Any]], dst: NDArray[np.integer[Any]], num_nodes: int
) -> Edges:
    """Return the edges and their reverses [2, E], sorted by source, without loops or repeats."""
    proper = src != dst
    # The product of two ids needs 64 bits, also where ids have 32.
    src, dst = (end[proper].astype(np.int64, copy=False) for end in (src, dst))
    keys = distinct(np.concatenate([src * num_nodes + dst, dst * num_nodes + src]))
    return np.stack([keys // num_nodes, keys % num_nodes]).astype(np.int32)


def distinct(values: Keys) -> Keys:
    """Return the distinct values, sorted; several times faster than np.unique, which hashes."""
    ordered = np.sort(values)
    first = np.ones(ordered.size, dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def _stubs(num_nodes: int, num_ends: int, rng: np.random.Generator) -> Keys:
    """Return each node's id as often as its degree; about `num_ends` in all."""
    weights = (1.0 - rng.random(num_nodes)) ** (-1.0 / (DEGREE_EXPONENT - 1.0))
    # The structural cut-off: hubs above sqrt(edges) could not avoid repeated edges. It is close to
    # the largest degrees of real graphs of this size.
    largest = math.sqrt(num_ends)
    for _ in range(8):
        weights = np.minimum(weights * (num_ends / weights.sum()), largest)
    degrees = np.floor(weights + rng.random(num_nodes)).astype(np.int64)
    return np.repeat(np.arange(num_nodes), degrees)


def _pair(stubs: Keys, num_nodes: int, rng: np.random.Generator) -> Keys:
    """Pair stubs, partly within their block; return one key per distinct edge."""
    block_nodes = max(16, int(BLOCK_DEGREES * stubs.size / num_nodes))
    place = np.where(rng.random(stubs.size) < LOCAL_SHARE, stubs // block_nodes, num_nodes)
    mixed = stubs[np.argsort(place + rng.random(stubs.size))]
    half = mixed.size // 2
    return _keys(mixed[: 2 * half : 2], mixed[1 : 2 * half : 2], num_nodes)


def _exactly(
    wanted: int, keys: Keys, stubs: Keys, num_nodes: int, rng: np.random.Generator
) -> Keys:
    """Drop or add edges at random until there are `wanted`."""
    for _ in range(3):
        # With very few edges, every node's degree may be rounded down to 0.
        if keys.size >= wanted or stubs.size == 0:
            break
        ends = stubs[rng.integers(stubs.size, size=(2, 2 * (wanted - keys.size)))]
        keys = distinct(np.concatenate([keys, _keys(ends[0], ends[1], num_nodes)]))
    # Edges that hubs can take no more go anywhere: drawn from the list of absent pairs in a dense
    # graph, by trial in a sparse one.
    if keys.size < wanted and num_nodes * (num_nodes - 1) // 2 <= 4 * wanted:
        low, high = np.triu_indices(num_nodes, 1)
        absent = np.setdiff1d(low * num_nodes + high, keys, assume_unique=True)
        return np.concatenate([keys, rng.choice(absent, wanted - keys.size, replace=False)])
    while keys.size < wanted:
        ends = rng.integers(num_nodes, size=(2, 2 * (wanted - keys.size) + 8))
        keys = distinct(np.concatenate([keys, _keys(ends[0], ends[1], num_nodes)]))
    return keys if keys.size == wanted else rng.choice(keys, wanted, replace=False)


def _keys(src: Keys, dst: Keys, num_nodes: int) -> Keys:
    """Return distinct undirected edges without loops as sorted keys `low * num_nodes + high`."""
    proper = src != dst
    low = np.minimum(src, dst)[proper]
    return distinct(low * num_nodes + np.maximum(src, dst)[proper])
