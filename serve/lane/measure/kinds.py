"""Measure the memory of a model that treats things of each kind by themselves, as types of edges.

Such a model needs most when all things are of one kind. A request's kinds are counted when it is
staged, so its memory can be that of its own mix: a function of how many things there are, how many
of them are of the first kind, which a model often treats unlike the others, and how many are of the
most common one of the others.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from serve.estimate.calibration import ByKind, Linear
from serve.estimate.memory import KindColumn, covers, fit_held, fit_planes, peak_at
from serve.interface import InputSlot, Interface
from serve.lane.measure.one_kind import Alone
from serve.lane.measure.probe import ModelProbe
from serve.lane.measure.probe_graphs import OneKind, Shape, declared_graph

_log = logging.getLogger(__name__)

#: What counting kinds must spare somewhere, as a share of the estimate.
_LEAST_GAIN = 0.02
#: Parts of the things that are of the first kind in traced graphs: from as many as of each other
#: kind, to all but one of each.
_PARTS = (0.0, 0.5, 1.0)
#: Shapes in which kinds are random or all the same.
_SHAPES = (Shape.PLAIN, Shape.LOWEST, Shape.HIGHEST)

#: (Counts …, peak of held bytes) of the graphs of each shape.
Held = dict[Shape | OneKind, list[tuple[int, ...]]]
Planes = tuple[Linear, ...]


def measure_kinds(
    probe: ModelProbe,
    sizes: Sequence[tuple[int, ...]],
    checked: tuple[int, ...],
    by_shape: Mapping[Shape | OneKind, Planes],
    held: Held,
    alone: Alone,
) -> ByKind | None:
    """Trace graphs of `sizes` with known mixes, and check the fit on a graph of size `checked`.

    `by_shape` and `held` are what is known of each shape, `alone` of each kind. Returns None where
    counting kinds spares nothing, and where these counts do not tell the memory.
    """
    interface = probe.loaded.spec.interface
    if interface is None or not interface.kinds or not _gains(by_shape, (*sizes, checked)):
        return None
    try:
        traces = [
            probe.trace_of(_graph(interface, mix, len(sizes[0])), mix)
            for size in sizes
            for mix in _mixes(interface, size)
        ]
        planes, problem = fit_planes(traces, list(_columns(interface)))
        problem = _check_alike(alone) or problem or _check(probe, interface, checked, planes)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        _log.info(
            "model %s: memory is that of the worst mix of kinds: %s", probe.loaded.spec.key, problem
        )
        return None
    return ByKind(activations=planes, held=fit_held(list(_held(probe, interface, held))))


def _gains(by_shape: Mapping[Shape | OneKind, Planes], sizes: Sequence[tuple[int, ...]]) -> bool:
    """Return True when kinds decide much, and nothing else that shapes are extreme in does."""
    plain = by_shape[Shape.PLAIN]

    def most(shapes: Sequence[Shape | OneKind], size: tuple[int, ...]) -> float:
        return max(peak_at(by_shape[shape], *size) for shape in shapes)

    of_kinds = [one for one in by_shape if one in _SHAPES or isinstance(one, OneKind)]
    others = [shape for shape in by_shape if shape not in of_kinds]
    return all(
        covers(peak_at(plain, *size), int(most([Shape.PLAIN, *others], size))) for size in sizes
    ) and any(most(of_kinds, size) > (1 + _LEAST_GAIN) * peak_at(plain, *size) for size in sizes)


def _columns(interface: Interface) -> Iterator[KindColumn]:
    for position, slot in enumerate(interface.kinds):
        of = interface.counts.index(slot.symbols[0])
        yield KindColumn(len(interface.counts) + position, of, slot.num_kinds)


def _mixes(interface: Interface, size: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield counts near `size` with the things of the first kind of each of the interface's kinds.

    There are as many of each other kind, and at least one.
    """
    columns = list(_columns(interface))
    for varied in columns:
        for part in _PARTS if varied is columns[0] else _PARTS[1:]:
            counts, firsts = list(size), []
            for column in columns:
                first, each = _split(
                    size[column.of], column.num_kinds, part if column is varied else 0.0
                )
                counts[column.of] = first + (column.num_kinds - 1) * each
                firsts.append(first)
            yield (*counts, *firsts)


