"""Quantiles of many values in little memory."""

import math

import numpy as np

from serve.obs.frame import Column
from serve.quantiles import quantile

#: Most values that are kept as they are.
EXACT = 20_000
#: Ratio of a bin's two edges.
GROWTH = 1.005
#: Ratio for values near 1 whose distance from 1 matters: that is then within 1 % from 0.025 on.
FINE_GROWTH = 1.0005
#: Bins hold values from this one to its inverse; smaller ones count as 0.
_LEAST = 1e-12


class Sketch:
    """Collects values that are not negative and tells their quantiles.

    They are exact for up to `EXACT` values, and beyond that within half of the bins' growth of the
    value at the rank, by default 0.25 %: the bins grow geometrically, as in DDSketch (Masson, Rim
    and Lee 2019).
    """

    def __init__(self, growth: float = GROWTH) -> None:
        """Use bins whose edges have the ratio `growth`."""
        self.count = 0
        self._log_growth = math.log(growth)
        self._first = math.floor(math.log(_LEAST) / self._log_growth)
        self._bins = 2 * -self._first + 1
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
            self._counts += self._binned(values)
            return
        self._exact.append(values)
        if self.count > EXACT:
            self._counts = self._binned(np.concatenate(self._exact))
            self._exact = []

    def merge(self, other: "Sketch") -> None:
        """Add the values of another sketch of the same growth."""
        self.count += other.count
        self._sum += other._sum
        self._exact = self._exact + other._exact
        counts = [one._counts for one in (self, other) if one._counts is not None]
        if counts or self.count > EXACT:
            values = np.concatenate(self._exact or [np.zeros(0)])
            self._counts = np.sum([self._binned(values), *counts], axis=0)
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
            self._middle(int(np.searchsorted(upto, whole, side="right")))
            for whole in (below, min(below + 1, self.count - 1))
        )
        return low + (high - low) * (rank - below)

    def _binned(self, values: Column) -> Column:
        some = np.maximum(values, _LEAST / 10)
        bins = np.floor(np.log(some) / self._log_growth).astype(np.int64) - self._first + 1
        return np.bincount(np.clip(bins, 0, self._bins), minlength=self._bins + 1)

    def _middle(self, position: int) -> float:
        """Return the value that stands for a bin: the geometric middle of its edges."""
        if not position:
            return 0.0
        return math.exp((position - 1 + self._first + 0.5) * self._log_growth)
