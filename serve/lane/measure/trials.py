"""Graphs that a model is tried on to measure its memory, and traces of its runs on them."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from serve.estimate.memory import SLACK_SHARE, MemoryTrace
from serve.lane.measure.allocator import TooLarge
from serve.lane.measure.probe import ModelProbe, Need
from serve.lane.measure.probe_graphs import Shape, Structure

Found = TypeVar("Found")
#: Nodes and edges of traced graphs. Both vary independently, from sparse to dense.
TRACED = ((60, 150), (60, 600), (90, 150), (130, 900), (200, 400), (60, 40), (200, 120))
#: Larger sizes, for models that switch to other kernels as graphs grow.
TRACED_LARGE = tuple((8 * nodes, 8 * edges) for nodes, edges in TRACED)
#: Further sizes for models whose memory is not linear: from tiny to large, sparse to dense.
TRACED_CURVED = (
    *((8, 8), (10, 60), (10, 300), (20, 150), (30, 60), (30, 600), (60, 3_000), (100, 1_000)),
    *((100, 6_000), (300, 200), (300, 4_000), (300, 20_000), (1_000, 500), (1_000, 3_000)),
    *((1_000, 30_000), (2_000, 8_000), (6_000, 3_000), (6_000, 18_000)),
)
#: Upper bound of a graph that is only traced.
TRACED_BYTES = 256 << 20
#: The smallest graphs: timed, and left where a larger one takes too much.
SMALLEST_NODES = 16


def unless_refused(
    probe: ModelProbe, measure: Callable[[], Found], size: tuple[int, ...], shape: Structure
) -> Found | None:
    """Measure; returns None when the model refuses a graph that is odd or has isolated nodes.

    Raises what the model raises for a plain graph with an edge per node or more, and TooLarge.
    """
    try:
        probe.attempt(size, shape)
        return measure()
    except TooLarge:
        raise
    except Exception:
        num_nodes, num_edges = probe.totals(size)
        if shape is Shape.PLAIN and num_edges >= num_nodes:
            raise
        return None


def trace_or_none(probe: ModelProbe, size: tuple[int, ...], shape: Structure) -> MemoryTrace | None:
    """Trace such a graph; returns None when it is refused or takes too much memory."""
    try:
        return unless_refused(probe, lambda: probe.trace(size, shape), size, shape)
    except TooLarge:
        return None


def above_estimate(
    probe: ModelProbe,
    size: tuple[int, ...],
    shape: Structure,
    ratio: Callable[[MemoryTrace], float],
) -> str:
    """Return how far above its estimate such a graph is; empty where it is not."""
    try:
        found = unless_refused(probe, lambda: probe.trace(size, shape), size, shape)
    except TooLarge:
        return "more than may be measured, far above"
    if found is None or ratio(found) >= 1 - SLACK_SHARE:
        return ""
    return f"{1 / ratio(found):.1f} times"


def traces(
    probe: ModelProbe, sizes: Iterable[tuple[int, ...]], shape: Structure = Shape.PLAIN
) -> list[MemoryTrace]:
    """Trace graphs of these sizes, but those that are refused or take too much memory."""
    found = (trace_or_none(probe, size, shape) for size in sizes)
    return [trace for trace in found if trace is not None]


def shrunk(size: tuple[int, ...], need: Need, limit_bytes: int) -> tuple[int, ...]:
    """Return `size`, or a smaller one of the same ratios that needs at most `limit_bytes`.

    It has at least 16 nodes, or 16 of the first kind of them.
    """
    while size[0] > SMALLEST_NODES and need(*size) > limit_bytes:
        size = scaled(size, 7 / 8)
    return size


def scaled(size: tuple[int, ...], factor: float) -> tuple[int, ...]:
    """Return fewer of all counts; where there was one of something, there still is."""
    return tuple(max(min(count, 1), int(count * factor)) for count in size)
