"""Captured runs that take graphs of any size up to theirs.

A captured run has fixed sizes. One that was made for a bucket takes every graph that its sizes
hold: nodes behind the graph's last one have no edges, and pairs behind its last edge are no edges
(``kernels.NO_EDGE``). What the model computes for these nodes is not read. ``needs_exact_sizes``
says which models cannot. It tries what is then in the spare room at every run (``spare_value``):
nothing of an earlier request stays there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from serve.lane.cuda.queues import Queue
from serve.lane.cuda.replays import RunInput
from serve.lane.executors.check import spare_value
from serve.lane.models.sizing import Counts, Sizing

#: Nodes and edges, or other things, of the smallest bucket.
LEAST_NODES, LEAST_EDGES = 16, 64


def bucket_counts(sizing: Sizing, counts: Counts) -> dict[str, int]:
    """Return the counts of the bucket for a graph with these counts.

    Buckets have 16, 24, 32, 48, 64 … nodes of a kind and 64, 128, 256 … edges. Edges may have more
    room to spare: what is no edge costs a place in the sort and nothing afterwards.
    """
    return {
        symbol: _bucket_nodes(count) if symbol in sizing.nodes else _doubled(LEAST_EDGES, count)
        for symbol, count in counts.items()
    }


def _bucket_nodes(count: int) -> int:
    nodes = _doubled(LEAST_NODES, count)
    three_quarters = nodes // 4 * 3
    return three_quarters if LEAST_NODES < count <= three_quarters else nodes


def _doubled(least: int, count: int) -> int:
    while least < count:
        least *= 2
    return least


def served_counts(sizing: Sizing, symbol: str, room: int) -> tuple[int, int]:
    """Return the least and the most whose bucket has that room for what the symbol counts.

    Both are 0 for no room: no input tells of the symbol then.
    """
    smaller = (room // 4 * 3, room // 3 * 2, room // 2)
    rooms = (bucket_counts(sizing, {symbol: count})[symbol] for count in smaller)
    return max((each + 1 for each in rooms if each < room), default=0), room


def bucket(sizing: Sizing, inputs: Iterable[RunInput], counts: Counts) -> tuple[RunInput, ...]:
    """Return the inputs of the bucket for a graph with these counts.

    `inputs` are the graph's own; only their sizes change.
    """
    room = bucket_counts(sizing, counts)
    found = []
    for name, dtype, shape in inputs:
        if (sized := sizing.inputs.get(name)) is not None:
            shape = (*shape[: sized.axis], room[sized.symbol], *shape[sized.axis + 1 :])
        found.append((name, dtype, shape))
    return tuple(found)


def fill(
    queue: Queue,
    sizing: Sizing,
    places: Mapping[str, torch.Tensor],
    parts: Sequence[Mapping[str, torch.Tensor]],
    counts: Sequence[Counts],
) -> None:
    """Fill the places of a bucket with the union of `parts`, on the host; inside ``running``.

    Spare room is filled too. `counts` are those of each part. Inputs that a part lacks are left to
    the caller.
    """
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    #: Indices, and the number of things before those that they point to.
    shifts: list[tuple[torch.Tensor, int]] = []
    firsts = dict.fromkeys(sizing.symbols, 0)
    for part, own in zip(parts, counts, strict=True):
        for name in places.keys() & part.keys():
            place, sized = places[name], sizing.inputs.get(name)
            if sized is not None:
                first, length = firsts[sized.symbol], part[name].shape[sized.axis]
                place = place.narrow(sized.axis, first, length)
                if len(sized.points_to) == 1:
                    shifts.append((place, firsts[sized.points_to[0]]))
                elif sized.points_to:
                    befores = [firsts[symbol] for symbol in sized.points_to]
                    shifts += zip(place, befores, strict=True)
            copies += _without_gaps(part[name], place)
        firsts = {symbol: first + own[symbol] for symbol, first in firsts.items()}
    queue.fill(copies)
    for row, first in shifts:
        if first:
            row.add_(first)
    for name, sized in sizing.inputs.items():
        if (whole := places.get(name)) is not None:
            first = firsts[sized.symbol]
            room = whole.narrow(sized.axis, first, whole.shape[sized.axis] - first)
            if room.numel():
                room.fill_(spare_value(sized, room.dtype))


def _without_gaps(
    value: torch.Tensor, place: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the value and its place, row by row where the place has gaps between rows."""
    if place.is_contiguous():
        yield value, place
        return
    for row, row_place in zip(value, place, strict=True):
        yield from _without_gaps(row, row_place)
