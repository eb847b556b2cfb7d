"""Measure the memory of a model that treats things of each kind by themselves, as types of edges.

Such a model needs most when all things are of one kind. A request's kinds are counted when it is
staged, so its memory can be that of its own mix: a function of how many things there are, how many
of them are of the first kind, which a model often treats unlike the others, and how many are of the
most common one of the others. What things of each kind take is read off graphs with known numbers
of each.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from serve.estimate.calibration import ByKind, Linear
from serve.estimate.memory import KindColumns, covers, fit_held, fit_planes, peak_at
from serve.interface import InputSlot, Interface
from serve.lane.measure.probe import ModelProbe
from serve.lane.measure.probe_graphs import OneKind, Shape, Structure, declared_graph

_log = logging.getLogger(__name__)

#: What counting kinds must spare somewhere, as a share of the estimate.
_LEAST_GAIN = 0.02
#: Parts of the things that are of the first kind in traced graphs: from as many as of each other
#: kind, to all but one of each.
_PARTS = (0.0, 0.5, 1.0)
#: Shapes in which kinds are random or all the same.
_SHAPES = (Shape.PLAIN, Shape.LOWEST, Shape.HIGHEST)

#: (Counts …, peak of held bytes) of the graphs of each shape.
Held = dict[Structure, list[tuple[int, ...]]]
Planes = tuple[Linear, ...]


def measure_kinds(
    probe: ModelProbe,
    sizes: Sequence[tuple[int, ...]],
    checked: tuple[int, ...],
    by_shape: Mapping[Structure, Planes],
    held: Held,
) -> ByKind | None:
    """Trace graphs of `sizes` with known mixes, and check the fit on a graph of size `checked`.

    `by_shape` and `held` are what is known of each shape. Returns None where counting kinds spares
    nothing, and where these counts do not tell the memory.
    """
    interface = probe.loaded.spec.interface
    if interface is None or not interface.kinds or not _gains(by_shape, (*sizes, checked)):
        return None
    try:
        traces = [probe.trace_of(_graph(interface, mix), mix) for mix in _mixes(interface, sizes)]
        planes, problem = fit_planes(traces, _columns(interface))
        problem = problem or _check(probe, interface, checked, planes)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        _log.info(
            "model %s: memory is that of the worst mix of kinds: %s", probe.loaded.spec.key, problem
        )
        return None
    return ByKind(activations=planes, held=fit_held(list(_held(probe, interface, held))))


def _gains(by_shape: Mapping[Structure, Planes], sizes: Sequence[tuple[int, ...]]) -> bool:
    """Return True when kinds decide much, and nothing else that shapes are extreme in does."""
    plain = by_shape[Shape.PLAIN]

    def most(shapes: Sequence[Structure], size: tuple[int, ...]) -> float:
        return max(peak_at(by_shape[shape], *size) for shape in shapes)

    of_kinds = [one for one in by_shape if one in _SHAPES or isinstance(one, OneKind)]
    others = [shape for shape in by_shape if shape not in of_kinds]
    return all(
        covers(peak_at(plain, *size), int(most([Shape.PLAIN, *others], size))) for size in sizes
    ) and any(most(of_kinds, size) > (1 + _LEAST_GAIN) * peak_at(plain, *size) for size in sizes)


def _columns(interface: Interface) -> list[KindColumns]:
    found: list[KindColumns] = []
    at = len(interface.counts)
    for slot in interface.kinds:
        of = interface.counts.index(slot.symbols[0])
        found.append(KindColumns(at, of, slot.num_kinds))
        at += slot.num_kinds
    return found


def _mixes(interface: Interface, sizes: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield counts near `sizes` followed by the things of each kind, at least one of each.

    There are as many of each but the first kind, or twice as many of one of them.
    """
    columns = _columns(interface)

    def mix(size: tuple[int, ...], varied: KindColumns, part: float, more: int) -> tuple[int, ...]:
        counts, kinds = list(size), []
        for column in columns:
            own_part = part if column is varied else 0.0
            first, each = _split(size[column.of], column.num_kinds, own_part)
            of_each = [first, *(column.num_kinds - 1) * [each]]
            if column is varied and more:
                of_each[more] += each
            counts[column.of] = sum(of_each)
            kinds += of_each
        return (*counts, *kinds)

    for varied in columns:
        for part in _PARTS if varied is columns[0] else _PARTS[1:]:
            for size in sizes:
                yield mix(size, varied, part, 0)
        if varied.num_kinds > 2:
            usual = sizes[len(sizes) // 2]
            yield from (mix(usual, varied, 0.0, more) for more in range(1, varied.num_kinds))


def _split(count: int, num_kinds: int, part: float) -> tuple[int, int]:
    """Return about how many of `count` things are of the first and of each other kind."""
    even = count / num_kinds
    each = max(1, round(even * (1 - part)))
    return max(1, round(count - (num_kinds - 1) * each)), each


def _graph(interface: Interface, mix: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return the inputs of a graph with these counts, and so many things of each kind."""
    graph = declared_graph(interface, mix[: len(interface.counts)], Shape.PLAIN)
    for slot, column in zip(interface.kinds, _columns(interface), strict=True):
        _set(graph, slot, np.repeat(np.arange(slot.num_kinds), column.of_each(mix)))
    return graph


def _set(graph: dict[str, torch.Tensor], slot: InputSlot, kinds: NDArray[np.int64]) -> None:
    """Give the things of `slot` these kinds, counted from 0, in random order."""
    mixed = np.random.default_rng(len(kinds)).permutation(kinds)
    low = 0 if slot.datatype == "BOOL" else int(slot.bounds[0])
    graph[slot.name] = torch.from_numpy((mixed + low).astype(slot.dtype))


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
