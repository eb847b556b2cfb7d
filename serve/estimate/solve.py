"""Least squares with nonnegative coefficients, small and dense.

The active-set method of Lawson and Hanson, *Solving Least Squares Problems* (1974), chapter 23.
"""

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


def nonnegative(columns: Floats, target: Floats) -> Floats:
    """Return x >= 0 [K] that minimises |columns @ x − target|; columns [M, K], target [M]."""
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    a = columns / scale
    count = a.shape[1]
    x = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(a.T @ target).max(initial=0.0)))
    # Each round frees one coefficient; ten rounds each is far beyond what is ever needed.
    for _ in range(10 * count):
        gradient = a.T @ (target - a @ x)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(a[:, free], target, rcond=None)[0]
            if trial[free].min(initial=0.0) >= 0:
                break
            # Go towards the trial until the first coefficient reaches 0, and hold it there.
            falling = free & (trial < 0)
            step = float((x[falling] / (x[falling] - trial[falling])).min())
            x += step * (trial - x)
            free &= x > 1e-14
            x[~free] = 0.0
            if not free.any():
                trial = x
                break
        x = trial
    result: Floats = x / scale
    return result