def _split(count: int, num_kinds: int, part: float) -> tuple[int, int]:
    """Return about how many of `count` things are of the first and of each other kind."""
    even = count / num_kinds
    each = max(1, round(even * (1 - part)))
    return max(1, round(count - (num_kinds - 1) * each)), each


def _graph(interface: Interface, mix: tuple[int, ...], num_counts: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a graph with these counts and so many things of the first kinds."""
    graph = declared_graph(interface, mix[:num_counts], Shape.PLAIN)
    for slot, column, first in zip(
        interface.kinds, _columns(interface), mix[num_counts:], strict=True
    ):
        others = np.arange(mix[column.of] - first) % (slot.num_kinds - 1) + 1
        _set(graph, slot, np.concatenate([np.zeros(first, np.int64), others]))
    return graph


def _set(graph: dict[str, torch.Tensor], slot: InputSlot, kinds: NDArray[np.int64]) -> None:
    """Give the things of `slot` these kinds, counted from 0, in random order."""
    mixed = np.random.default_rng(len(kinds)).permutation(kinds)
    low = 0 if slot.datatype == "BOOL" else int(slot.bounds[0])
    graph[slot.name] = torch.from_numpy((mixed + low).astype(slot.dtype))


def _check_alike(alone: Alone) -> str:
    """Return which input's kinds but the first take unlike memory by themselves; empty for none."""
    peaks: dict[str, list[int]] = {}
    for shape, found in alone:
        if len(shape.values) == 1:
            ((name, _),) = shape.values
            peaks.setdefault(name, []).append(found.peak_bytes)
    for name, (_, *others) in peaks.items():
        if others and not covers(min(others), max(others)):
            return f"things of each {name} take memory of their own"
    return ""


def _check(probe: ModelProbe, interface: Interface, counts: tuple[int, ...], planes: Planes) -> str:
    """Return which mix of kinds takes more than the planes say; empty when none does."""
    rng = np.random.default_rng(0)

    def first(count: int, num: int) -> NDArray[np.int64]:
        return np.zeros(count, np.int64)

    def last(count: int, num: int) -> NDArray[np.int64]:
        return np.full(count, num - 1)

    def last_two(count: int, num: int) -> NDArray[np.int64]:
        return num - 1 - np.arange(count) % 2

    def first_two(count: int, num: int) -> NDArray[np.int64]:
        return np.arange(count) % 2

    def first_and_last(count: int, num: int) -> NDArray[np.int64]:
        return np.arange(count) % 2 * (num - 1)

    def one_mostly(count: int, num: int) -> NDArray[np.int64]:
        return np.where(rng.random(count) < 0.8, num // 2, rng.integers(0, num, count))

    def rising(count: int, num: int) -> NDArray[np.int64]:
        return (num * np.sqrt(rng.random(count))).astype(np.int64)

    graphs = {"alike": declared_graph(interface, counts, Shape.PLAIN)}
    for mix in (first, last, first_two, first_and_last, last_two, one_mostly, rising):
        graph = declared_graph(interface, counts, Shape.PLAIN)
        for slot, column in zip(interface.kinds, _columns(interface), strict=True):
            _set(graph, slot, mix(counts[column.of], slot.num_kinds))
        graphs[mix.__name__.replace("_", " ")] = graph
    for name, graph in graphs.items():
        of = interface.kind_counts(graph)
        assert of is not None
        found = probe.trace_of(graph, counts)
        if not covers(peak_at(planes, *counts, *of.firsts, *of.others), found.peak_bytes):
            return f"a graph with kinds {name} took more"
    return ""


def _held(probe: ModelProbe, interface: Interface, held: Held) -> Iterator[tuple[int, ...]]:
    """Yield what graphs held, with the things of their most common kinds among the counts."""
    for shape in held:
        for *counts, held_bytes in held[shape]:
            of = interface.kind_counts(probe.graph(tuple(counts), shape))
            assert of is not None
            yield (*counts, *of.most, held_bytes)
