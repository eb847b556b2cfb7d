"""Requests of random sizes and contents for models that declare their inputs."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from serve.graphs.random_inputs import declared_inputs
from serve.interface import Interface

#: Fewest and most nodes of a kind, and the most of all other things for each node.
_NODES = 10, 5_000
_OTHERS_PER_NODE = 0.3, 30.0
_MOST_OTHERS = 100_000


def random_requests(
    interface: Interface, count: int, seed: int, fits: Callable[[tuple[int, ...]], bool]
) -> Iterator[tuple[tuple[int, ...], dict[str, torch.Tensor]]]:
    """Yield `count` pairs of counts and inputs, where `fits` says so.

    Each count is drawn by itself, evenly in the logarithm; ends of edges, values and the number of
    graphs are uniform. In every fourth request all integers of an input are equal, as where all
    edges are of one type.
    """
    rng = np.random.default_rng(seed)
    while count:
        counts = _counts(interface, rng)
        if not fits(counts):
            continue
        count -= 1
        arrays = declared_inputs(
            interface,
            counts,
            rng,
            graphs=lambda things: _graphs(things, rng),
            integers=partial(_equal, rng) if count % 4 == 0 else None,
        )
        yield counts, {name: torch.from_numpy(array) for name, array in arrays.items()}


def _counts(interface: Interface, rng: np.random.Generator) -> tuple[int, ...]:
    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    nodes = [int(between(*_NODES)) for _ in interface.nodes]
    others = len(interface.counts) - len(nodes)
    most = [sum(nodes) * between(*_OTHERS_PER_NODE) for _ in range(others)]
    return (*nodes, *(max(1, min(_MOST_OTHERS, int(one))) for one in most))


def _equal(
    rng: np.random.Generator, low: int, high: int, shape: tuple[int, ...]
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return one integer of [low, high) everywhere."""
    return np.full(shape, rng.integers(low, high))


def _graphs(things: int, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the graph that each thing is in, of a random number of graphs."""
    return np.sort(rng.integers(0, rng.integers(1, things + 1), things))
