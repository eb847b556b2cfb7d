"""Measure the memory of a model that pads the graphs of a batch to the largest, as attention does.

For G graphs, the largest with m things, `to_dense_batch` makes tensors of G · m rows, and attention
within each graph G · m² scores: far more for one large graph and many small ones than for even
graphs. Live bytes are linear in these terms too, so planes are fitted that have them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from serve.estimate.calibration import Linear, MemoryFit
from serve.estimate.graph_sizes import GraphTerms
from serve.estimate.memory import (
    MemoryTrace,
    covers,
    fit_curve,
    fit_planes,
    peak_at,
    raised_planes,
    upper_hull,
)
from serve.lane.measure.allocator import Allocator, TooLarge
from serve.lane.measure.probe import ModelProbe, Need, need_for
from serve.lane.measure.probe_graphs import (
    Batched,
    Shape,
    Structure,
    counts_for,
    graphs_in,
    varied,
)
from serve.lane.measure.trials import (
    SMALLEST_NODES,
    TRACED_BYTES,
    above_estimate,
    trace_or_none,
    traces,
    unless_refused,
)

#: How things are divided into graphs: all in one, each alone, evenly, and unevenly.
DIVIDED = (Shape.PLAIN, Shape.SINGLES, Shape.MANY, Shape.UNEVEN, Shape.LOPSIDED)
_EVEN = (Shape.PLAIN, Shape.SINGLES, Shape.MANY)
#: Nodes and edges of the graphs that show padding, which makes tensors 75 times as large then,
#: and how much larger they must be.
_TRIED = 300, 1_200
_TIMES = 3
#: Nodes and edges of traced graphs, and of larger ones, which need not be traced whole.
_SMALL = ((30, 80), (30, 300), (45, 80), (60, 450), (100, 200), (30, 20), (100, 60))
_LARGE = ((300, 800), (600, 300), (1_000, 4_000), (1_500, 1_000), (3_000, 36_000))
#: Nodes and edges of graphs held out to check the planes, from which they shrink.
_CHECKED = ((3_000, 1_500), (3_000, 12_000), (2_000, 40_000))
#: An estimate further above the measurement than this share is reported.
_LOOSE = 0.05
#: Activations of the graphs that reveal what kernels take, their nodes, and edges per node.
_HELD_BYTES = 12 << 20
_HELD_NODES = 20_000
_HELD_RATIOS = (0.0, 1.0, 4.0, 16.0, 64.0)


def pads(probe: ModelProbe) -> bool:
    """Return True when some tensor is larger for an uneven batch than for even ones alike.

    That is: several times as large as for the same things in one graph, each alone, and in as many
    graphs as each has things.
    """
    spec = probe.loaded.spec
    if not spec.batches:
        return False
    size = counts_for(spec, *_TRIED)
    even = {shape: found for shape in _EVEN if (found := trace_or_none(probe, size, shape))}
    try:
        uneven = unless_refused(
            probe, lambda: probe.trace(size, Shape.LOPSIDED), size, Shape.LOPSIDED
        )
    except TooLarge:
        return bool(even)
    if uneven is None or not even:
        return False
    most = max(found.peak_bytes for found in even.values())
    alike = {shape: found for shape, found in even.items() if found.branch == uneven.branch}
    if most not in [found.peak_bytes for found in alike.values()]:
        return uneven.peak_bytes > _TIMES * most
    # What there is one of for each graph is not padding.
    many = _graphs(probe, size, Shape.LOPSIDED) / _graphs(probe, size, Shape.MANY)
    largest = np.max(
        [
            (many if shape is Shape.MANY else 1.0) * np.abs(found.sizes)
            for shape, found in alike.items()
        ],
        axis=0,
    )
    return bool((np.abs(uneven.sizes) > _TIMES * np.maximum(largest, 1)).any())


def _graphs(probe: ModelProbe, size: tuple[int, ...], shape: Shape) -> float:
    """Return the most graphs of things of one kind."""
    positions = {position for _, position in probe.loaded.spec.batches}
    return max(float(graphs_in(size[position], shape).max()) + 1 for position in positions)


def measure_padded(
    probe: ModelProbe, bases: Iterable[Structure], max_bytes: int, allocator: Allocator
) -> MemoryFit:
    """Trace graphs of each of `bases` divided in each way, fit planes, and check on larger graphs.

    Where planes do not hold, a curve with the terms of graphs is fitted.
    """
    spec = probe.loaded.spec
    inputs = probe.input_bytes()
    graphs = GraphTerms(tuple(position for _, position in spec.batches), padded=True)
    limit = min(max_bytes, TRACED_BYTES)
    by_base = {base: _all_traces(probe, graphs, varied(spec, _SMALL), base) for base in bases}
    planes, problem = _fit(by_base.values())
    need = need_for(inputs, planes, graphs=graphs)
    checked = _checked(probe, graphs, need, _CHECKED, limit)
    curve, warning = None, ""
    if problem or not _all_covered(planes, checked):
        # Small graphs may only take other kernels; the larger ones decide.
        larger = _checked(probe, graphs, need, _LARGE, limit)
        others, problem = _fit([larger])
        planes = upper_hull([*planes, *others])
        if problem or not _all_covered(planes, checked):
            problem = problem or "planes fitted to small graphs do not hold for large ones"
            warning = f"memory is a fitted upper bound: {problem}"
            seen = [*checked, *larger, *(found for each in by_base.values() for found in each)]
            peaks = [(*found.counts, found.peak_bytes) for found in seen]
            held = _held(probe, graphs, need, allocator)
            own = len(inputs.per)
            curve, planes = fit_curve([*peaks, *held], len(peaks[0]) - 1 - own), ()
    need = need_for(inputs, planes, curve, graphs)

    def ratio(shape: Shape, found: MemoryTrace) -> float:
        size = found.counts
        counts = probe.counts(size, shape, graphs)
        return need(*counts) / max(1.0, inputs.at(*size) + found.peak_bytes)

    errors = [_error(inputs, planes, found) for found in checked] if curve is None else [0.0]
    if not warning and max(errors, default=0.0) > _LOOSE:
        warning = f"memory is an upper bound: up to {max(errors):.0%} above need"
    for shape in filter(probe.takes, (Shape.MIXED, Shape.STAR)):
        size = _shrunk(probe, graphs, need, counts_for(spec, *_CHECKED[1]), shape, limit)
        took = above_estimate(probe, size, shape, partial(ratio, shape))
        if took:
            told = "memory depends on more than the numbers of nodes and edges: "
            told += f"a {shape.value} graph took {took} its estimate"
            warning = f"{warning}; {told}" if warning else told
    beyond = [] if curve is not None else _held(probe, graphs, need, allocator)
    return MemoryFit(
        inputs=inputs,
        output=probe.output_bytes(),
        activations=planes,
        held=raised_planes(planes, beyond) if beyond else (),
        curve=curve,
        graphs=graphs,
        error_low=min(errors, default=0.0),
        error_high=max(errors, default=0.0),
        warning=warning,
    )


def _fit(all_traces: Iterable[Sequence[MemoryTrace]]) -> tuple[tuple[Linear, ...], str]:
    """Return planes over all traces, fitted to each group of them, and the first problem."""
    found = [fit_planes(group) for group in all_traces]
    problems = [problem for _, problem in found if problem]
    return upper_hull(plane for planes, _ in found for plane in planes), (problems or [""])[0]


def _error(inputs: Linear, planes: tuple[Linear, ...], found: MemoryTrace) -> float:
    """Return estimate ÷ measured − 1."""
    staged = inputs.at(*found.counts[: len(inputs.per)])
    return (staged + peak_at(planes, *found.counts)) / max(1.0, staged + found.peak_bytes) - 1


def _all_covered(planes: tuple[Linear, ...], found: Iterable[MemoryTrace]) -> bool:
    return all(covers(peak_at(planes, *one.counts), one.peak_bytes) for one in found)


def _all_traces(
    probe: ModelProbe, graphs: GraphTerms, sizes: Sequence[tuple[int, ...]], base: Structure
) -> list[MemoryTrace]:
    """Trace graphs of these sizes divided in each way; the traces' counts are all terms."""
    return [
        _with_terms(probe, graphs, found, shape)
        for shape in (Batched(base, divided) for divided in DIVIDED)
        for found in traces(probe, sizes, shape)
    ]


