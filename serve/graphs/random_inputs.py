"""Random input tensors of a request; for measuring a model and for load on a server."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.inputs import INPUTS, Input, Size


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
