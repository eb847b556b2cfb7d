"""Peak memory as a convex function of graph size, read off traced forward passes.

Live bytes at each moment of a forward pass are linear in the counts of nodes N and edges E, so the
peak is the largest of a few planes: max_i (a_i · N + b_i · E + c_i). A model that declares its
inputs may count more than two things; the planes then have a coefficient for each. Passes over
graphs of different size go through the same moments; lined up, each moment gives one plane by least
squares, and only planes that are highest somewhere are kept.

A pass may take another branch on some graphs, and then has other moments: each branch that was
seen often enough is fitted by itself. What cannot be explained so is reported, not hidden.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import TypeVar

import numpy as np

from serve.estimate.calibration import Curve, Linear, terms
from serve.estimate.solve import Floats, nonnegative

Number = TypeVar("Number", int, float)

#: Allocators round sizes up by a constant; this much per pass is not a deviation.
SLACK_BYTES = 8192
#: Nor is this share of the peak.
SLACK_SHARE = 0.005
#: What a curve fitted to peaks is raised by, since nothing explains it.
_CURVE_MARGIN = 1.2
#: Times that it is fitted.
_CURVE_ROUNDS = 60
#: Most places that are looked at for the corners of the polytope of planes.
_MOST_CORNERS = 200_000


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """Allocations (positive) and frees (negative) of one forward pass, in bytes, in order."""

    #: Of nodes and edges, or of whatever the model counts.
    counts: tuple[int, ...]
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


@dataclass(frozen=True, slots=True)
class KindColumns:
    """Counts of the things of each kind, from a place on among a trace's counts."""

    at: int
    #: Place of the count of these things of all kinds.
    of: int
    num_kinds: int

    def of_each(self, values: Sequence[Number]) -> Sequence[Number]:
        """Return those of `values` that are of each kind."""
        return values[self.at : self.at + self.num_kinds]


def fit_planes(
    traces: Sequence[MemoryTrace], kinds: Sequence[KindColumns] = ()
) -> tuple[tuple[Linear, ...], str]:
    """Planes over every trace, and what is wrong with them: empty when all moments are linear.

    Where the last counts are of `kinds`, planes have two coefficients for each of these instead:
    for things of the first kind, and for those of the most common other kind.
    """
    branches: dict[tuple[tuple[bool, str], ...], list[MemoryTrace]] = {}
    for trace in traces:
        branches.setdefault(trace.branch, []).append(trace)
    planes: list[Linear] = []
    problem = ""
    for members in branches.values():
        sizes = _sizes(members, kinds)
        if len(members) <= sizes.shape[1] or np.linalg.matrix_rank(sizes) < sizes.shape[1]:
            continue
        fitted, linear = _fit_branch(members, sizes, kinds)
        planes += fitted
        if not linear:
            problem = "live bytes are not linear in the graph's size"
    hull = upper_hull(_by_most_common(plane, kinds) for plane in planes)
    for trace in traces:
        if trace.peak_bytes > _allowed(peak_at(hull, *_known(trace.counts, kinds))):
            problem = problem or "the order of allocations changes from graph to graph"
    return hull, problem


def _known(counts: tuple[int, ...], kinds: Sequence[KindColumns]) -> tuple[int, ...]:
    """Return counts as planes take them."""
    each = [kind.of_each(counts) for kind in kinds]
    own = counts[: kinds[0].at] if kinds else counts
    return (*own, *(of[0] for of in each), *(max(of[1:]) for of in each))


def _by_most_common(plane: Linear, kinds: Sequence[KindColumns]) -> Linear:
    """Return the plane with coefficients for the first and for the most common other kind.

    What a thing of any kind takes at least is taken for all things. The rest of each other kind is
    at most that of as many things as there are of the most common one.
    """
    if not kinds:
        return plane
    per, firsts, others = list(plane.per[: kinds[0].at]), [], []
    for kind in kinds:
        first, *rest = kind.of_each(plane.per)
        least = min(first, *rest)
        per[kind.of] = least
        firsts.append(first - least)
        others.append(sum(rest) - len(rest) * least)
    return Linear((*per, *firsts, *others), plane.constant, plane.where)


