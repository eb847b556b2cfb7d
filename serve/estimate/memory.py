"""Peak memory as a convex function of graph size, read off traced forward passes.

Live bytes at each moment of a forward pass are linear in (N, E, 1), so the peak is the largest
of a few planes: max_i (a_i · N + b_i · E + c_i). Passes over graphs of different size go through
the same moments; lined up, each moment gives one plane by least squares, and only planes that
are highest somewhere are kept.

A pass may take another branch on some graphs, and then has other moments: each branch that was
seen often enough is fitted by itself. What cannot be explained so is reported, not hidden.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from serve.estimate.calibration import Curve, Linear
from serve.estimate.solve import Floats, nonnegative

#: Allocators round sizes up by a constant; this much per pass is not a deviation.
SLACK_BYTES = 8192
#: Nor is this share of the peak.
SLACK_SHARE = 0.005
#: What a curve fitted to peaks is raised by, since nothing explains it.
_CURVE_MARGIN = 1.1


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """Allocations (positive) and frees (negative) of one forward pass, in bytes, in order."""

    num_nodes: int
    num_edges: int
    sizes: tuple[int, ...]
    #: Layer and operation running at each.
    labels: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once."""
        return max(accumulate(self.sizes), default=0)

    @property
    def branch(self) -> tuple[tuple[bool, str], ...]:
        """Key that two passes must share to be lined up moment by moment."""
        return tuple((size > 0, label) for size, label in zip(self.sizes, self.labels, strict=True))


def fit_planes(traces: Sequence[MemoryTrace]) -> tuple[tuple[Linear, ...], str]:
    """Planes over every trace, and what is wrong with them: empty when all moments are linear."""
    branches: dict[tuple[tuple[bool, str], ...], list[MemoryTrace]] = {}
    for trace in traces:
        branches.setdefault(trace.branch, []).append(trace)
    planes: list[Linear] = []
    problem = ""
    for members in branches.values():
        sizes = _sizes(members)
        if len(members) < 4 or np.linalg.matrix_rank(sizes) < 3:
            continue
        fitted, linear = _fit_branch(members, sizes)
        planes += fitted
        if not linear:
            problem = "live bytes are not linear in nodes and edges"
    hull = upper_hull(planes)
    for trace in traces:
        if trace.peak_bytes > _allowed(peak_at(hull, trace.num_nodes, trace.num_edges)):
            problem = problem or "the order of allocations changes from graph to graph"
    return hull, problem


def _fit_branch(members: Sequence[MemoryTrace], sizes: Floats) -> tuple[list[Linear], bool]:
    """Fit a plane per local maximum of live bytes, covering all; say if they are linear."""
    live = np.cumsum(np.array([trace.sizes for trace in members], dtype=np.float64), axis=1)
    grows = [size > 0 for size in members[0].sizes] + [False]
    moments = [i for i in range(live.shape[1]) if grows[i] and not grows[i + 1]]
    if not moments:
        return [], True
    live = live[:, moments]
    planes = np.linalg.lstsq(sizes, live, rcond=None)[0]
    slack = np.maximum(SLACK_BYTES, SLACK_SHARE * live.max(axis=1))[:, None]
    # Coefficients are whole bytes but for rounding in the allocator; take them if they explain
    # the measurements as well.
    whole = planes.copy()
    whole[:2] = np.rint(whole[:2])
    whole[2] = (live - sizes[:, :2] @ whole[:2]).max(axis=0, initial=-math.inf)
    fits = (np.abs(live - sizes @ whole) <= slack).all(axis=0)
    planes = np.where(fits, whole, planes)
    # Fewer bytes for a larger graph cannot be relied on.
    planes[:2] = planes[:2].clip(min=0.0)
    residual = live - sizes @ planes
    planes[2] += residual.max(axis=0, initial=-math.inf)
    # Only moments that matter somewhere can make the model nonlinear.
    matter = (live >= 0.5 * live.max(axis=1, keepdims=True)).any(axis=0)
    linear = bool((residual.max(axis=0) - residual.min(axis=0) <= 2 * slack.min())[matter].all())
    labels = members[0].labels
    return [
        Linear(float(a), float(b), float(c), labels[moment])
        for moment, (a, b, c) in zip(moments, planes.T, strict=True)
    ], linear


