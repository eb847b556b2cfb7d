"""Tensors of a request, as the metadata of its model asks for them."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from serve.errors import ConfigError

#: Input tensors of a model by name, with their shapes; -1 for a free dimension.
Shapes = Mapping[str, tuple[int, ...]]
_Array = NDArray[np.generic]
_Make = Callable[[np.random.Generator, NDArray[np.int64], int, int], _Array]

#: Asked instead of all others, of graphs that the server holds.
_NODE_IDS = "node_ids"
#: How each is made from a generator, edges, the number of nodes and its last dimension. The order
#: is that of the draws: the same seed gives the same features to every model.
_MAKERS: dict[str, _Make] = {
    "x": lambda rng, _edges, nodes, width: rng.standard_normal((nodes, width), dtype=np.float32),
    "edge_index": lambda _rng, edges, _nodes, _width: edges,
    "edge_weight": lambda rng, edges, _nodes, _: rng.random((edges.shape[1],), dtype=np.float32),
    "edge_attr": lambda rng, edges, _nodes, width: rng.standard_normal(
        (edges.shape[1], width), dtype=np.float32
    ),
    "batch": lambda _rng, _edges, nodes, _width: np.zeros(nodes, np.int64),
}
_RANKS = {"x": 2, "edge_index": 2, "edge_weight": 1, "edge_attr": 2, "batch": 1}


def makeable(model: str, shapes: Shapes) -> Shapes:
    """The inputs that `model` is sent; raises ConfigError for one that cannot be made."""
    wanted = {name: shape for name, shape in shapes.items() if name != _NODE_IDS}
    for name, shape in wanted.items():
        if name not in _MAKERS:
            raise ConfigError(
                f"model '{model}' takes '{name}', which is not one of {', '.join(_MAKERS)}: the "
                "load generator cannot make it"
            )
        if len(shape) != _RANKS[name] or (name in ("x", "edge_attr") and shape[-1] < 1):
            raise ConfigError(
                f"model '{model}' takes '{name}' of shape {list(shape)}: the load generator needs "
                f"{_RANKS[name]} dimensions and a known last one of 'x' and 'edge_attr'"
            )
    return wanted


def make_tensors(
    shapes: Shapes, num_nodes: int, edges: NDArray[np.int64], rng: np.random.Generator
) -> dict[str, _Array]:
    """Random features and weights for one graph, all of whose nodes belong together."""
    return {
        name: make(rng, edges, num_nodes, shapes[name][-1])
        for name, make in _MAKERS.items()
        if name in shapes
    }