def _fit_branch(
    members: Sequence[MemoryTrace], sizes: Floats, kinds: Sequence[KindColumns]
) -> tuple[list[Linear], bool]:
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
    whole[:-1] = np.rint(whole[:-1])
    whole[-1] = (live - sizes[:, :-1] @ whole[:-1]).max(axis=0, initial=-math.inf)
    fits = (np.abs(live - sizes @ whole) <= slack).all(axis=0)
    planes = np.where(fits, whole, planes)
    # Fewer bytes for a larger graph cannot be relied on.
    planes[:-1] = np.maximum(planes[:-1], 0.0)
    residual = live - sizes @ planes
    # Where the content decides too, others may lie as far above those seen as these lie apart.
    planes[-1] += 2 * residual.max(axis=0) - residual.min(axis=0)
    # Only moments that matter somewhere can make the model nonlinear.
    matter = (live >= 0.5 * live.max(axis=1, keepdims=True)).any(axis=0)
    linear = bool((residual.max(axis=0) - residual.min(axis=0) <= 2 * slack.min())[matter].all())
    # What counts by kind add up to takes nothing besides.
    for place in sorted(kind.of for kind in kinds):
        planes = np.insert(planes, place, 0.0, axis=0)
    labels = members[0].labels
    return [
        Linear(tuple(map(float, per)), float(constant), labels[moment])
        for moment, (*per, constant) in zip(moments, planes.T, strict=True)
    ], linear


def upper_hull(planes: Iterable[Linear]) -> tuple[Linear, ...]:
    """Return the planes that are highest for some counts >= 0; others never decide a maximum."""
    # The label decides which of equals stays: the same every time.
    kept = sorted(set(planes), key=lambda p: ([-a for a in p.per[::-1]], -p.constant, p.where))
    for plane in tuple(kept):
        others = [other for other in kept if other is not plane]
        if others and not _rises_above(plane, others):
            kept = others
    return tuple(kept)


def _rises_above(plane: Linear, others: Sequence[Linear]) -> bool:
    """Return True when `plane` is above all `others` for some counts >= 0.

    It is nowhere when a mean of the others, with some weights, is at least as high in every
    coefficient (Farkas): a system of equations with nonnegative unknowns, the weights and how much
    the mean lies above.
    """
    own = np.array([*plane.per, plane.constant])
    columns = np.array([(*other.per, other.constant) for other in others]).T
    if (columns >= own[:, None]).all(axis=0).any():
        return False
    scale = np.maximum(np.abs(columns).max(axis=1), 1e-12)
    above = -np.eye(len(own))
    weights = np.concatenate([np.ones(len(others)), np.zeros(len(own))])
    system = np.concatenate([np.hstack([columns / scale[:, None], above]), weights[None]])
    wanted = np.append(own / scale, 1.0)
    missed = system @ nonnegative(system, wanted) - wanted
    return bool(np.abs(missed).max() > 1e-9)


def peak_at(planes: Sequence[Linear], *counts: int) -> float:
    """Return the value of the highest plane, 0 when there are none."""
    return max((plane.at(*counts) for plane in planes), default=0.0)


def covers(estimate_bytes: float, measured_bytes: int) -> bool:
    """Return True when a measured peak is within an estimate, but for rounding."""
    return measured_bytes <= _allowed(estimate_bytes)


def _allowed(estimate_bytes: float) -> float:
    return estimate_bytes + max(SLACK_BYTES, SLACK_SHARE * estimate_bytes)


def fit_curve(peaks: Sequence[tuple[int, ...]], num_graph_terms: int = 0) -> Curve:
    """Fit a curve to (counts …, peak bytes), at least 20 % above each of them.

    The last `num_graph_terms` counts are those that ``GraphTerms`` adds. Of several peaks with the
    same counts the largest decides. Peaks that the curve is far below get more weight, until it is
    near all of them.
    """
    most: dict[tuple[int, ...], int] = {}
    for *at, held in peaks:
        most[tuple(at)] = max(held, most.get(tuple(at), 0))
    counts = np.array(list(most), dtype=np.float64).T
    own = len(counts) - num_graph_terms
    peak = np.maximum(1.0, np.array(list(most.values()), dtype=np.float64))
    summands = [np.ones_like(peak), *terms(list(counts[:own])), *counts[own:]]
    columns = np.stack(summands, axis=1) / peak[:, None]
    weight, best, best_above = np.ones_like(peak), np.zeros(columns.shape[1]), math.inf
    for _ in range(_CURVE_ROUNDS):
        found = nonnegative(columns * weight[:, None], weight)
        fitted = np.maximum(columns @ found, 1e-9)
        raise_by = _CURVE_MARGIN / float(fitted.min())
        above = float(np.log(fitted * raise_by).mean())
        if above < best_above:
            best, best_above = found * raise_by, above
        weight = weight / fitted.clip(0.2, 5.0)
        weight = (weight / weight.max()).clip(min=1e-3)
    constant, *per = best.tolist()
    last = len(per) - num_graph_terms
    return Curve(constant, tuple(per[:last]), tuple(per[last:]))


