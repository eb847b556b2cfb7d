"""Graphs to measure a model on: seeded, of any size, and of the shapes that matter for memory.

Memory may depend on more than N and E: on self-loops S (PyG's layers drop and add them) and on
the number of graphs G in `batch`. Live bytes are linear in those too, so their extremes bound
everything between: no loops or only loops, one graph or one per node.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch

from serve.models.model_signature import Signature


class Shape(Enum):
    """How a probe graph is drawn."""

    #: A ring, further edges uniform, no self-loops, one graph.
    PLAIN = "plain"
    #: Every edge a self-loop.
    LOOPS = "loops"
    #: Every node a graph of its own in `batch`.
    SINGLES = "singles"
    #: A third of the edges self-loops, the others uniform.
    MIXED = "mixed"
    #: All edges end in one node.
    STAR = "star"
    #: One graph of half the nodes in `batch`, the others alone.
    LOPSIDED = "lopsided"


def probe_graph(
    num_nodes: int,
    num_edges: int,
    shape: Shape,
    inputs: tuple[str, ...],
    signature: Signature,
) -> dict[str, torch.Tensor]:
    """The named inputs of a model for a seeded graph; at least two nodes.

    x float32 [N, F], edge_index int64 [2, E], edge_weight float32 [E], edge_attr float32 [E, D],
    batch int64 [N].
    """
    rng = np.random.default_rng((num_nodes, num_edges))
    # With a ring, no node of a graph with edges enough is left without one.
    ring = min(num_nodes, num_edges)
    source = np.concatenate([np.arange(ring), rng.integers(0, num_nodes, num_edges - ring)])
    step = np.concatenate([np.ones(ring, np.int64), rng.integers(1, num_nodes, num_edges - ring)])
    target = (source + step) % num_nodes
    batch = np.zeros(num_nodes, dtype=np.int64)
    if shape is Shape.LOOPS:
        target = source
    elif shape is Shape.MIXED:
        target = np.where(rng.random(num_edges) < 1 / 3, source, target)
    elif shape is Shape.STAR:
        source, target = rng.integers(1, num_nodes, num_edges), np.zeros_like(target)
    elif shape is Shape.SINGLES:
        batch = np.arange(num_nodes)
    elif shape is Shape.LOPSIDED:
        batch = np.maximum(0, np.arange(num_nodes) - num_nodes // 2)
    made: dict[str, Callable[[], Any]] = {
        "x": lambda: rng.random((num_nodes, signature.num_features), dtype=np.float32),
        "edge_index": lambda: np.stack([source, target]),
        "edge_weight": lambda: rng.random(num_edges, dtype=np.float32),
        "edge_attr": lambda: rng.random((num_edges, signature.edge_dim or 0), dtype=np.float32),
        "batch": lambda: batch,
    }
    return {name: torch.from_numpy(made[name]()) for name in inputs}
