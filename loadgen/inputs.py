"""Tensors of a request, as the metadata of its model asks for them."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from serve.errors import ConfigError
from serve.inputs import INPUTS, Input

#: Input tensors of a model by name, with their shapes; -1 for a free dimension.
Shapes = Mapping[str, tuple[int, ...]]
_Array = NDArray[np.generic]

#: Asked instead of all others, of graphs that the server holds.
_NODE_IDS = "node_ids"


def makeable(model: str, shapes: Shapes) -> Shapes:
    """The inputs that `model` is sent; raises ConfigError for one that cannot be made."""
    wanted = {name: shape for name, shape in shapes.items() if name != _NODE_IDS}
    for name, shape in wanted.items():
        if name not in INPUTS:
            raise ConfigError(
                f"model '{model}' takes '{name}', which is not one of {', '.join(INPUTS)}: the "
                "load generator cannot make it"
            )
        usual = INPUTS[name].shape
        known = isinstance(usual[-1], int) or usual[-1] in ("N", "E") or shape[-1] >= 1
        if len(shape) != len(usual) or not known:
            raise ConfigError(
                f"model '{model}' takes '{name}' of shape {list(shape)}: the load generator needs "
                f"{len(usual)} dimensions, and a known number of features"
            )
    return wanted


def make_tensors(
    shapes: Shapes, num_nodes: int, edges: NDArray[np.int64], rng: np.random.Generator
) -> dict[str, _Array]:
    """Random features and weights for one graph, all of whose nodes belong together.

    In the order of the table: the same seed gives the same features to every model.
    """
    return {
        name: _made(each, shapes[name][-1], num_nodes, edges, rng)
        for name, each in INPUTS.items()
        if name in shapes
    }


def _made(
    wanted: Input, width: int, num_nodes: int, edges: NDArray[np.int64], rng: np.random.Generator
) -> _Array:
    if wanted.ids_below == "N":
        return edges
    if wanted.ids_below == "G":
        return np.zeros(num_nodes, np.int64)
    shape = wanted.shape_of({"N": num_nodes, "E": edges.shape[1], "F": width, "D": width})
    if wanted.optional:  # weights: not negative
        return rng.random(shape, dtype=np.float32)
    return rng.standard_normal(shape, dtype=np.float32)
