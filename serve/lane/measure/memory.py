"""Measure the memory of a model: trace its runs on small graphs, fit, and check on larger ones."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from serve.errors import ModelError
from serve.estimate.calibration import (
    ByKind,
    Linear,
    Loopless,
    MemoryFit,
)
from serve.estimate.estimator import SAFETY_FACTOR
from serve.estimate.graph_sizes import COUNTS_ALONE
from serve.estimate.memory import (
    MemoryTrace,
    covers,
    fit_curve,
    fit_held,
    fit_planes,
    peak_at,
    upper_hull,
)
from serve.lane.measure.allocator import UNMETERED, Allocator, TooLarge
from serve.lane.measure.kinds import Held, measure_kinds
from serve.lane.measure.one_kind import Alone, kinds_alone
from serve.lane.measure.padded import measure_padded, pads
from serve.lane.measure.pairs import curve_with_pairs
from serve.lane.measure.probe import ModelProbe, Need, need_for
from serve.lane.measure.probe_graphs import Shape, Structure, counts_for, varied
from serve.lane.measure.trials import (
    SMALLEST_NODES,
    TRACED,
    TRACED_BYTES,
    TRACED_CURVED,
    TRACED_LARGE,
    above_estimate,
    scaled,
    shrunk,
    trace_or_none,
    traces,
    unless_refused,
)
from serve.lane.measure.where_measured import Processor, Site
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import Signature

#: Shapes that are extreme in properties other than N and E.
_FAMILIES = (Shape.PLAIN, Shape.LOOPS, Shape.SINGLES, Shape.LOWEST, Shape.HIGHEST)
#: Nodes and edges of graphs in which all things are of one kind, and most such kinds that take more
#: than the first, the last and a mix of all.
_MANY_THINGS = 1_000, 8_000
_MOST_COSTLY = 6
#: Nodes, and edges per node, of graphs held out to check the planes.
_CHECKED_NODES = 3_000
_CHECKED_RATIOS = (0.5, 4.0, 12.0, 30.0)
_CHECKED_SHAPES = (Shape.MIXED, Shape.STAR, Shape.LOPSIDED)
_CHECKED_SHAPES_SIZE = 3_000, 12_000
#: An estimate further above the measurement than this share is reported.
_LOOSE = 0.05
#: Activations of the graphs that reveal memory which tracing misses, and their edges per node.
_HELD_BYTES = 12 << 20
_HELD_RATIOS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 1000.0)
#: And how much more of one count than of the others, where there are several.
_HELD_FACTORS = (5, 500)
#: The size from which ``shrunk`` starts.
_MANY_NODES = 1_000_000


def measure_memory(
    loaded: LoadedModel,
    signature: Signature,
    *,
    max_bytes: int,
    allocator: Allocator = UNMETERED,
    site: Site | None = None,
    trial: LoadedModel | None = None,
) -> MemoryFit:
    """Trace small graphs, fit planes, and check on larger graphs of several shapes.

    The arguments are those of ``calibrate``.
    """
    probe = ModelProbe(loaded, signature, site or Processor(), trial, allocator.limited)
    inputs = probe.input_bytes()
    _run_once(probe)
    traced, traced_large = varied(loaded.spec, TRACED), varied(loaded.spec, TRACED_LARGE)
    families = _fit_families(probe, traced)
    need = need_for(inputs, families.planes())
    many = shrunk(counts_for(loaded.spec, *_MANY_THINGS), need, min(max_bytes, TRACED_BYTES))
    alone = kinds_alone(probe, many)
    families = _with_costly_kinds(probe, families, traced, alone)
    if pads(probe):
        kinds = [shape for shape, _ in _most_costly(alone)] if families.problem else []
        bases = dict.fromkeys([*families.by_shape, *kinds])
        del bases[Shape.SINGLES]
        return measure_padded(probe, bases, max_bytes, allocator)
    planes, problem = families.planes(), families.problem
    checked = _checked(probe, need_for(inputs, planes), max_bytes)
    if problem or not _all_covered(planes, checked):
        # Small graphs may only take other kernels; the larger ones decide.
        larger = _fit_families(probe, traced_large, list(families.by_shape))
        families = families.with_larger(larger)
        planes, problem = families.planes(), families.problem
    curve, peaks, further = None, [], []
    warning = ""
    if problem or not _all_covered(planes, checked):
        further = [
            shrunk(size, need_for(inputs, planes), min(max_bytes, TRACED_BYTES))
            for size in varied(loaded.spec, TRACED_CURVED)
        ]
        seen = [*checked, *traces(probe, (*traced, *traced_large, *further))]
        costly = _most_costly(alone)
        seen += [found for _, found in costly]
        seen += [found for kind, _ in costly for found in traces(probe, traced, kind)]
        peaks = [(*t.counts, t.peak_bytes) for t in seen]
        curve = fit_curve(peaks)
        problem = problem or "planes fitted to small graphs do not hold for large ones"
        warning = f"memory is a fitted upper bound: {problem}"
    need = need_for(inputs, planes, curve)

    def ratio(found: MemoryTrace) -> float:
        size = found.counts
        return need(*size) / max(1.0, inputs.at(*size) + found.peak_bytes)

    most_bytes = min(max_bytes, TRACED_BYTES)
    size = shrunk(counts_for(loaded.spec, *_CHECKED_SHAPES_SIZE), need, most_bytes)
    held = _measure_held(probe, need, max_bytes, allocator, families.by_shape)
    by_kind = None
    if curve is None:
        by_kind = measure_kinds(probe, traced, size, families.by_shape, held)
    errors = [ratio(found) - 1 for found in checked]
    if by_kind is not None:
        errors = [_error_by_kind(probe, inputs, by_kind, found) for found in checked]
    if not warning and max(errors) > _LOOSE:
        warning = f"memory is an upper bound: up to {max(errors):.0%} above need"
    for shape in filter(probe.takes, _CHECKED_SHAPES):
        took = above_estimate(probe, size, shape, ratio)
        if took:
            told = "memory depends on more than the numbers of nodes and edges: "
            told += f"a {shape.value} graph took {took} its estimate"
            warning = f"{warning}; {told}" if warning else told
    loopless, graphs = None, COUNTS_ALONE
    if curve is not None:
        # What was fitted to moments that do not line up says nothing of other graphs.
        curve, graphs = curve_with_pairs(
            probe, peaks, held, lambda shape: traces(probe, further, shape)
        ) or (fit_curve([*peaks, *_of_all(held)]), COUNTS_ALONE)
        held, planes = {}, ()
    elif loaded.spec.interface is None:
        loopless = _without_loops(probe, families, held, size, allocator)
    return MemoryFit(
        inputs=inputs,
        output=probe.output_bytes(),
        activations=planes,
        held=fit_held(_of_all(held)),
        loopless=loopless,
        by_kind=by_kind,
        curve=curve,
        graphs=graphs,
        error_low=min(errors),
        error_high=max(errors),
        warning=warning,
    )


def _error_by_kind(probe: ModelProbe, inputs: Linear, by_kind: ByKind, found: MemoryTrace) -> float:
    """Return estimate ÷ measured − 1 of a plain graph whose things of each kind are counted."""
    interface = probe.loaded.spec.interface
    assert interface is not None
    counts = interface.kind_counts(probe.graph(found.counts))
    assert counts is not None
    staged = inputs.at(*found.counts)
    estimate = staged + peak_at(by_kind.activations, *found.counts, *counts.firsts, *counts.others)
    return estimate / max(1.0, staged + found.peak_bytes) - 1


def _run_once(probe: ModelProbe) -> None:
    """Run the model once, so that no measurement includes its first run."""
    try:
        counts = counts_for(probe.loaded.spec, *TRACED[0])
        probe.attempt(counts)
        probe.loaded.outputs(probe.graph(counts))
    except Exception as error:
        raise ModelError(
            f"model {probe.loaded.spec.key}: a random graph of {TRACED[0][0]} nodes and"
            f" {TRACED[0][1]} edges does not run: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Families:
    """Planes for each shape that is extreme in a property other than N and E."""

    by_shape: dict[Structure, tuple[Linear, ...]] = field(default_factory=dict)
    #: First problem that `fit_planes` found, empty when none.
    problem: str = ""

    def planes(self, shapes: Iterable[Structure] | None = None) -> tuple[Linear, ...]:
        """Return planes that bound all graphs between `shapes`, by default all, from above."""
        wanted = self.by_shape if shapes is None else shapes
        return upper_hull(plane for shape in wanted for plane in self.by_shape[shape])

    def with_larger(self, other: "_Families") -> "_Families":
        """Return the union with planes of larger graphs, whose problem replaces this one."""
        joined = {s: (*planes, *other.by_shape[s]) for s, planes in self.by_shape.items()}
        return _Families(joined, other.problem)

    def with_shapes(self, other: "_Families") -> "_Families":
        """Return the union with planes of other shapes; its problem is the first of both."""
        return _Families(self.by_shape | other.by_shape, self.problem or other.problem)


def _most_costly(alone: Alone) -> Alone:
    """Return the graphs of one kind that take most."""
    return sorted(alone, key=lambda one: -one[1].peak_bytes)[:_MOST_COSTLY]


def _with_costly_kinds(
    probe: ModelProbe, families: _Families, sizes: Sequence[tuple[int, ...]], alone: Alone
) -> _Families:
    """Return `families` with graphs of each kind that takes more than all known shapes."""
    left = list(alone)
    for found_before in range(_MOST_COSTLY + 1):
        planes = families.planes()
        left = [
            (shape, found)
            for shape, found in left
            if not covers(peak_at(planes, *found.counts), found.peak_bytes)
        ]
        if families.problem or not left:
            return families
        if found_before == _MOST_COSTLY:
            break
        worst, _ = left.pop(left.index(max(left, key=lambda one: one[1].peak_bytes)))
        families = families.with_shapes(_fit_families(probe, sizes, [worst]))
    return _Families(families.by_shape, "each of many kinds of things takes memory of its own")


def _fit_families(
    probe: ModelProbe,
    sizes: Sequence[tuple[int, ...]],
    shapes: Iterable[Structure] | None = None,
) -> _Families:
    """Fit planes to graphs of each of `shapes`, by default of those that the model tells apart."""
    wanted = [shape for shape in _FAMILIES if probe.takes(shape)] if shapes is None else shapes
    found = {shape: fit_planes(traces(probe, sizes, shape)) for shape in wanted}
    problems = [problem for _, problem in found.values() if problem]
    return _Families({s: planes for s, (planes, _) in found.items()}, (problems or [""])[0])


def _without_loops(
    probe: ModelProbe,
    families: _Families,
    held: Held,
    size: tuple[int, ...],
    allocator: Allocator,
) -> Loopless | None:
    """Fit the memory of graphs whose number of self-loops S is known.

    A peak is the maximum of linear functions of (N, E, S), so it is convex and positively
    homogeneous, hence subadditive: the peak at (N, E, S) is at most the peak at (N, E − S, 0), the
    graph without its loops, plus S times the cost of a loop in a graph of nothing but loops. A
    graph with a third of loops checks this.

    Returns None when knowing S saves nothing, or when the check fails.
    """
    plain = [shape for shape in families.by_shape if shape is not Shape.LOOPS]
    loops = families.by_shape.get(Shape.LOOPS, ())
    planes = families.planes(plain)
    a_loop = max((plane.per[1] for plane in loops), default=math.inf)
    if a_loop >= max((plane.per[1] for plane in planes), default=0.0):
        return None
    # In the densest graph nodes hardly count.
    densest = max(held.get(Shape.LOOPS, []), key=lambda found: found[1] / found[0], default=None)
    loopless = Loopless(
        activations=planes,
        held=fit_held(_of_all({shape: held.get(shape, []) for shape in plain})),
        loop_activations=a_loop,
        loop_held=0.0 if densest is None else densest[2] / densest[1],
    )
    graph = probe.graph(size, Shape.MIXED)
    source, target = graph["edge_index"]
    num_loops = int((source == target).sum())
    found = trace_or_none(probe, size, Shape.MIXED)
    run = probe.runner(probe.site.place(graph))
    taken = None if found is None or allocator.held_by is None else allocator.held_by(run)
    rest = size[0], size[1] - num_loops
    peak = peak_at(planes, *rest) + a_loop * num_loops
    need = max(peak, peak_at(loopless.held, *rest) + loopless.loop_held * num_loops)
    if found is not None and not covers(peak, found.peak_bytes):
        return None
    # The other half of the margin stays for larger graphs.
    return loopless if (taken or 0) <= (1 + SAFETY_FACTOR) / 2 * need else None


def _checked(probe: ModelProbe, need: Need, max_bytes: int) -> list[MemoryTrace]:
    """Trace the graphs that check the planes."""
    graphs = [(_CHECKED_NODES, int(ratio * _CHECKED_NODES)) for ratio in _CHECKED_RATIOS]
    sizes = varied(probe.loaded.spec, graphs)
    limit = min(max_bytes, TRACED_BYTES)
    found = (_largest_trace(probe, shrunk(size, need, limit)) for size in sizes)
    return [trace for trace in found if trace is not None]


def _largest_trace(probe: ModelProbe, size: tuple[int, ...]) -> MemoryTrace | None:
    """Trace a plain graph, or a half, a quarter, … of it, where it takes too much memory."""
    while size[0] > SMALLEST_NODES:
        try:
            return unless_refused(probe, partial(probe.trace, size), size, Shape.PLAIN)
        except TooLarge:
            size = scaled(size, 1 / 2)
    return trace_or_none(probe, size, Shape.PLAIN)


def _all_covered(planes: tuple[Linear, ...], traces: Iterable[MemoryTrace]) -> bool:
    return all(covers(peak_at(planes, *t.counts), t.peak_bytes) for t in traces)


def _measure_held(
    probe: ModelProbe,
    need: Need,
    max_bytes: int,
    allocator: Allocator,
    shapes: Iterable[Structure],
) -> Held:
    """Measure held bytes from sparse to dense graphs; returns nothing without a meter."""
    if allocator.held_by is None:
        return {}
    limit = min(max_bytes, _HELD_BYTES)
    held_by = allocator.held_by
    found: Held = {}
    graphs = [(_MANY_NODES, int(_MANY_NODES * ratio)) for ratio in _HELD_RATIOS]
    for many in varied(probe.loaded.spec, graphs, _HELD_FACTORS):
        size = shrunk(many, need, limit)
        for shape in shapes:
            run = probe.runner(probe.site.place(probe.graph(size, shape)))
            measure = partial(held_by, run)
            try:
                held = unless_refused(probe, measure, size, shape)
            except TooLarge:
                continue
            if held is not None:
                found.setdefault(shape, []).append((*size, held))
    return found


def _of_all(held: Held) -> list[tuple[int, ...]]:
    return [found for of_shape in held.values() for found in of_shape]
