"""Estimates for one loaded model, a few microseconds each, corrected by every run.

Called under the driver's lock: nothing here locks, and nothing here may be slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil
from operator import mul
from statistics import median

import numpy as np
from msgspec.structs import replace

from serve.core.types import Bytes, Nanos, TaskEstimate, align_bytes
from serve.estimate.calibration import Calibration, Linear, TimeFit
from serve.estimate.correction import Correction, Quantile
from serve.estimate.slowdown import Slowdowns
from serve.estimate.solve import Floats
from serve.estimate.timing import fit_overhead
from serve.interface import KindCounts

#: What is reserved above the estimated peak, as a factor.
SAFETY_FACTOR = 1.03
#: And at least this much, for constant-size rounding in small graphs.
_SAFETY_BYTES = 4096
#: A run that needed more than so many times its estimate tells nothing of larger graphs.
_LARGEST_SCALE = 2.0
#: Upper quantile ÷ median to start with, at most: a calibration beyond was disturbed.
_WIDEST_BAND = 2.0
#: What joining requests into a union takes (bench/models/merging.py).
_JOIN_NS, _JOIN_NS_PER_REQUEST, _JOIN_NS_PER_BYTE = 12_000, 3_500, 0.05
#: An edge staged as int32 and not as int64, in both of its rows.
NARROW_EDGE_SPARES_BYTES = 8
#: Each tensor of a request lies at a multiple of 64 bytes.
_PLACES_BYTES = 512


#: Constant and coefficients of each plane; as a matrix where there are many of several counts.
_Planes = tuple[tuple[float, ...], ...] | Floats
_MANY_PLANES = 8


#: What was counted in a request's tensors: self-loops, and things by kind.
_Content = tuple[int | None, KindCounts | None]
_UNKNOWN: _Content = (None, None)

#: Overhead until it is measured: base in ns, ns per KiB of inputs.
ASSUMED_OVERHEAD = (200_000, 100)


class Overhead:
    """Overhead of a request beyond its calibrated run, for all models alike.

    Taking it in, staging, answering, and that cores which had nothing to do are slower at first.
    """

    def __init__(self, base_ns: float = 0.0, ns_per_kib: float = 0.0) -> None:
        if base_ns < 0 or ns_per_kib < 0:
            raise ValueError(f"overhead {base_ns} ns + {ns_per_kib} ns/KiB is negative")
        self.base_ns = base_ns
        #: Per KiB of inputs.
        self.ns_per_kib = ns_per_kib

    def calibrate(self, samples: Sequence[tuple[int, int]]) -> None:
        """Fit to (input bytes, nanoseconds added) of lone requests.

        The median of each size counts; does nothing without samples.
        """
        by_size: dict[int, list[int]] = {}
        for input_bytes, added_ns in samples:
            by_size.setdefault(input_bytes, []).append(added_ns)
        if by_size:
            self.base_ns, self.ns_per_kib = fit_overhead(
                [(size, median(added)) for size, added in by_size.items()]
            )

    def at(self, input_bytes: float) -> float:
        """Return the nanoseconds for a request of that size."""
        return self.base_ns + self.ns_per_kib * input_bytes / 1024


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Estimate with all its parts, for people."""

    input_bytes: int
    output_bytes: int
    #: Tensors the forward pass makes, at their peak.
    activation_bytes: int
    #: What kernels' own memory adds to the peak.
    workspace_bytes: int
    peak_bytes: int
    reserve_bytes: int
    #: Layer and operation running at the peak; empty when unknown.
    peak_where: str
    run_ns: int
    #: 95th percentile of the run.
    run_high_ns: int
    solo_ns: int
    solo_high_ns: int
    #: Empty, or why the memory estimate is an upper bound only, or not even that.
    warning: str


