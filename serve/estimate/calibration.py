"""Measurements of one model on one executor and device: plain data, JSON on disk.

Memory is in bytes and time in ns, both as functions of a request's counts: its nodes N and edges
E, or whatever the model's declared inputs count (``serve.interface``). They never decrease in any
count, but for paths in a curve: more nodes with the same edges have fewer.
"""

from bisect import bisect_right
from collections.abc import Sequence
from operator import mul
from typing import Any

import msgspec

from serve.estimate.graph_sizes import COUNTS_ALONE, GraphTerms

#: Raise when what is stored, or how it is measured, changes; others on disk are then ignored.
FORMAT = 18
#: Share of the time of timing beyond which the machine counts as busy.
_BUSY_SHARE = 0.1


class Linear(msgspec.Struct, frozen=True):
    """A constant and so much for each thing counted."""

    #: For each count, in the model's order: N and E, unless it declares its inputs.
    per: tuple[float, ...]
    constant: float
    #: For a moment of the forward pass: the layer and operation running then.
    where: str = ""

    def at(self, *counts: int) -> float:
        """Return its value for a graph."""
        value = self.constant
        for each, count in zip(self.per, counts, strict=True):
            value += each * count
        return value


class Curve(msgspec.Struct, frozen=True):
    """Bytes of a model whose memory is not linear: a sum of terms of its counts, none negative.

    The terms are the counts, their products and, of a model with two counts, paths of two and of
    four edges, as in a product of adjacency matrices, which has at most N² entries.
    """

    constant: float
    #: For each of ``terms``.
    per: tuple[float, ...]
    #: For each of the terms that ``GraphTerms`` adds to the counts.
    per_graph_term: tuple[float, ...] = ()

    def at(self, *counts: int) -> float:
        """Return its value for a graph; `counts` go on with the terms of its graphs."""
        own = len(counts) - len(self.per_graph_term)
        value = self.constant
        for each, term in zip(self.per, terms(counts[:own]), strict=True):
            value += each * term
        for each, count in zip(self.per_graph_term, counts[own:], strict=True):
            value += each * count
        return value


def terms(counts: Sequence[Any]) -> list[Any]:
    """Return what a curve is a sum of, for counts that are numbers or arrays."""
    found = [*counts, *(one * other for i, one in enumerate(counts) for other in counts[i:])]
    if len(counts) == 2:
        nodes, edges = counts
        degree, square = edges / (nodes + 1e-9), nodes * nodes
        # Twice the lower of two numbers, or of two arrays. A sum would lose a square beside paths
        # of many more digits.
        found += [
            2 * (square * (square <= paths) + paths * (paths < square))
            for paths in (edges * degree, edges * degree**3)
        ]
    return found


class Ramp(msgspec.Struct, frozen=True):
    """A piecewise linear function from 0 at 0 that never decreases; the last piece goes on."""

    #: Where each piece starts, ascending, the first at 0.
    starts: tuple[float, ...]
    #: The function's value there.
    values: tuple[float, ...]
    #: Slope of each piece, at least 0.
    slopes: tuple[float, ...]

    def at(self, size: float) -> float:
        """Return its value at `size` >= 0."""
        piece = bisect_right(self.starts, size) - 1
        return self.values[piece] + self.slopes[piece] * (size - self.starts[piece])


