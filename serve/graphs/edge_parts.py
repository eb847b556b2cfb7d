"""Reads those edges of a graph that one server holds, without having all of them in memory."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve import native
from serve.errors import ConfigError
from serve.graphs.csr import Ids, Rows
from serve.graphs.partition import Parts

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
    num_nodes = parts.size
    digest = hashlib.blake2b(f"edges too, {num_features}".encode(), digest_size=16)
    degrees = np.zeros(num_nodes, np.int64)
    done = 0
    for part in _pieces(edges):
        bad = (part < 0) | (part >= num_nodes)
        if bad.any():
            row, column = np.argwhere(bad)[0].tolist()
            raise ConfigError(
                f"array 'edge_index' [{row}, {done + column}] is {part[row, column]}; not in"
                f" [0, {num_nodes})"
            )
        digest.update(part.view(np.uint8).data)
        np.add.at(degrees, part[0], 1)
        done += part.shape[1]
    digest.update(np.ascontiguousarray(parts).view(np.uint8).data)
    return digest.digest(), degrees


def _pieces(edges: NDArray[Any]) -> Iterator[NDArray[np.int64]]:
    """Yield the edges as int64, some at a time."""
    for begin in range(0, edges.shape[1], _AT_ONCE):
        yield np.ascontiguousarray(edges[:, begin : begin + _AT_ONCE], np.int64)
