"""Random graphs for measuring a model: seeded, of any size, in the shapes that matter for memory.

Memory may depend on more than N and E: on self-loops S (PyG's layers drop and add them), on the
number of graphs G in `batch`, and on how many things are of each kind, as the types of edges in a
relational layer. Live bytes are linear in those too, so their extremes bound everything between: no
loops or only loops, one graph or one per node, all things of one kind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray

from serve.graphs.random_inputs import declared_inputs, random_inputs
from serve.inputs import Size
from serve.interface import MOST_KINDS, Interface
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec


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
    #: As many graphs in `batch` as each has nodes.
    MANY = "of many graphs"
    #: One graph in `batch` with as many nodes, the others alone.
    UNEVEN = "of uneven graphs"
    #: Every integer that is no index is the least that its input may have, every boolean False.
    LOWEST = "all of the first kind"
    #: Every such integer is the greatest, every boolean True.
    HIGHEST = "all of the last kind"


@dataclass(frozen=True, slots=True)
class OneKind:
    """Structure of a plain graph in which all things that an input tells of have one value."""

    #: Names of inputs, and their values.
    values: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Batched:
    """Structure of a graph like `shape`, but with the graphs in `batch` of another shape."""

    shape: "Structure"
    graphs: Shape


Structure = Shape | OneKind | Batched


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
    # What a model without edges needs does not bound their number: drawing them could take minutes.
    num_links = num_edges if "edge_index" in inputs else 0
    edges = _links(rng, num_nodes, num_links, shape)
    sizes: dict[Size, int] = {
        "N": num_nodes,
        "E": num_edges,
        "F": signature.num_features,
        "D": signature.edge_dim or 0,
    }
    batch = graphs_in(num_nodes, shape)
    made = random_inputs(inputs, sizes, edges, rng, batch=batch, signed=False)
    return {name: torch.from_numpy(array) for name, array in made.items()}


def declared_graph(
    interface: Interface, counts: Sequence[int], shape: Structure
) -> dict[str, torch.Tensor]:
    """Return all declared inputs for a graph with these counts, seeded by them."""
    rng = np.random.default_rng(tuple(counts))

    if isinstance(shape, OneKind):
        plain = declared_graph(interface, counts, Shape.PLAIN)
        return plain | {name: torch.full_like(plain[name], value) for name, value in shape.values}
    if isinstance(shape, Batched):
        divided = declared_graph(interface, counts, shape.graphs)
        like = declared_graph(interface, counts, shape.shape)
        return like | {slot.name: divided[slot.name] for slot in interface.batches}

    def links(sources: int, targets: int, count: int, same: bool) -> NDArray[np.int64]:
        if not sources or not targets:
            return np.zeros((2, 0), np.int64)
        if same and sources > 1:
            return _links(rng, sources, count, shape)
        ends = np.stack([rng.integers(0, sources, count), rng.integers(0, targets, count)])
        if shape is Shape.STAR:
            ends[1] = 0
        return ends

    def integers(low: int, high: int, size: tuple[int, ...]) -> NDArray[np.int64]:
        if shape is Shape.LOWEST:
            return np.full(size, low)
        if shape is Shape.HIGHEST:
            return np.full(size, high - 1)
        if high - low > MOST_KINDS:
            return rng.integers(low, high, size)
        # As many of each kind, so that what each takes is linear in the number of things.
        return rng.permutation(low + np.arange(math.prod(size)) % (high - low)).reshape(size)

    def graphs(things: int) -> NDArray[np.int64]:
        return graphs_in(things, shape)

    made = declared_inputs(interface, counts, rng, links=links, graphs=graphs, integers=integers)
    return {name: torch.from_numpy(array) for name, array in made.items()}


def inputs_for(
    spec: ModelSpec,
    signature: Signature,
    counts: tuple[int, ...],
    shape: Structure = Shape.PLAIN,
) -> dict[str, torch.Tensor]:
    """Return the inputs of the model for a graph with these counts."""
    if spec.interface is not None:
        return declared_graph(spec.interface, counts, shape)
    if isinstance(shape, Batched):
        divided = inputs_for(spec, signature, counts, shape.graphs)
        like = inputs_for(spec, signature, counts, shape.shape)
        return like | {name: divided[name] for name, _ in spec.batches}
    assert isinstance(shape, Shape)
    num_nodes, num_edges = counts
    return probe_graph(num_nodes, num_edges, shape, spec.inputs, signature)


def counts_for(spec: ModelSpec, num_nodes: int, num_edges: int) -> tuple[int, ...]:
    """Return the model's counts for so many nodes and edges in all."""
    if spec.interface is None:
        return num_nodes, num_edges
    return spec.interface.spread(num_nodes, num_edges)


def varied(
    spec: ModelSpec, sizes: Sequence[tuple[int, int]], factors: Sequence[int] = (3, 5)
) -> list[tuple[int, ...]]:
    """Return counts for these numbers of nodes and edges, in which each count varies by itself.

    For a model with more counts than two, graphs with `factors` times as much of each are added.
    """
    found = [counts_for(spec, *size) for size in sizes]
    usual = found[len(found) // 2]
    if len(usual) > 2:
        for position in range(len(usual)):
            for factor in factors:
                more = list(usual)
                more[position] = max(1, more[position]) * factor
                found.append(_possible(spec, more))
    return list(dict.fromkeys(found))


def _possible(spec: ModelSpec, counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(counts) if spec.interface is None else spec.interface.with_nodes_in_each(counts)


def _links(
    rng: np.random.Generator, num_nodes: int, num_edges: int, shape: Shape
) -> NDArray[np.int64]:
    """Return the edges int64 [2, E] of a graph of at least two nodes."""
    # The ring leaves no node without an edge, if there are edges enough.
    ring = min(num_nodes, num_edges)
    source = np.concatenate([np.arange(ring), rng.integers(0, num_nodes, num_edges - ring)])
    step = np.concatenate([np.ones(ring, np.int64), rng.integers(1, num_nodes, num_edges - ring)])
    target = (source + step) % num_nodes
    if shape is Shape.LOOPS:
        target = source
    elif shape is Shape.MIXED:
        target = np.where(rng.random(num_edges) < 1 / 3, source, target)
    elif shape is Shape.STAR:
        source, target = rng.integers(1, num_nodes, num_edges), np.zeros_like(target)
    return np.stack([source, target])


def graphs_in(num_nodes: int, shape: Shape) -> NDArray[np.int64]:
    """Return the graph that each node is in, int64 [N]."""
    if shape is Shape.SINGLES:
        return np.arange(num_nodes)
    if shape is Shape.MANY:
        return np.arange(num_nodes) // math.ceil(math.sqrt(num_nodes))
    if shape is Shape.UNEVEN:
        return np.maximum(0, np.arange(num_nodes) - math.isqrt(num_nodes))
    if shape is Shape.LOPSIDED:
        return np.maximum(0, np.arange(num_nodes) - num_nodes // 2)
    return np.zeros(num_nodes, dtype=np.int64)
