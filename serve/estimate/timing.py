"""Run time as a function of graph size: a constant and, for each count, a piecewise linear ramp.

A model whose work is not linear in its counts, as attention between all pairs, may get products of
counts besides.

Small graphs are all overhead, large ones fall out of the caches, so the cost of one more edge
is not the same everywhere; it is never negative, though, which keeps the fit monotone. Relative
errors count, and single disturbed measurements must not: weights 1 ÷ time, then reweighting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from serve.estimate.calibration import Ramp, TimeFit, terms
from serve.estimate.solve import Floats, nonnegative

#: Relative errors beyond this lose weight (Huber).
_ROBUST_AT = 0.08
_ROUNDS = 4
_FOLDS = 5


@dataclass(frozen=True, slots=True)
class Timed:
    """Measured forward passes over one graph."""

    #: Of nodes and edges, or of whatever the model counts; the terms of its graphs behind them.
    counts: tuple[int, ...]
    runs_ns: tuple[int, ...]

    @property
    def median_ns(self) -> float:
        """Median of the runs."""
        return float(np.median(self.runs_ns))


def fit_time(
    samples: Sequence[Timed], *, products: bool = False, num_graph_terms: int = 0
) -> TimeFit:
    """Fit at least four samples; the number of pieces is the one that predicts best.

    With `products`, these are tried too: of the counts, and paths, as in a curve of memory. So are
    the last `num_graph_terms` counts, those that ``GraphTerms`` adds.
    """
    counts = np.array([s.counts for s in samples], dtype=np.float64).T
    sizes, of_graphs = np.split(counts, [len(counts) - num_graph_terms])
    t = np.array([s.median_ns for s in samples], dtype=np.float64)
    # Folds go through sizes in order, so that each holds out small, middle and large graphs.
    fold = np.empty(len(t), dtype=np.int64)
    fold[np.argsort(sizes.sum(axis=0), kind="stable")] = np.arange(len(t)) % _FOLDS
    none = np.empty((len(t), 0))
    crossed = np.stack(terms(list(sizes))[len(sizes) :], axis=1) if products else none
    best: tuple[float, int, Floats, Floats, Floats] | None = None
    choices = (
        (none, crossed) if products else (none,),
        (none, of_graphs.T) if num_graph_terms else (none,),
    )
    for pieces, of_products, by_graphs in product((1, 2, 3, 4, 5, 6), *choices):
        extra = np.hstack([of_products, by_graphs])
        if len(sizes) * pieces + extra.shape[1] + 1 > len(t) * (1 - 1 / _FOLDS):
            continue
        error = np.empty_like(t)
        starts = [_starts(of_one, pieces) for of_one in sizes]
        columns = np.hstack([_columns(sizes, starts), extra])
        for k in range(_FOLDS):
            out = fold == k
            weights = _solve(columns[~out], t[~out])
            error[out] = np.abs(columns[out] @ weights / t[out] - 1)
        score = float(np.median(error) + 0.3 * np.quantile(error, 0.95))
        if best is None or score < best[0]:
            best = score, pieces, of_products, by_graphs, error
    if best is None:
        least = math.ceil((len(sizes) + 1) / (1 - 1 / _FOLDS))
        raise ValueError(f"a time model needs at least {least} samples, got {len(samples)}")
    _, pieces, of_products, by_graphs, error = best
    starts = [_starts(of_one, pieces) for of_one in sizes]
    parts = [_columns(sizes, starts), of_products, by_graphs]
    columns = np.hstack(parts)
    weights = _solve(columns, t)
    fitted = columns @ weights
    ends = np.cumsum([part.shape[1] for part in parts])
    weights, per_product, per_graph_term = np.split(weights, ends[:-1])
    runs = np.concatenate([np.array(s.runs_ns) / f for s, f in zip(samples, fitted, strict=True)])
    slopes = np.split(weights[1:], np.cumsum([len(each) for each in starts])[:-1])
    return TimeFit(
        constant_ns=float(weights[0]),
        ramps=tuple(map(_ramp, starts, slopes)),
        high_ratio=max(1.0, float(np.quantile(runs, 0.95))),
        error_median=float(np.median(error)),
        error_p95=float(np.quantile(error, 0.95)),
        samples=len(samples),
        largest=tuple(int(of_one.max()) for of_one in sizes),
        products=tuple(float(each) for each in per_product),
        per_graph_term=tuple(float(each) for each in per_graph_term),
    )


def fit_overhead(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit (ns, ns per KiB), neither negative, to (bytes, ns) by relative errors."""
    added = np.array([max(1.0, ns) for _, ns in samples], dtype=np.float64)
    kib = np.array([size / 1024 for size, _ in samples], dtype=np.float64)
    columns = np.stack([np.ones_like(kib), kib], axis=1)
    base_ns, ns_per_kib = nonnegative(columns / added[:, None], np.ones_like(added))
    return float(base_ns), float(ns_per_kib)


def _starts(sizes: Floats, pieces: int) -> Floats:
    """Return the starts of the pieces: 0, then evenly in the logarithm.

    The first bend comes after the smallest fifth, where overhead rules; the last well before the
    largest, so that several sizes say how it goes on.
    """
    low, high = np.quantile(sizes, 0.2), 0.3 * sizes.max()
    if pieces == 1 or not 0 < low < high:
        return np.zeros(1)
    bends = np.geomspace(low, high, pieces - 1) if pieces > 2 else np.array([np.sqrt(low * high)])
    return np.concatenate([[0.0], np.unique(np.rint(bends))])


def _columns(sizes: Floats, starts: Sequence[Floats]) -> Floats:
    """Return a column for the constant and one per piece: the part of the size that lies in it.

    `sizes` holds a row for each count.
    """
    columns = [np.ones(sizes.shape[1])]
    for of_one, own in zip(sizes, starts, strict=True):
        widths = np.append(np.diff(own), np.inf)
        columns += [np.clip(of_one - a, 0.0, w) for a, w in zip(own, widths, strict=True)]
    return np.stack(columns, axis=1)


def _solve(columns: Floats, t: Floats) -> Floats:
    relative = columns / t[:, None]
    weight = np.ones_like(t)
    for _ in range(_ROUNDS):
        found = nonnegative(relative * weight[:, None], weight)
        error = np.abs(relative @ found - 1)
        weight = np.sqrt(np.minimum(1.0, _ROBUST_AT / np.maximum(error, 1e-12)))
    return found


def _ramp(starts: Floats, slopes: Floats) -> Ramp:
    values = np.concatenate([[0.0], np.cumsum(np.diff(starts) * slopes[:-1])])
    return Ramp(*(tuple(float(v) for v in part) for part in (starts, values, slopes)))
