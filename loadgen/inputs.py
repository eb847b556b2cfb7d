"""Random tensors for requests, as the metadata of their model requires."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from serve.errors import ConfigError
from serve.graphs.random_inputs import declared_inputs, random_inputs
from serve.inputs import INPUTS, Size
from serve.interface import InputSlot, Interface

#: Input tensors of a model by name, with their shapes, -1 for a free dimension; or its declaration.
Shapes = Mapping[str, tuple[int, ...]] | Interface
_Array = NDArray[np.generic]

#: Input of requests by node id, which the generator does not send.
_NODE_IDS = "node_ids"


def makeable(model: str, shapes: Shapes) -> Shapes:
    """Return the inputs to send to `model`; raises ConfigError for one that cannot be made."""
    if isinstance(shapes, Interface):
        return shapes
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


def declaration_of(shapes: Shapes) -> Interface:
    """Return inputs as a model would declare them that has the short form of inputs."""
    if isinstance(shapes, Interface):
        return shapes
    slots = []
    for name, shape in shapes.items():
        each = INPUTS[name]
        dims = tuple(
            dim if isinstance(dim, int) or size < 0 else size
            for dim, size in zip(each.shape, shape, strict=True)
        )
        index = () if each.ids_below is None else (each.ids_below,)
        slots.append(InputSlot(name, each.datatype, dims, index=index, optional=each.optional))
    return Interface(tuple(slots), ())


def takes_edges(shapes: Shapes) -> bool:
    """Return True for a model that takes more than nodes."""
    if isinstance(shapes, Interface):
        return len(shapes.counts) > len(shapes.nodes)
    return "edge_index" in shapes


def make_tensors(
    shapes: Shapes, num_nodes: int, edges: NDArray[np.int64], rng: np.random.Generator
) -> dict[str, _Array]:
    """Make random features and weights for one graph with edges [2, E], in one batch.

    A model that declares its inputs gets the edges where it has one kind of nodes and one of edges,
    and otherwise equal shares of nodes and edges with random ends.
    """
    if isinstance(shapes, Interface):
        counts = shapes.spread(num_nodes, edges.shape[1])

        def links(sources: int, targets: int, count: int, same: bool) -> NDArray[np.int64]:
            if same and (sources, count) == (num_nodes, edges.shape[1]):
                return edges
            return rng.integers(0, [[sources], [targets]], (2, count))

        return dict(declared_inputs(shapes, counts, rng, links=links))
    sizes: dict[Size, int] = {"N": num_nodes, "E": edges.shape[1]}
    for name, shape in shapes.items():
        symbols = zip(INPUTS[name].shape, shape, strict=True)
        sizes |= {symbol: size for symbol, size in symbols if symbol in ("F", "D")}
    return random_inputs(shapes, sizes, edges, rng)
