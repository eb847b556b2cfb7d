"""Opens what belongs here of a graph that is shared out: this server's part, and hot nodes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.errors import ConfigError
from serve.graphs.columns import Column
from serve.graphs.csr import Rows
from serve.graphs.edge_parts import in_edges_of, read_edges
from serve.graphs.edges import Edges
from serve.graphs.features import FeatureKeeper
from serve.graphs.partition import MOST_PARTS, Parts, hottest_by, hottest_of
from serve.graphs.shared_column import RowsOf, RowSource, SharedColumn, places_of
from serve.graphs.shared_snapshot import SharedSnapshot


@dataclass(frozen=True, slots=True)
class Parting:
    """How one graph is shared out, and where the other parts are."""

    #: File with the part of each node, as `gnnserve graph partition --out` writes it.
    parts_file: Path
    #: Share of the nodes that are on every server: those with most out-edges.
    hot_share: float
    source: RowSource
    #: The in-edges of nodes are shared out with their features; else every server has all edges.
    with_edges: bool = False


def shared_features(
    name: str, rows: Rows, x: NDArray[Any], keeper: FeatureKeeper, parting: Parting
) -> SharedColumn:
    """Return the features [N, F] of which only those that belong here are read.

    `rows` has the in-neighbours of all nodes, which are the same on every server. Raises
    ConfigError.
    """
    parts = _parts_of(name, x, parting)
    here = (parts == parting.source.part) | hottest_of(rows.values, len(x), parting.hot_share)
    digest = files_digest(rows, parts, x.shape[1])
    found = _column(name, x, keeper, parting, parts, here, digest)
    found.publish()
    return found


def shared_graph(
    name: str, edges: NDArray[Any], x: NDArray[Any], keeper: FeatureKeeper, parting: Parting
) -> SharedSnapshot:
    """Return the graph of which only the in-edges and features that belong here are kept.

    `edges` [2, E] and `x` [N, F] may be memory-mapped. Raises ConfigError.
    """
    parts = _parts_of(name, x, parting)
    try:
        digest, degrees = read_edges(edges, parts, x.shape[1])
    except ConfigError as error:
        raise ConfigError(f"graph '{name}': {error}") from error
    here = (parts == parting.source.part) | hottest_by(degrees, parting.hot_share)
    column = _column(name, x, keeper, parting, parts, here, digest)
    mine = Edges(len(x), edges.shape[1], in_edges_of(edges, here))
    found = SharedSnapshot(1, mine, column)
    found.publish()
    return found


def _parts_of(name: str, x: NDArray[Any], parting: Parting) -> Parts:
    """Return the part of each node, [N]; raises ConfigError where this server's is none."""
    where = f"graph '{name}'"
    if x.ndim != 2:
        raise ConfigError(f"{where}: array 'x': [N, F] wanted, got {list(x.shape)}")
    parts = read_parts(parting.parts_file, len(x))
    part, count = parting.source.part, int(parts.max()) + 1
    if part >= count:
        raise ConfigError(
            f"{where}: cluster.rows.part is {part}, and {parting.parts_file} has parts 0 to"
            f" {count - 1}"
        )
    return parts


def _column(
    name: str, x: NDArray[Any], keeper: FeatureKeeper, parting: Parting, parts: Parts,
    here: NDArray[np.bool_], digest: bytes,
) -> SharedColumn:  # fmt: skip
    """Return the features of the nodes that `here` [N] marks."""
    source, count = parting.source, int(parts.max()) + 1
    kept = keeper.kept(np.asarray(x[here]), f"graph '{name}', features of part {source.part}")
    held = Column.of(kept, "float32")
    return SharedColumn(
        held.base, held.changed, held.rows, places_of(here), parts, count, RowsOf(name, digest),
        source,
    )  # fmt: skip


def read_parts(file: Path, num_nodes: int | None = None) -> Parts:
    """Return the part of each node, [N], from an .npy file of integers; raises ConfigError.

    With `num_nodes`, there are as many.
    """
    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not a readable array: {error}") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        raise ConfigError(f"{file}: integers [N] wanted, the part of each node")
    if num_nodes is not None and found.shape != (num_nodes,):
        raise ConfigError(f"{file}: parts {list(found.shape)} for a graph of {num_nodes} nodes")
    if found.ndim != 1 or not found.size:
        raise ConfigError(f"{file}: integers [N] wanted, the part of each node")
    if found.min() < 0 or found.max() >= MOST_PARTS:
        raise ConfigError(f"{file}: parts are 0 to {MOST_PARTS - 1}, it has {found.max()}")
    return found.astype(np.uint16)


def files_digest(rows: Rows, parts: Parts, num_features: int) -> bytes:
    """Return what differs between servers that read other files."""
    digest = hashlib.blake2b(str(num_features).encode(), digest_size=16)
    for array in (rows.starts, rows.values, parts):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.digest()
