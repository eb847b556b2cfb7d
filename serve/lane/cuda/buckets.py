"""Captured runs that take graphs of any size up to theirs.

A captured run has fixed sizes. One that was made for a bucket takes every graph that its sizes
hold: nodes behind the graph's last one have no edges, and pairs behind its last edge are no edges
(``kernels.NO_EDGE``). What the model computes for these nodes is not read. ``takes_spare_room``
says whether a model may run so.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from serve.inputs import INPUTS
from serve.lane.cuda.queues import Queue
from serve.lane.cuda.replays import RunInput
from serve.lane.executors.kernels import NO_EDGE

#: Nodes and edges of the smallest bucket.
LEAST_NODES, LEAST_EDGES = 16, 64
#: Nodes and edges of a graph.
Counts = tuple[int, int]


def bucket_counts(counts: Counts) -> Counts:
    """Return the counts of the bucket for a graph of that many nodes and edges.

    Buckets have 16, 24, 32, 48, 64 … nodes and 64, 128, 256 … edges. Edges may have more room to
    spare: what is no edge costs a place in the sort and nothing afterwards.
    """
    nodes, edges = LEAST_NODES, LEAST_EDGES
    while nodes < counts[0]:
        nodes *= 2
    while edges < counts[1]:
        edges *= 2
    three_quarters = nodes // 4 * 3
    return three_quarters if LEAST_NODES < counts[0] <= three_quarters else nodes, edges


def bucket(inputs: Iterable[RunInput], counts: Counts) -> tuple[RunInput, ...]:
    """Return the inputs of the bucket for a graph of that many nodes and edges.

    `inputs` are the graph's own; only their sizes per node and per edge change.
    """
    sizes = dict(zip("NE", bucket_counts(counts), strict=True))
    found = []
    for name, dtype, shape in inputs:
        per, axis = INPUTS[name].per
        found.append((name, dtype, (*shape[:axis], sizes[per], *shape[axis + 1 :])))
    return tuple(found)


def fill(
    queue: Queue,
    places: Mapping[str, torch.Tensor],
    parts: Sequence[Mapping[str, torch.Tensor]],
    counts: Sequence[Counts],
) -> None:
    """Fill the places of a bucket with the union of `parts`, on the host; inside ``running``.

    `counts` are the nodes and edges of each part. Inputs that a part lacks are left to the caller.
    """
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    firsts = [(0, 0)]
    for part, (nodes, edges) in zip(parts, counts, strict=True):
        first = {"N": firsts[-1][0], "E": firsts[-1][1]}
        for name in places.keys() & part.keys():
            value, (per, axis) = part[name], INPUTS[name].per
            place = places[name].narrow(axis, first[per], value.shape[axis])
            # A place with gaps is filled row by row.
            whole = place.is_contiguous()
            copies += [(value, place)] if whole else zip(value, place, strict=True)
        firsts.append((first["N"] + nodes, first["E"] + edges))
    queue.fill(copies)
    edge_index = places["edge_index"]
    for (first_node, first_edge), (_, edges) in zip(firsts[1:], counts[1:], strict=False):
        edge_index.narrow(1, first_edge, edges).add_(first_node)
    spare = edge_index.shape[1] - firsts[-1][1]
    if spare:
        edge_index.narrow(1, firsts[-1][1], spare).fill_(NO_EDGE)
