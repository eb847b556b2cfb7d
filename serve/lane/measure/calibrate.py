"""Measure a loaded model: its memory traced, its time over sizes. Needs torch.

Memory takes a few hundred milliseconds whatever the budget; the rest of the budget goes into
timing. What is measured is what a lane does: ``LoadedModel.run`` on this process's threads, with
the lane's allocator (`Allocator`). A busy machine does not disturb the first and, on one thread,
hardly the second.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from serve.errors import ModelError
from serve.estimate.calibration import (
    Calibration,
    Curve,
    Linear,
    Loopless,
    MemoryFit,
    TimeFit,
)
from serve.estimate.estimator import SAFETY_FACTOR
from serve.estimate.memory import (
    SLACK_SHARE,
    MemoryTrace,
    covers,
    fit_curve,
    fit_held,
    fit_planes,
    peak_at,
    upper_hull,
)
from serve.estimate.timing import Timed, fit_time
from serve.inputs import INPUTS, Size
from serve.lane.measure.probe_graphs import Shape, probe_graph
from serve.lane.measure.where_measured import Processor, Site
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import Signature
from serve.progress import Progress

_log = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]
Found = TypeVar("Found")
#: (Nodes, edges, bytes held at the peak) of graphs of each shape.
_Held = dict[Shape, list[tuple[int, int, int]]]
#: Bytes at the peak for a number of nodes and edges.
Need = Callable[[int, int], float]

#: Nodes and edges of traced graphs: both vary by themselves, and edges are fewer and more.
_TRACED = ((60, 150), (60, 600), (90, 150), (130, 900), (200, 400), (60, 40), (200, 120))
#: Larger ones, for models that change to other kernels on the way up.
_TRACED_LARGE = tuple((8 * nodes, 8 * edges) for nodes, edges in _TRACED)
#: What a graph may be extreme in besides N and E.
_FAMILIES = (Shape.PLAIN, Shape.LOOPS, Shape.SINGLES)
#: Nodes, and edges per node, of graphs held out to check the planes.
_CHECKED_NODES = 3_000
_CHECKED_RATIOS = (0.5, 4.0, 12.0, 30.0)
_CHECKED_SHAPES = (Shape.MIXED, Shape.STAR, Shape.LOPSIDED)
_CHECKED_SHAPES_SIZE = 3_000, 12_000
#: No graph that is only traced gets larger than this.
_TRACED_BYTES = 256 << 20
#: An estimate further above the measurement than this is worth a word.
_LOOSE = 0.05
#: Activations of the graphs that show what kernels take unseen, and their edges per node.
_HELD_BYTES = 12 << 20
_HELD_RATIOS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 1000.0)
#: A size to shrink from.
_MANY_NODES = 1_000_000

_TIMED_RATIOS = (2, 10, 30)
_SMALLEST_TIMED = 16
#: Sizes double; at least so many are timed, and at most.
_LEAST_STEPS, _MAX_STEPS = 5, 20
#: No size is timed beyond the first that takes this long.
_LONG_RUN_NS = 90_000_000
_MAX_ROUNDS = 9
#: Share of the time that finding the largest graphs may take.
_CLIMB_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Allocator:
    """What a lane does with its allocator around each run; calibration has to do the same."""

    #: Runs a forward pass; the most bytes it held at once, tensors and what kernels took besides.
    #: None where the process has no meter: then kernels count as taking nothing.
    held_by: Callable[[Run], int] | None = None
    #: Told the bytes that a run will need, before it starts.
    expect: Callable[[int], None] = lambda need_bytes: None


_PLAIN = Allocator()


def calibrate(
    loaded: LoadedModel,
    signature: Signature,
    *,
    budget_s: float,
    max_bytes: int,
    allocator: Allocator = _PLAIN,
    progress: Progress | None = None,
    executor_reason: str = "",
    site: Site | None = None,
    trial: LoadedModel | None = None,
) -> Calibration:
    """Trace and time `loaded` within about `budget_s`; no graph needs more than `max_bytes`.

    `site` is where it runs; None: in this process. `trial` is run first on what is traced, beside
    the budget, where the site would not survive a graph that the model refuses.

    Raises ModelError when the model cannot run even the smallest probe graphs.
    """
    tell = progress or (lambda step, fraction: None)
    site = site or Processor()
    stop_at = time.monotonic() + budget_s
    tell("memory", 0.0)
    memory = measure_memory(
        loaded, signature, max_bytes=max_bytes, allocator=allocator, site=site, trial=trial
    )
    if memory.warning:
        _log.warning("model %s: %s", loaded.spec.key, memory.warning)
    tell("time", 0.2)
    if trial is not None:
        stop_at = max(stop_at, time.monotonic() + budget_s / 2)
    probe = _Probe(loaded, signature, site)
    timed = _measure_time(probe, memory, max_bytes, stop_at, tell, allocator.expect)
    tell("done", 1.0)
    return Calibration(
        model=loaded.spec.key,
        executor=loaded.executor,
        executor_reason=executor_reason,
        device=site.name,
        threads=torch.get_num_threads(),
        memory=memory,
        time=timed,
    )


@dataclass(frozen=True, slots=True)
class _Probe:
    """A model with what it takes to run it on graphs of any size."""

    loaded: LoadedModel
    signature: Signature
    site: Site
    trial: LoadedModel | None = None

    def graph(
        self, num_nodes: int, num_edges: int, shape: Shape = Shape.PLAIN
    ) -> dict[str, torch.Tensor]:
        return probe_graph(num_nodes, num_edges, shape, self.loaded.spec.inputs, self.signature)

    def runner(self, inputs: dict[str, torch.Tensor]) -> Run:
        return lambda: self.loaded.run(inputs)

    def attempt(self, size: tuple[int, int], shape: Shape = Shape.PLAIN) -> None:
        """Raise what the model does on such a graph, where that costs nothing."""
        if self.trial is not None:
            self.trial.run(self.graph(*size, shape))

    def trace(self, num_nodes: int, num_edges: int, shape: Shape = Shape.PLAIN) -> MemoryTrace:
        run = self.runner(self.site.place(self.graph(num_nodes, num_edges, shape)))
        return self.site.trace(run, self.loaded.module, num_nodes, num_edges)

    def takes(self, shape: Shape) -> bool:
        """Is the graph plain, or does the shape change what this model gets?"""
        if shape is Shape.PLAIN:
            return True
        needs = "batch" if shape in (Shape.SINGLES, Shape.LOPSIDED) else "edge_index"
        return needs in self.loaded.spec.inputs

    def input_bytes(self) -> Linear:
        """What its inputs take when staged."""
        sizes: dict[Size, int] = {
            "F": self.signature.num_features,
            "D": self.signature.edge_dim or 0,
        }
        each_bytes = {"N": 0, "E": 0}
        for name in self.loaded.spec.inputs:
            each_bytes[INPUTS[name].per[0]] += INPUTS[name].bytes_each(sizes)
        return Linear(each_bytes["N"], each_bytes["E"], 0.0)

    def output_bytes(self) -> Linear:
        """The most its output takes: without knowing the batch, each node may be a graph."""
        row = 4 * self.signature.num_outputs
        many = self.signature.rows == "node" or "batch" in self.loaded.spec.inputs
        return Linear(row, 0.0, 0.0) if many else Linear(0.0, 0.0, row)


def measure_memory(
    loaded: LoadedModel,
    signature: Signature,
    *,
    max_bytes: int,
    allocator: Allocator = _PLAIN,
    site: Site | None = None,
    trial: LoadedModel | None = None,
) -> MemoryFit:
    """Trace small graphs, fit, and check on larger ones of several shapes; see ``calibrate``."""
    probe = _Probe(loaded, signature, site or Processor(), trial)
    inputs = probe.input_bytes()
    _run_once(probe)
    families = _fit_families(probe, _TRACED)
    planes, problem = families.planes(), families.problem
    checked = _traces(probe, _checked_sizes(_need(inputs, planes), max_bytes))
    if problem or not _all_covered(planes, checked):
        # Perhaps small graphs are only handled differently; the largest tell.
        families = families.with_larger(_fit_families(probe, _TRACED_LARGE))
        planes, problem = families.planes(), families.problem
    curve, peaks = None, []
    warning = ""
    if problem or not _all_covered(planes, checked):
        seen = [*checked, *_traces(probe, (*_TRACED, *_TRACED_LARGE))]
        peaks = [(t.num_nodes, t.num_edges, t.peak_bytes) for t in seen]
        curve = fit_curve(peaks)
        problem = problem or "planes fitted to small graphs do not hold for large ones"
        warning = f"memory is a fitted upper bound: {problem}"
    need = _need(inputs, planes, curve)

    def ratio(found: MemoryTrace) -> float:
        size = found.num_nodes, found.num_edges
        return need(*size) / (inputs.at(*size) + found.peak_bytes)

    errors = [ratio(found) - 1 for found in checked]
    if not warning and max(errors) > _LOOSE:
        warning = f"memory is an upper bound: up to {max(errors):.0%} above need"
    size = _shrunk(_CHECKED_SHAPES_SIZE, need, min(max_bytes, _TRACED_BYTES))
    for shape in filter(probe.takes, _CHECKED_SHAPES):
        found = _trace_or_none(probe, size, shape)
        if found is not None and ratio(found) < 1 - SLACK_SHARE:
            warning = warning or (
                "memory depends on more than the numbers of nodes and edges: "
                f"a {shape.value} graph took {1 / ratio(found):.1f} times its estimate"
            )
    held = _measure_held(probe, need, max_bytes, allocator)
    loopless = None
    if curve is not None:
        curve, held = fit_curve([*peaks, *_of_all(held)]), {}
    else:
        loopless = _without_loops(probe, families, held, size, allocator)
    return MemoryFit(
        inputs=inputs,
        output=probe.output_bytes(),
        activations=planes,
        held=fit_held(_of_all(held)),
        loopless=loopless,
        curve=curve,
        error_low=min(errors),
        error_high=max(errors),
        warning=warning,
    )


def _need(inputs: Linear, planes: tuple[Linear, ...], curve: Curve | None = None) -> Need:
    """Inputs and activations as a function of nodes and edges."""

    def need(num_nodes: int, num_edges: int) -> float:
        size = num_nodes, num_edges
        live = max(peak_at(planes, *size), 0.0 if curve is None else curve.at(*size))
        return inputs.at(*size) + live

    return need


def _run_once(probe: _Probe) -> None:
    """What a model does only the first time must not be measured."""
    try:
        probe.attempt(_TRACED[0])
        probe.loaded.run(probe.graph(*_TRACED[0]))
    except Exception as error:
        raise ModelError(
            f"model {probe.loaded.spec.key}: a random graph of {_TRACED[0][0]} nodes and"
            f" {_TRACED[0][1]} edges does not run: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Families:
    """Planes for each shape that is extreme in what N and E do not say."""

    by_shape: dict[Shape, tuple[Linear, ...]] = field(default_factory=dict)
    #: Of any of them, as from `fit_planes`.
    problem: str = ""

    def planes(self, shapes: Iterable[Shape] = _FAMILIES) -> tuple[Linear, ...]:
        """Those over all graphs between `shapes`."""
        return upper_hull(plane for shape in shapes for plane in self.by_shape.get(shape, ()))

    def with_larger(self, other: "_Families") -> "_Families":
        """Joined with planes of larger graphs, whose problems are the ones that count."""
        joined = {s: (*planes, *other.by_shape[s]) for s, planes in self.by_shape.items()}
        return _Families(joined, other.problem)


def _fit_families(probe: _Probe, sizes: Iterable[tuple[int, int]]) -> _Families:
    found = {s: fit_planes(_traces(probe, sizes, s)) for s in filter(probe.takes, _FAMILIES)}
    problems = [problem for _, problem in found.values() if problem]
    return _Families({s: planes for s, (planes, _) in found.items()}, (problems or [""])[0])


def _without_loops(
    probe: _Probe,
    families: _Families,
    held: _Held,
    size: tuple[int, int],
    allocator: Allocator,
) -> Loopless | None:
    """What graphs of known loops take; None when that is no less than with loops unknown.

    As the largest of linear functions of (N, E, S), S loops among the edges, a peak is convex and
    in proportion to its arguments. So it is no more than the sum of the peaks at (N, E − S, 0) and
    at (0, S, S): that of the graph without its loops, and S times what a loop costs in a graph of
    nothing else. Checked on a graph of which a third are loops.
    """
    plain = [shape for shape in families.by_shape if shape is not Shape.LOOPS]
    loops = families.by_shape.get(Shape.LOOPS, ())
    planes = families.planes(plain)
    a_loop = max((plane.edges for plane in loops), default=math.inf)
    if a_loop >= max((plane.edges for plane in planes), default=0.0):
        return None
    # At the largest ratio nodes hardly count.
    densest = max(held.get(Shape.LOOPS, []), key=lambda found: found[1] / found[0], default=None)
    loopless = Loopless(
        activations=planes,
        held=fit_held(_of_all({shape: held.get(shape, []) for shape in plain})),
        loop_activations=a_loop,
        loop_held=0.0 if densest is None else densest[2] / densest[1],
    )
    graph = probe.graph(*size, Shape.MIXED)
    source, target = graph["edge_index"]
    num_loops = int((source == target).sum())
    found = _trace_or_none(probe, size, Shape.MIXED)
    run = probe.runner(probe.site.place(graph))
    taken = None if found is None or allocator.held_by is None else allocator.held_by(run)
    rest = size[0], size[1] - num_loops
    peak = peak_at(planes, *rest) + a_loop * num_loops
    need = max(peak, peak_at(loopless.held, *rest) + loopless.loop_held * num_loops)
    if found is not None and not covers(peak, found.peak_bytes):
        return None
    # Half of the margin stays for what larger graphs show.
    return loopless if (taken or 0) <= (1 + SAFETY_FACTOR) / 2 * need else None


def _unless_refused(
    probe: _Probe, measure: Callable[[], Found], size: tuple[int, int], shape: Shape
) -> Found | None:
    """None when the model refuses the graph, its right when that is odd or has lonely nodes."""
    try:
        probe.attempt(size, shape)
        return measure()
    except Exception:
        if shape is Shape.PLAIN and size[1] >= size[0]:
            raise
        return None


def _trace_or_none(probe: _Probe, size: tuple[int, int], shape: Shape) -> MemoryTrace | None:
    return _unless_refused(probe, lambda: probe.trace(*size, shape), size, shape)


def _traces(
    probe: _Probe, sizes: Iterable[tuple[int, int]], shape: Shape = Shape.PLAIN
) -> list[MemoryTrace]:
    found = (_trace_or_none(probe, size, shape) for size in sizes)
    return [trace for trace in found if trace is not None]


def _checked_sizes(need: Need, max_bytes: int) -> list[tuple[int, int]]:
    sizes = [(_CHECKED_NODES, int(ratio * _CHECKED_NODES)) for ratio in _CHECKED_RATIOS]
    return [_shrunk(size, need, min(max_bytes, _TRACED_BYTES)) for size in sizes]


def _shrunk(size: tuple[int, int], need: Need, limit_bytes: int) -> tuple[int, int]:
    """`size`, or a smaller one of the same shape that needs no more; at least 16 nodes."""
    nodes, edges = size
    while nodes > _SMALLEST_TIMED and need(nodes, edges) > limit_bytes:
        nodes, edges = nodes * 7 // 8, edges * 7 // 8
    return nodes, edges


def _all_covered(planes: tuple[Linear, ...], traces: Iterable[MemoryTrace]) -> bool:
    return all(covers(peak_at(planes, t.num_nodes, t.num_edges), t.peak_bytes) for t in traces)


def _measure_held(probe: _Probe, need: Need, max_bytes: int, allocator: Allocator) -> _Held:
    """From the sparsest to the densest graphs; nothing without a meter."""
    if allocator.held_by is None:
        return {}
    limit = min(max_bytes, _HELD_BYTES)
    held_by = allocator.held_by
    found: _Held = {}
    for ratio in _HELD_RATIOS:
        size = _shrunk((_MANY_NODES, int(_MANY_NODES * ratio)), need, limit)
        for shape in filter(probe.takes, _FAMILIES):
            run = probe.runner(probe.site.place(probe.graph(*size, shape)))
            measure = partial(held_by, run)
            held = _unless_refused(probe, measure, size, shape)
            if held is not None:
                found.setdefault(shape, []).append((*size, held))
    return found


def _of_all(held: _Held) -> list[tuple[int, int, int]]:
    return [found for of_shape in held.values() for found in of_shape]


def _measure_time(
    probe: _Probe,
    memory: MemoryFit,
    max_bytes: int,
    stop_at: float,
    tell: Progress,
    expect: Callable[[int], None],
) -> TimeFit:
    """Time runs over log-spaced sizes: once upwards to find the largest, then in rounds.

    Rounds go from large to small, so that the allocator has what it needs when small graphs are
    timed, and a disturbance hits one run of many sizes rather than all runs of one.
    """
    need = _need(memory.inputs, memory.activations, memory.curve)
    started = time.monotonic()
    span = max(stop_at - started, 1e-3)
    graphs: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    runs: dict[tuple[int, int], list[int]] = {}

    def time_one(size: tuple[int, int]) -> int:
        expect(int(need(*size)))
        return _time_ns(probe, graphs[size])

    for index, ratio in enumerate(_TIMED_RATIOS, start=1):
        climb_until = started + span * _CLIMB_SHARE * index / len(_TIMED_RATIOS)
        for step in range(_MAX_STEPS):
            size = _SMALLEST_TIMED << step, ratio * _SMALLEST_TIMED << step
            if step >= _LEAST_STEPS and (need(*size) > max_bytes or time.monotonic() > climb_until):
                break
            graphs[size] = probe.site.stage(probe.graph(*size))
            runs[size] = [time_one(size)]
            if step >= _LEAST_STEPS and runs[size][0] > _LONG_RUN_NS:
                break
    order = sorted(graphs, key=lambda size: -runs[size][0])
    patience_ns = span * 1e9 / 60
    for round_number in range(_MAX_ROUNDS):
        for size in order:
            if time.monotonic() > stop_at:
                break
            if round_number < 2 or runs[size][0] < patience_ns:
                runs[size].append(time_one(size))
        tell("time", 0.2 + 0.8 * min(1.0, (time.monotonic() - started) / span))
    # The first run of a size only warmed up, if there was time for another.
    return fit_time([Timed(*size, tuple(found[1:] or found)) for size, found in runs.items()])


def _time_ns(probe: _Probe, inputs: dict[str, torch.Tensor]) -> int:
    """One run of what a lane does."""
    return max(1, probe.site.time_ns(probe.runner(inputs)))
