"""Random graphs for measuring a model: seeded, of any size, in the shapes that matter for memory.

Memory may depend on more than N and E: on self-loops S (PyG's layers drop and add them) and on
the number of graphs G in `batch`. Live bytes are linear in those too, so their extremes bound
everything between: no loops or only loops, one graph or one per node.
"""

from enum import Enum

import numpy as np
import torch

from serve.graphs.random_inputs import random_inputs
from serve.inputs import Size
from serve.models.model_signature import Signature


class Shape(Enum):
    """Structure of a probe graph."""

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
    """Return the named inputs for a graph of at least two nodes, seeded by its size.

    Dtypes and shapes are those of ``serve.inputs``.
    """
    rng = np.random.default_rng((num_nodes, num_edges))
    # The ring leaves no node without an edge, if there are edges enough.
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
    sizes: dict[Size, int] = {
        "N": num_nodes,
        "E": num_edges,
        "F": signature.num_features,
        "D": signature.edge_dim or 0,
    }
    edges = np.stack([source, target])
    made = random_inputs(inputs, sizes, edges, rng, batch=batch, signed=False)
    return {name: torch.from_numpy(array) for name, array in made.items()}