class Loopless(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of graphs without self-loops, and what each loop adds at most.

    For models that drop loops, so that a loop costs them less than another edge.
    """

    #: As in `MemoryFit`.
    activations: tuple[Linear, ...]
    held: tuple[Linear, ...]
    #: Bytes a loop adds to either.
    loop_activations: float
    loop_held: float


class ByKind(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of graphs in which things were counted by kind, see ``KindCounts``."""

    #: As in `MemoryFit`, with a coefficient for each of ``KindCounts.firsts`` and then ``others``.
    activations: tuple[Linear, ...]
    #: With a coefficient for the most common kind of each.
    held: tuple[Linear, ...]


class MemoryFit(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a request needs at once, in three parts, whatever self-loops it has."""

    #: Tensors staged for the request, with edges as int64.
    inputs: Linear
    #: The most the answer can take.
    output: Linear
    #: Moments of the forward pass; its activations peak at the largest of them.
    activations: tuple[Linear, ...]
    #: Activations and what kernels take from the C library behind the tensor allocator's back:
    #: the largest counts. Empty when that was not measured.
    held: tuple[Linear, ...] = ()
    #: Less, for a graph whose loops were counted; None: loops take what other edges take.
    loopless: Loopless | None = None
    #: Less, for a graph whose things of each kind were counted; None: their mix decides nothing.
    by_kind: ByKind | None = None
    #: Set when the moments alone do not hold: the larger of the two counts, workspace included.
    curve: Curve | None = None
    #: What the curve is a function of besides counts; where graphs are padded, all planes too.
    graphs: GraphTerms = COUNTS_ALONE
    #: Relative errors on graphs not fitted to: estimate ÷ measured − 1, lowest and highest.
    error_low: float = 0.0
    error_high: float = 0.0
    #: Empty, or why the numbers are an upper bound only, or not even that.
    warning: str = ""


class TimeFit(msgspec.Struct, frozen=True, kw_only=True):
    """Median time of a forward pass: a constant, a ramp for each count, and products of counts."""

    constant_ns: float
    ramps: tuple[Ramp, ...]
    #: 95th percentile of measured ÷ fitted.
    high_ratio: float
    #: |fitted ÷ measured − 1| by cross-validation.
    error_median: float
    error_p95: float
    #: Graphs measured, and the largest of each count.
    samples: int
    largest: tuple[int, ...]
    #: For each of ``terms`` after the counts themselves; empty when the ramps suffice.
    products: tuple[float, ...] = ()
    #: For each of the terms that ``MemoryFit.graphs`` adds; empty when the rest suffices.
    per_graph_term: tuple[float, ...] = ()

    def at(self, *counts: int) -> float:
        """Return the nanoseconds for a graph; `counts` may go on with the terms of its graphs."""
        own = counts[: len(self.ramps)]
        value = self.constant_ns
        for ramp, count in zip(self.ramps, own, strict=True):
            value += ramp.at(count)
        if self.products:
            value += sum(map(mul, self.products, terms(own)[len(own) :]))
        if self.per_graph_term:
            value += sum(map(mul, self.per_graph_term, counts[len(own) :]))
        return value

    def times(self, factor: float) -> "TimeFit":
        """Return a fit of so many times as long."""
        ramps = tuple(
            msgspec.structs.replace(
                ramp,
                values=tuple(factor * value for value in ramp.values),
                slopes=tuple(factor * slope for slope in ramp.slopes),
            )
            for ramp in self.ramps
        )
        return msgspec.structs.replace(
            self,
            constant_ns=factor * self.constant_ns,
            ramps=ramps,
            products=tuple(factor * product for product in self.products),
            per_graph_term=tuple(factor * each for each in self.per_graph_term),
        )


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Calibration of a model on one executor, device and number of threads."""

    format: int = FORMAT
    #: `name:version`
    model: str
    executor: str
    device: str
    threads: int
    memory: MemoryFit
    time: TimeFit
    #: Why it is this executor, for people.
    executor_reason: str = ""
    #: Nodes and edges together up to which replaying a captured run gains; 0: never, or not tried.
    replay_most: int = 0
    #: Time that loading it took the calibrator; 0: not known.
    load_ns: int = 0
    #: Share of the time of timing in which others had the core.
    busy_share: float = 0.0
    #: A captured run may serve all graphs that are no larger than its own.
    replay_any_size: bool = False
    #: Threads of a GPU that gather a sample's features; 0: not measured.
    gather_threads: int = 0
    #: Why it serves those of its own sizes only, or why no run is captured; for people.
    replay_reason: str = ""

    def rough(self) -> "Calibration":
        """Return what is promised after a short calibration: times that rarely are too low.

        What 95 % of the timed runs did not exceed counts as usual. Memory stays, as a short
        calibration traces the same runs.
        """
        time = self.time.times(max(1.0, self.time.high_ratio))
        return msgspec.structs.replace(self, time=time)

    @property
    def warning(self) -> str:
        """Empty, or why the memory estimate is an upper bound only, or not even that."""
        return self.memory.warning

    @property
    def remarks(self) -> str:
        """Empty, or what to know: its warning, why PyG's own code runs it, a busy machine."""
        slow = self.executor == "eager" and self.executor_reason
        busy = f"the machine was busy: others had the core for {self.busy_share:.0%} of the time"
        found = (
            self.warning,
            f"runs as PyG wrote it: {slow}" if slow else "",
            busy if self.was_busy else "",
        )
        return "; ".join(filter(None, found))

    @property
    def was_busy(self) -> bool:
        """True when other programs took so much of the core that times may be wrong."""
        return self.busy_share > _BUSY_SHARE