def raised_planes(
    planes: Sequence[Linear], samples: Sequence[tuple[int, ...]]
) -> tuple[Linear, ...]:
    """Return `planes` raised to cover measured (counts …, bytes held at the peak).

    What was held beyond them is fitted by one plane, which is added; a factor covers what is left.
    """
    held = np.array([sample[-1] for sample in samples], dtype=np.float64)
    sizes = np.array([(*sample[:-1], 1) for sample in samples], dtype=np.float64)
    known = np.array([peak_at(planes, *sample[:-1]) for sample in samples])
    beyond = np.maximum(held - known, 0.0)
    added = nonnegative(sizes / held[:, None], beyond / held)
    covered = known + sizes @ added
    factor = max(1.0, float((held / np.maximum(covered, 1.0)).max()))
    return tuple(
        Linear(
            tuple(
                factor * (own + more)
                for own, more in zip(plane.per, added[:-1].tolist(), strict=True)
            ),
            factor * (plane.constant + float(added[-1])),
            plane.where,
        )
        for plane in planes
    )


def fit_held(samples: Sequence[tuple[int, ...]]) -> tuple[Linear, ...]:
    """Planes through the origin on or above measured (counts …, bytes held at the peak)."""
    if samples and len(samples[0]) != 3:
        return _fit_held_planes(samples)
    return _fit_held_edges([(n, e, held) for n, e, held in samples])


def _fit_held_planes(samples: Sequence[tuple[int, ...]]) -> tuple[Linear, ...]:
    """Fit planes to what is held for several counts.

    As the largest of several linear functions of the counts, what is held for a sum of graphs is at
    most the sum of what is held for each. So what is held for any counts c is at most the smallest
    Σ w·held over samples whose weighted sum is at least c. By duality that is the largest p · c
    over all planes p >= 0 through the origin that lie below no sample's held bytes: over the
    corners of that polytope.
    """
    most: dict[tuple[int, ...], int] = {}
    for *counts, found in samples:
        most[tuple(counts)] = max(found, most.get(tuple(counts), 0))
    sizes = np.array(list(most), dtype=np.float64)
    held = np.maximum(1.0, np.array(list(most.values()), dtype=np.float64))
    # Coefficients in units in which all numbers are about 1.
    unit = held.max() / sizes.max(axis=0, initial=1.0)
    # Rows of `rules` @ plane <= `limits`: at each sample, and nonnegative coefficients.
    count = sizes.shape[1]
    rules = np.concatenate([sizes * unit / held[:, None], -np.eye(count)])
    limits = np.concatenate([np.ones(len(held)), np.zeros(count)])
    if math.comb(len(limits), count) > _MOST_CORNERS:
        return _one_plane(sizes, held)
    met = np.array(list(combinations(range(len(limits)), count)))
    met = met[np.abs(np.linalg.det(rules[met])) > 1e-12]
    corners = np.linalg.solve(rules[met], limits[met][:, :, None])[:, :, 0]
    corners = corners[(corners @ rules.T <= limits + 1e-9).all(axis=1)].clip(min=0.0)
    kept = np.unique((corners * unit).round(9), axis=0)
    # Samples that contradict each other are covered all the same.
    kept *= max(1.0, float((held / np.maximum((sizes @ kept.T).max(axis=1), 1e-9)).max()))
    return tuple(Linear(tuple(map(float, plane)), 0.0) for plane in kept)


def _one_plane(sizes: Floats, held: Floats) -> tuple[Linear, ...]:
    """Fit one plane on or above all samples, close to them where many things are counted."""
    weight = 1.0 / np.maximum(held, 1.0)
    found = nonnegative(sizes * weight[:, None], np.ones_like(held))
    fitted = sizes @ found
    raise_by = max(1.0, float((held / np.maximum(fitted, 1e-9))[fitted > 0].max(initial=1.0)))
    return (Linear(tuple(float(value) * raise_by for value in found), 0.0),)


def _fit_held_edges(samples: Sequence[tuple[int, int, int]]) -> tuple[Linear, ...]:
    """Fit planes to what is held for numbers of nodes and edges.

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
        planes.append(Linear((nodes * raise_by, edges * raise_by), 0.0))
    return upper_hull(planes)


def _sizes(traces: Sequence[MemoryTrace], kinds: Sequence[KindColumns]) -> Floats:
    """Return the counts of each trace and 1, without those that counts by kind add up to."""
    sums = {kind.of for kind in kinds}
    return np.array(
        [
            (*(count for place, count in enumerate(t.counts) if place not in sums), 1)
            for t in traces
        ],
        dtype=np.float64,
    )