def upper_hull(planes: Iterable[Linear]) -> tuple[Linear, ...]:
    """Return the planes that are highest for some N, E >= 0; others never decide a maximum."""
    # The label decides which of equals stays: the same every time.
    kept = sorted(set(planes), key=lambda p: (-p.edges, -p.nodes, -p.constant, p.where))
    for plane in tuple(kept):
        others = [other for other in kept if other is not plane]
        if others and not _rises_above(plane, others):
            kept = others
    return tuple(kept)


def _rises_above(plane: Linear, others: Sequence[Linear]) -> bool:
    """Return True when `plane` is above all `others` for some direction (N, E, 1).

    Cuts the triangle down, one other after the next, to where the plane is higher.
    """
    corners = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]
    for other in others:
        by = (plane.nodes - other.nodes, plane.edges - other.edges, plane.constant - other.constant)
        heights = [sum(d * c for d, c in zip(by, corner, strict=True)) for corner in corners]
        if max(heights) <= 1e-9 * (1.0 + abs(plane.nodes) + abs(plane.edges)):
            return False
        cut: list[tuple[float, float, float]] = []
        for i, (corner, height) in enumerate(zip(corners, heights, strict=True)):
            after, rise = corners[i - 1], heights[i - 1]
            if (height > 0) != (rise > 0):
                share = height / (height - rise)
                cut.append(
                    (
                        corner[0] + share * (after[0] - corner[0]),
                        corner[1] + share * (after[1] - corner[1]),
                        corner[2] + share * (after[2] - corner[2]),
                    )
                )
            if height > 0:
                cut.append(corner)
        corners = cut
    return True


def peak_at(planes: Sequence[Linear], num_nodes: int, num_edges: int) -> float:
    """Return the value of the highest plane, 0 when there are none."""
    return max((plane.at(num_nodes, num_edges) for plane in planes), default=0.0)


def covers(estimate_bytes: float, measured_bytes: int) -> bool:
    """Return True when a measured peak is within an estimate, but for rounding."""
    return measured_bytes <= _allowed(estimate_bytes)


def _allowed(estimate_bytes: float) -> float:
    return estimate_bytes + max(SLACK_BYTES, SLACK_SHARE * estimate_bytes)


def fit_curve(peaks: Sequence[tuple[int, int, int]]) -> Curve:
    """Fit a quadratic to (nodes, edges, peak bytes), at least 10 % above each of them."""
    n, e, peak = np.array(peaks, dtype=np.float64).T
    terms = np.stack([np.ones_like(n), n, e, n * n, n * e, e * e], axis=1)
    weight = 1.0 / np.maximum(peak, 1.0)
    found = nonnegative(terms * weight[:, None], np.ones_like(peak))
    raise_by = _CURVE_MARGIN * float((peak / np.maximum(terms @ found, 1.0)).max())
    return Curve(*(float(value) * raise_by for value in found))


def fit_held(samples: Sequence[tuple[int, int, int]]) -> tuple[Linear, ...]:
    """Planes through the origin on or above measured (nodes, edges, bytes held at the peak).

    As the largest of several linear functions, what is held is convex. So between two samples it
    lies below the plane through both, whatever moments make it up, and the highest of the planes
    through neighbours is a bound for every graph whose edges per node lie within the samples'.
    """
    most: dict[tuple[int, int], int] = {}
    for n, e, held in samples:
        most[n, e] = max(held, most.get((n, e), 0))
    by_ratio = sorted(((*size, held) for size, held in most.items()), key=lambda s: s[1] / s[0])
    planes = []
    for (n, e, held), (m, f, more) in pairwise(by_ratio):
        area = n * f - m * e
        if area == 0:
            continue
        nodes, edges = (held * f - more * e) / area, (more * n - held * m) / area
        # Fewer bytes for a larger graph cannot be relied on.
        nodes, edges = max(nodes, 0.0), max(edges, 0.0)
        fitted = nodes * n + edges * e, nodes * m + edges * f
        raise_by = max([1.0, *(a / b for a, b in zip((held, more), fitted, strict=True) if b > 0)])
        planes.append(Linear(nodes * raise_by, edges * raise_by, 0.0))
    return upper_hull(planes)


def _sizes(traces: Sequence[MemoryTrace]) -> Floats:
    return np.array([(t.num_nodes, t.num_edges, 1) for t in traces], dtype=np.float64)
