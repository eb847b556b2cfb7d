"""Parts of graphs that are shared out, for servers that are started alike."""

import numpy as np

from serve.cluster.pool import Pool
from serve.config import Config, GraphConfig
from serve.errors import ConfigError
from serve.graphs.edge_parts import most_held
from serve.graphs.load import read_edges_of
from serve.graphs.partition import Parts
from serve.graphs.sharing import read_parts


def parts_of(config: Config) -> int:
    """Return the number of parts of the graphs that are shared out, 0 where none is.

    A server has one part of all of them, so they have as many as each other. Raises ConfigError.
    """
    found = {graph.name: _parts(config, graph) for graph in config.graph}
    counts = {name: int(parts.max()) + 1 for name, parts in found.items() if parts is not None}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"'{name}' has {count}" for name, count in counts.items())
        raise ConfigError(f"graph.parts: graphs are to have the same number of parts: {told}")
    return max(counts.values(), default=0)


def share_held(config: Config, graph: GraphConfig) -> float:
    """Return the share of the graph's features that a server holds at most; raises ConfigError."""
    parts = _parts(config, graph)
    if parts is None:
        return 1.0
    return min(1.0, float(np.bincount(parts).max() / parts.size) + graph.hot_share)


def edge_share_held(config: Config, graph: GraphConfig) -> float:
    """Return the share of the graph's edges that a server holds at most; raises ConfigError.

    Those of a folder of files are counted: a few nodes may have most. Others are read whole, or
    taken to be spread as the nodes are.
    """
    parts = _parts(config, graph) if graph.share == "all" else None
    if parts is None:
        return 1.0
    if graph.file is None or not (folder := config.path(graph.file)).is_dir():
        return share_held(config, graph)
    edges = read_edges_of(folder)
    return most_held(edges, parts, graph.hot_share) / max(1, int(edges.shape[1]))


def unseatable(pool: Pool, before: Pool | None) -> str | None:
    """Return why servers that share out graphs cannot be as a pool says; None when they can.

    `before` is how the cluster has been.
    """
    if before is not None and before.parts != pool.parts:
        return (
            f"graphs are shared out in {pool.parts or 'no'} parts and in {before.parts or 'none'}"
            " before: `gnnserve cluster down`, then `up`"
        )
    if not pool.parts:
        return None
    if pool.scales:
        return (
            f"--replicas {pool.least}..{pool.most}: servers of graphs that are shared out do not"
            " follow load; give their number"
        )
    if pool.replicas < pool.parts:
        return (
            f"--replicas {pool.replicas}: graphs are shared out in {pool.parts} parts, and each"
            " needs a server"
        )
    if before is not None and pool.replicas < before.replicas:
        return (
            f"--replicas {pool.replicas}: there are {before.replicas} servers, and the last one of"
            " a part may be among those that would end: `gnnserve cluster down`, then `up`"
        )
    return None


def _parts(config: Config, graph: GraphConfig) -> Parts | None:
    return None if graph.parts is None else read_parts(config.path(graph.parts))
