"""Random input tensors of a request; for measuring a model and for load on a server."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.inputs import INPUTS, Input, Size
from serve.interface import InputSlot, Interface, is_float

#: Makes int64 [2, links] between so many sources and targets; of the same things when the last
#: argument is True.
Links = Callable[[int, int, int, bool], NDArray[np.int64]]
#: Makes int64 [things], the graph that each of so many things is in.
Graphs = Callable[[int], NDArray[np.int64]]
#: Makes an array of that shape of integers in [low, high).
Integers = Callable[[int, int, tuple[int, ...]], NDArray[np.integer[Any]]]


def random_inputs(
    names: Iterable[str],
    sizes: Mapping[Size, int],
    edges: NDArray[np.integer[Any]],
    rng: np.random.Generator,
    *,
    batch: NDArray[np.int64] | None = None,
    signed: bool = True,
) -> dict[str, NDArray[Any]]:
    """Make the named inputs of a graph with the given edges [2, E].

    `sizes` gives N, E, F and D as ``serve.inputs`` defines them. `batch` int64 [N] defaults to one
    graph. Features are standard normal; with `signed` off they are uniform in [0, 1). Weights, the
    inputs that a request may leave out, are uniform in [0, 1): layers take roots of their sums.

    Tensors are drawn in the order of ``INPUTS``, so one seed gives every model the same features.
    """
    wanted = set(names)

    def made(each: Input) -> NDArray[Any]:
        if each.ids_below == "N":
            return edges
        if each.ids_below == "G":
            return np.zeros(sizes["N"], np.int64) if batch is None else batch
        draw = rng.standard_normal if signed and not each.optional else rng.random
        return draw(each.shape_of(sizes), dtype=np.float32)

    return {name: made(each) for name, each in INPUTS.items() if name in wanted}


def declared_inputs(
    interface: Interface,
    counts: Iterable[int],
    rng: np.random.Generator,
    *,
    links: Links | None = None,
    graphs: Graphs | None = None,
    integers: Integers | None = None,
) -> dict[str, NDArray[Any]]:
    """Make all inputs that a model declares, for a request with these counts.

    Values are uniform in the declared ranges, [0, 1) for floats without one; links are uniform, and
    everything is in one graph, unless `links` and `graphs` say otherwise. Where the counts tell the
    number of graphs, all but the first have one node: layers that pad graphs to the largest need
    most memory then. `integers` makes those that are no index, and booleans as 0 and 1.
    """
    sizes = interface.sizes(tuple(counts))
    drawn: Integers = integers or rng.integers

    def made(slot: InputSlot) -> NDArray[Any]:
        shape = slot.shape_for(sizes)
        found: NDArray[Any]
        if slot.index and slot.index[0] in interface.graphs:
            found = np.zeros(shape, np.int64) if graphs is None else graphs(shape[0])
        elif slot in interface.orders:
            alone = sizes[slot.index[0]] - 1
            found = np.maximum(0, np.arange(shape[0]) - max(0, shape[0] - 1 - alone))
        elif slot.is_links and links is not None:
            source, target = slot.row_bounds
            found = links(sizes[source], sizes[target], shape[1], source == target)
        elif slot.index:
            bounds = np.array([sizes[symbol] for symbol in slot.row_bounds])
            if len(bounds) > 1:
                bounds = bounds.reshape(-1, *(1,) * (len(shape) - 1))
            found = rng.integers(0, bounds, shape) if 0 not in shape else np.zeros(shape)
        elif slot.datatype == "BOOL":
            found = drawn(0, 2, shape)
        elif is_float(slot.datatype):
            low, high = slot.bounds
            found = low + (high - low) * rng.random(shape)
        elif slot.columns:
            parts = [drawn(low, high, shape[:-1]) for low, high in slot.columns]
            found = np.stack(parts, axis=-1)
        else:
            low, high = slot.bounds
            found = drawn(int(low), int(high), shape)
        return found.astype(slot.dtype)

    return {slot.name: made(slot) for slot in interface.inputs}
