"""Quantiles of many values in little memory."""

import math

import numpy as np

from serve.obs.frame import Column
from serve.quantiles import quantile

#: Most values that are kept as they are.
EXACT = 20_000
#: Ratio of a bin's two edges.
_GROWTH = 1.005
_LOG_GROWTH = math.log(_GROWTH)
#: Bins hold values from 1e-12 to 1e12; smaller ones count as 0.
_FIRST = math.floor(math.log(1e-12) / _LOG_GROWTH)
_BINS = 2 * -_FIRST + 1


class Sketch:
    """Collects values that are not negative and tells their quantiles.

    They are exact for up to `EXACT` values, and beyond that within 0.25 % of the value at the rank:
    the bins grow geometrically, as in DDSketch (Masson, Rim and Lee 2019).
    """

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._exact: list[Column] = []
        #: Counts of zeros, then of each bin; None while values are exact.
        self._counts: Column | None = None

    @property
    def mean(self) -> float:
        """Mean of the values; 0 when there are none."""
        return self._sum / self.count if self.count else 0.0

    def add(self, values: Column) -> None:
        """Add values, of any number."""
        self.count += len(values)
        self._sum += float(values.sum())
        if self._counts is not None:
            self._counts += _binned(values)
            return
        self._exact.append(values)
        if self.count > EXACT:
            self._counts = _binned(np.concatenate(self._exact))
            self._exact = []

    def quantiles(self, shares: tuple[float, ...]) -> tuple[float, ...]:
        """Return the quantile at each of `shares`; zeros when there are no values."""
        if self._counts is None:
            ordered = np.sort(np.concatenate(self._exact or [np.zeros(0)])).tolist()
            return tuple(quantile(ordered, share) for share in shares)
        upto = np.cumsum(self._counts)
        return tuple(self._at(upto, share * (self.count - 1)) for share in shares)

    def _at(self, upto: Column, rank: float) -> float:
        """Return the value at a rank, interpolated between the nearest whole ones."""
        below = math.floor(rank)
        low, high = (
            _middle(int(np.searchsorted(upto, whole, side="right")))
            for whole in (below, min(below + 1, self.count - 1))
        )
        return low + (high - low) * (rank - below)


def _binned(values: Column) -> Column:
    some = np.maximum(values, 1e-13)
    bins = np.floor(np.log(some) / _LOG_GROWTH).astype(np.int64) - _FIRST + 1
    return np.bincount(np.clip(bins, 0, _BINS), minlength=_BINS + 1)


def _middle(position: int) -> float:
    """Return the value that stands for a bin: the geometric middle of its edges."""
    return math.exp((position - 1 + _FIRST + 0.5) * _LOG_GROWTH) if position else 0.0
