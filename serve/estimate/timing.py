"""Run time as a function of graph size: constant + nodes(N) + edges(E), each piecewise linear.

Small graphs are all overhead, large ones fall out of the caches, so the cost of one more edge
is not the same everywhere; it is never negative, though, which keeps the fit monotone. Relative
errors count, and single disturbed measurements must not: weights 1 ÷ time, then reweighting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serve.estimate.calibration import Ramp, TimeFit
from serve.estimate.solve import Floats, nonnegative

#: Relative errors beyond this lose weight (Huber).
_ROBUST_AT = 0.08
_ROUNDS = 4
_FOLDS = 5


@dataclass(frozen=True, slots=True)
class Timed:
    """Measured forward passes over one graph."""

    num_nodes: int
    num_edges: int
    runs_ns: tuple[int, ...]

    @property
    def median_ns(self) -> float:
        """Median of the runs."""
        return float(np.median(self.runs_ns))


def fit_time(samples: Sequence[Timed]) -> TimeFit:
    """Fit at least four samples; the number of pieces is the one that predicts best."""
    n = np.array([s.num_nodes for s in samples], dtype=np.float64)
    e = np.array([s.num_edges for s in samples], dtype=np.float64)
    t = np.array([s.median_ns for s in samples], dtype=np.float64)
    # Folds go through sizes in order, so that each holds out small, middle and large graphs.
    fold = np.empty(len(t), dtype=np.int64)
    fold[np.argsort(n + e, kind="stable")] = np.arange(len(t)) % _FOLDS
    best: tuple[float, int, Floats] | None = None
    for pieces in (1, 2, 3, 4, 5, 6):
        if 2 * pieces + 1 > len(t) * (1 - 1 / _FOLDS):
            break
        error = np.empty_like(t)
        starts = _starts(n, pieces), _starts(e, pieces)
        for k in range(_FOLDS):
            out = fold == k
            weights = _solve(_columns(n, e, *starts)[~out], t[~out])
            error[out] = np.abs(_columns(n, e, *starts)[out] @ weights / t[out] - 1)
        score = float(np.median(error) + 0.3 * np.quantile(error, 0.95))
        if best is None or score < best[0]:
            best = score, pieces, error
    if best is None:
        raise ValueError(f"a time model needs at least 4 samples, got {len(samples)}")
    _, pieces, error = best
    node_starts, edge_starts = _starts(n, pieces), _starts(e, pieces)
    columns = _columns(n, e, node_starts, edge_starts)
    weights = _solve(columns, t)
    fitted = columns @ weights
    runs = np.concatenate([np.array(s.runs_ns) / f for s, f in zip(samples, fitted, strict=True)])
    return TimeFit(
        constant_ns=float(weights[0]),
        nodes=_ramp(node_starts, weights[1 : 1 + len(node_starts)]),
        edges=_ramp(edge_starts, weights[1 + len(node_starts) :]),
        high_ratio=max(1.0, float(np.quantile(runs, 0.95))),
        error_median=float(np.median(error)),
        error_p95=float(np.quantile(error, 0.95)),
        samples=len(samples),
        largest_nodes=int(n.max()),
        largest_edges=int(e.max()),
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


def _columns(n: Floats, e: Floats, node_starts: Floats, edge_starts: Floats) -> Floats:
    """Return a column for the constant and one per piece: the part of the size that lies in it."""
    columns = [np.ones_like(n)]
    for sizes, starts in ((n, node_starts), (e, edge_starts)):
        widths = np.append(np.diff(starts), np.inf)
        columns += [np.clip(sizes - a, 0.0, w) for a, w in zip(starts, widths, strict=True)]
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
