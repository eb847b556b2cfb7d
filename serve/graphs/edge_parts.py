"""Reads those edges of a graph that one server holds, without having all of them in memory."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve import native
from serve.errors import ConfigError
from serve.graphs.csr import Ids, Rows
from serve.graphs.partition import Parts, held_of, hottest_by

#: Edges that are in memory at once while those of other servers are passed over.
_AT_ONCE = 1 << 20


def in_edges_of(edges: NDArray[Any], here: NDArray[np.bool_]) -> Rows:
    """Return the in-neighbours of the nodes that `here` [N] marks; other nodes have none.

    `edges` [2, E], sources first, may be memory-mapped.
    """
    found = [part[:, here[part[1]]] for part in _pieces(edges)]
    mine = np.concatenate(found, axis=1) if found else np.empty((2, 0), np.int64)
    return Rows(*native.build_rows(mine, here.size))


def read_edges(edges: NDArray[Any], parts: Parts, num_features: int) -> tuple[bytes, Ids]:
    """Return what tells servers that read the same files, and the out-edges of each node, [N].

    Raises ConfigError for an edge whose end is no node.
    """
    digest = hashlib.blake2b(f"edges too, {num_features}".encode(), digest_size=16)
    degrees = np.zeros(parts.size, np.int64)
    for part in _checked(edges, parts.size):
        digest.update(part.view(np.uint8).data)
        np.add.at(degrees, part[0], 1)
    digest.update(np.ascontiguousarray(parts).view(np.uint8).data)
    return digest.digest(), degrees


def most_held(edges: NDArray[Any], parts: Parts, hot_share: float) -> int:
    """Return the in-edges that a server holds at most: of the nodes of a part and the hot ones.

    Raises ConfigError for an edge whose end is no node.
    """
    degrees = np.zeros((2, parts.size), np.int64)
    for part in _checked(edges, parts.size):
        for end in range(2):
            np.add.at(degrees[end], part[end], 1)
    return int(held_of(degrees[1], parts, hottest_by(degrees[0], hot_share)).max())


def _checked(edges: NDArray[Any], num_nodes: int) -> Iterator[NDArray[np.int64]]:
    """Yield the edges as ``_pieces`` does; raises ConfigError where an end is no node."""
    done = 0
    for part in _pieces(edges):
        bad = (part < 0) | (part >= num_nodes)
        if bad.any():
            row, column = np.argwhere(bad)[0].tolist()
            raise ConfigError(
                f"array 'edge_index' [{row}, {done + column}] is {part[row, column]}; not in"
                f" [0, {num_nodes})"
            )
        yield part
        done += part.shape[1]


def _pieces(edges: NDArray[Any]) -> Iterator[NDArray[np.int64]]:
    """Yield the edges as int64, some at a time."""
    for begin in range(0, edges.shape[1], _AT_ONCE):
        yield np.ascontiguousarray(edges[:, begin : begin + _AT_ONCE], np.int64)