class ModelEstimator:
    """Memory and time of one model, from its calibration and from what was seen since."""

    def __init__(
        self,
        calibration: Calibration,
        overhead: Overhead,
        slowdown: Slowdowns | None = None,
        *,
        safety: float = SAFETY_FACTOR,
    ) -> None:
        """Share `overhead` and `slowdown` with all models on the device."""
        if safety < 1.0:
            raise ValueError(f"the safety factor must be at least 1, got {safety}")
        self.calibration = calibration
        self.overhead = overhead
        self.safety = safety
        #: Raised when a run needed more than was reserved for it; never lowered.
        self.memory_scale = 1.0
        #: The same for runs that needed several times as much: what depends on content need not
        #: grow with the graph, and would refuse larger ones for nothing.
        self.memory_added_bytes = 0
        #: Runs that needed more than was reserved for them.
        self.underestimates = 0
        memory = calibration.memory
        #: Counts that shapes tell, and what they go on with where it pays to count graphs' sizes.
        self._own = len(memory.inputs.per)
        self.graphs = memory.graphs
        self.counts_graphs = bool(memory.graphs.of)
        # Inputs are live at every moment, so they can be added to every plane.
        self._planes = _raised(memory.activations, memory.inputs)
        self._held = _raised(memory.held, memory.inputs)
        loopless = memory.loopless
        #: Whether it is worth while to count a graph's self-loops.
        self.counts_loops = loopless is not None
        if loopless is not None:
            self._plain_planes = _raised(loopless.activations, memory.inputs)
            self._plain_held = _raised(loopless.held, memory.inputs)
            edge_bytes = memory.inputs.per[1]
            self._loop = loopless.loop_activations + edge_bytes
            self._loop_held = loopless.loop_held + edge_bytes
        mixed = memory.by_kind
        #: Whether it is worth while to count how many things are of each kind.
        self.counts_kinds = mixed is not None
        if mixed is not None:
            self._mixed_planes = _raised(mixed.activations, memory.inputs)
            self._mixed_held = _raised(mixed.held, memory.inputs)
        self.runs = Correction()
        #: By itself: runs are learned at any load, on cores that load keeps warm.
        self._solo = Correction()
        self._high = Quantile(min(calibration.time.high_ratio, _WIDEST_BAND))
        self._slowdown = slowdown or Slowdowns()

    def retime(self, time: TimeFit, busy_share: float = 0.0) -> None:
        """Estimate times anew from another calibration; what was learned of memory stays."""
        self.calibration = replace(self.calibration, time=time, busy_share=busy_share)
        self.runs, self._solo = Correction(), Correction()
        self._high = Quantile(min(time.high_ratio, _WIDEST_BAND))

    @property
    def time_factor(self) -> float:
        """Slowness of the machine now against calibration, over all sizes, as a factor."""
        return self.runs.factor

    def estimate(
        self,
        *counts: int,
        num_loops: int | None = None,
        narrow_edges: bool = False,
        by_kind: KindCounts | None = None,
    ) -> TaskEstimate:
        """Return peak memory, reservation, median run and solo time of one request.

        `counts` are its nodes and edges, or whatever the model counts, and what ``graphs.told``
        returns; without that all things are in one. `num_loops` of the edges are self-loops;
        None: any number may be. `narrow_edges`: they are staged as int32. `by_kind`: its things of
        each kind; None: all may be of one.
        """
        return TaskEstimate(
            *self.memory(
                *counts,
                num_loops=num_loops,
                narrow_edges=narrow_edges,
                by_kind=by_kind,
            ),
            *self.times(*counts),
        )

    def memory(
        self,
        *counts: int,
        num_loops: int | None = None,
        narrow_edges: bool = False,
        by_kind: KindCounts | None = None,
    ) -> tuple[Bytes, Bytes]:
        """Return its peak and its reservation, in bytes."""
        content = num_loops, by_kind
        peak = self._peak(counts, content)
        need = self._need(counts, content, peak)
        spared = NARROW_EDGE_SPARES_BYTES * counts[1] if narrow_edges else 0
        reserve = _with_margin(need - spared, self.safety) + self.output_bytes(*counts)
        return Bytes(peak - spared), align_bytes(reserve)

    def times(self, *counts: int) -> tuple[Nanos, Nanos]:
        """Return its median run and solo time, in ns."""
        fitted = self.fitted_ns(*counts)
        run = max(1, ceil(self.runs.at(fitted)))
        solo = ceil(self._solo.at(fitted + self._overhead_ns(counts)))
        return Nanos(run), Nanos(max(run, solo))

    def union(self, sizes: Sequence[tuple[int, ...]]) -> TaskEstimate:
        """Return the estimate of one run over the disjoint union of graphs with these counts.

        Joining takes time, and what was staged for the requests is held beside the joined copy.
        """
        counts = self.graphs.joined(sizes, self._own)
        whole = self.estimate(*counts)
        staged = self.input_bytes(*counts) + _PLACES_BYTES * len(sizes)
        if self.calibration.memory.curve is not None:
            # Graphs of different density have more paths than one graph with all their edges.
            alone = [self.memory(*one) for one in sizes]
            peak, reserve = (sum(one) for one in zip(*alone, strict=True))
            whole = TaskEstimate(
                Bytes(max(whole.peak_bytes, peak)),
                Bytes(max(whole.reserve_bytes, reserve)),
                whole.run_ns,
                whole.solo_ns,
            )
        joining = _joining_ns(len(sizes), self.input_bytes(*counts))
        return TaskEstimate(
            Bytes(whole.peak_bytes + staged),
            align_bytes(whole.reserve_bytes + staged),
            Nanos(whole.run_ns + joining),
            Nanos(whole.solo_ns + joining),
        )

    def observe_union(
        self,
        sizes: Sequence[tuple[int, ...]],
        run_ns: int,
        peak_bytes: int | None = None,
        held_bytes: int | None = None,
        beside: float = 0.0,
        num_loops: int | None = None,
        by_kind: KindCounts | None = None,
        jobs: float = 0.0,
    ) -> None:
        """Learn from a finished run over one request or several.

        `peak_bytes` and `held_bytes` count the inputs once: staged, or joined. `num_loops` and
        `by_kind` as the run was estimated; `beside` and `jobs` as for `observe_run`.
        """
        counts = self.graphs.joined(sizes, self._own)
        if len(sizes) > 1:
            run_ns -= _joining_ns(len(sizes), self.input_bytes(*counts))
        self.observe_run(counts, run_ns, peak_bytes, held_bytes, beside, num_loops, by_kind, jobs)

    def fitted_ns(self, *counts: int) -> float:
        """Run time as calibrated, before anything was learned since; at least 1."""
        return max(1.0, self.calibration.time.at(*self._terms(counts)))

    def run_ns(self, *counts: int, beside: float = 0.0) -> int:
        """Return the median run time beside `beside` others, averaged over the run, in ns."""
        run, _ = self.times(*counts)
        return ceil(run * self._slowdown.factor(beside))

    def output_bytes(self, *counts: int) -> int:
        """Return the most bytes that the answer can take."""
        return ceil(self.calibration.memory.output.at(*counts[: self._own]))

    def input_bytes(self, *counts: int) -> int:
        """Return the bytes of the staged inputs, with edges as int64."""
        return ceil(self.calibration.memory.inputs.at(*counts[: self._own]))

    def describe(self, *counts: int) -> Breakdown:
        """Return the estimate with its parts and bands."""
        memory = self.calibration.memory
        estimate = self.estimate(*counts)
        at = self._of_planes(self._terms(counts))
        top = max(memory.activations, key=lambda plane: plane.at(*at), default=None)
        inputs, peak = self.input_bytes(*counts), estimate.peak_bytes
        run_high = ceil(estimate.run_ns * self._high.value)
        return Breakdown(
            input_bytes=inputs,
            output_bytes=self.output_bytes(*counts),
            activation_bytes=max(0, peak - inputs),
            workspace_bytes=self._need(counts, _UNKNOWN, peak) - peak,
            peak_bytes=peak,
            reserve_bytes=estimate.reserve_bytes,
            peak_where=top.where if top is not None else "",
            run_ns=estimate.run_ns,
            run_high_ns=run_high,
            solo_ns=estimate.solo_ns,
            solo_high_ns=estimate.solo_ns + run_high - estimate.run_ns,
            warning=memory.warning,
        )

    def observe_run(
        self,
        counts: tuple[int, ...],
        run_ns: int,
        peak_bytes: int | None = None,
        held_bytes: int | None = None,
        beside: float = 0.0,
        num_loops: int | None = None,
        by_kind: KindCounts | None = None,
        jobs: float = 0.0,
    ) -> None:
        """Learn from a finished run over one graph.

        `peak_bytes` counts what `TaskEstimate.peak_bytes` counts: staged inputs and the tensors of
        the forward pass, its output among them. `held_bytes` is that with what kernels took
        besides. None when it was not measured. `beside`: others that executed beside it, on
        average; `jobs`: training jobs that did.
        """
        if peak_bytes is not None:
            self._observe_peak(counts, (num_loops, by_kind), peak_bytes, held_bytes or peak_bytes)
        if run_ns <= 0:
            return  # suspended before its lane began it: what it took is not known
        fitted = self.fitted_ns(*counts)
        ratio = run_ns / self.runs.at(fitted)
        if jobs == 0:  # where jobs always train, nothing tells their doing from the machine's
            self.runs.observe(run_ns, fitted, self._slowdown.factor(beside))
        if beside == 0 and jobs == 0:
            self._high.observe(ratio)
        else:
            self._slowdown.observe(beside, jobs, ratio)

    def observe_solo(self, counts: tuple[int, ...], solo_ns: int) -> None:
        """Learn from a request that came to an idle server and stayed alone, start to end."""
        calibrated = self.fitted_ns(*counts) + self._overhead_ns(counts)
        self._solo.observe(max(1, solo_ns), calibrated)

    def observe_typical(self, counts: tuple[int, ...], run_ns: int, solo_ns: int) -> None:
        """Learn from what lone requests of one size took, in the middle of several.

        They say nothing of how runs scatter.
        """
        self.runs.observe(max(1, run_ns), self.fitted_ns(*counts))
        self.observe_solo(counts, solo_ns)

    def _peak(self, counts: tuple[int, ...], content: _Content) -> int:
        """Staged inputs and tensors."""
        num_loops, by_kind = content
        terms = self._terms(counts)
        counts = self._of_planes(terms)
        peak = _highest(self._planes, counts)
        if by_kind is not None and self.counts_kinds:
            peak = min(peak, _highest(self._mixed_planes, counts + by_kind.firsts + by_kind.others))
        if num_loops is not None and self.counts_loops:
            others = _highest(self._plain_planes, (counts[0], counts[1] - num_loops))
            peak = min(peak, others + self._loop * num_loops)
        curve = self.calibration.memory.curve
        if curve is not None:
            staged = self.calibration.memory.inputs.at(*counts[: self._own])
            peak = max(peak, staged + curve.at(*terms))
        return ceil(peak * self.memory_scale) + self.memory_added_bytes

    def _need(self, counts: tuple[int, ...], content: _Content, peak: int) -> int:
        """Return the need with what kernels take besides."""
        num_loops, by_kind = content
        counts = self._of_planes(self._terms(counts))
        held = _highest(self._held, counts)
        if by_kind is not None and self.counts_kinds:
            held = min(held, _highest(self._mixed_held, counts + by_kind.most))
        if num_loops is not None and self.counts_loops:
            others = _highest(self._plain_held, (counts[0], counts[1] - num_loops))
            held = min(held, others + self._loop_held * num_loops)
        return max(peak, ceil(held * self.memory_scale) + self.memory_added_bytes)

    def _observe_peak(
        self,
        counts: tuple[int, ...],
        content: _Content,
        peak_bytes: int,
        held_bytes: int,
    ) -> None:
        peak = self._peak(counts, content)
        need = self._need(counts, content, peak)
        # The answer's place, reserved besides, is not the run's to use.
        above = self.safety
        if peak_bytes <= _with_margin(peak, above) and held_bytes <= _with_margin(need, above):
            return
        self.underestimates += 1
        added = min(self.memory_added_bytes, peak - 1)  # an empty graph may need nothing
        scale = max((peak_bytes - added) / (peak - added), (held_bytes - added) / (need - added))
        if scale <= _LARGEST_SCALE:
            self.memory_scale *= scale
        else:
            self.memory_added_bytes += max(peak_bytes - peak, held_bytes - need)

    def _overhead_ns(self, counts: tuple[int, ...]) -> float:
        return self.overhead.at(self.calibration.memory.inputs.at(*counts[: self._own]))

    def _terms(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        return self.graphs.terms(counts, self._own)

    def _of_planes(self, terms: tuple[int, ...]) -> tuple[int, ...]:
        """Return the terms that planes have coefficients for."""
        return terms if self.graphs.padded else terms[: self._own]


def _joining_ns(requests: int, joined_bytes: int) -> int:
    """Return what joining so many requests takes, with inputs of that size together."""
    return ceil(_JOIN_NS + _JOIN_NS_PER_REQUEST * requests + joined_bytes * _JOIN_NS_PER_BYTE)


def _with_margin(need: int, safety: float) -> int:
    return max(ceil(need * safety), need + _SAFETY_BYTES)


def _raised(planes: Sequence[Linear], by: Linear) -> _Planes:
    """Return constant and coefficients of each plane plus `by`; of `by` alone without planes.

    Planes may have further coefficients than `by`.
    """
    none = Linear((0.0,) * len(by.per), 0.0)
    rows = tuple(
        (p.constant + by.constant, *map(sum, zip_longest(p.per, by.per, fillvalue=0.0)))
        for p in planes or [none]
    )
    return rows if len(rows[0]) == 3 or len(rows) < _MANY_PLANES else np.array(rows)


def _highest(planes: _Planes, counts: tuple[int, ...]) -> float:
    """Return the largest value of any of them, at least 0."""
    highest = 0.0
    if len(counts) == 2 and isinstance(planes, tuple):
        num_nodes, num_edges = counts
        for constant, nodes, edges in planes:
            value = nodes * num_nodes + edges * num_edges + constant
            if value > highest:
                highest = value
        return highest
    if isinstance(planes, tuple):
        for constant, *per in planes:
            highest = max(highest, constant + sum(map(mul, per, counts)))
        return highest
    return max(0.0, float((planes @ (1, *counts)).max()))