def _with_terms(
    probe: ModelProbe, graphs: GraphTerms, found: MemoryTrace, shape: Structure
) -> MemoryTrace:
    size = found.counts
    return replace(found, counts=graphs.terms(probe.counts(size, shape, graphs), len(size)))


def _checked(
    probe: ModelProbe,
    graphs: GraphTerms,
    need: Need,
    sizes: Sequence[tuple[int, int]],
    limit: int,
) -> list[MemoryTrace]:
    """Trace graphs of about these nodes and edges, divided in each way, that need `limit` bytes."""
    found = []
    for shape in DIVIDED:
        for size in varied(probe.loaded.spec, sizes):
            size = _shrunk(probe, graphs, need, size, shape, limit)
            traced = trace_or_none(probe, size, Batched(Shape.PLAIN, shape))
            if traced is not None:
                found.append(_with_terms(probe, graphs, traced, shape))
    return found


def _shrunk(
    probe: ModelProbe,
    graphs: GraphTerms,
    need: Need,
    size: tuple[int, ...],
    shape: Shape,
    limit: int,
) -> tuple[int, ...]:
    """Return `size`, or a smaller one of the same ratios that needs at most `limit` bytes."""
    while size[0] > SMALLEST_NODES and need(*probe.counts(size, shape, graphs)) > limit:
        size = tuple(count * 7 // 8 for count in size)
    return size


def _held(
    probe: ModelProbe, graphs: GraphTerms, need: Need, allocator: Allocator
) -> list[tuple[int, ...]]:
    """Measure (terms …, bytes held) of graphs divided in each way; nothing without a meter."""
    if allocator.held_by is None:
        return []
    found = []
    sizes = [(_HELD_NODES, int(_HELD_NODES * ratio)) for ratio in _HELD_RATIOS]
    for shape in DIVIDED:
        for size in varied(probe.loaded.spec, sizes):
            size = _shrunk(probe, graphs, need, size, shape, _HELD_BYTES)
            whole = Batched(Shape.PLAIN, shape)
            run = probe.runner(probe.site.place(probe.graph(size, whole)))
            try:
                held = unless_refused(probe, partial(allocator.held_by, run), size, whole)
            except TooLarge:
                continue
            if held is not None:
                terms = graphs.terms(probe.counts(size, shape, graphs), len(size))
                found.append((*terms, held))
    return found
