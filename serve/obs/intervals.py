"""Counts over equal intervals of time."""

import math

import numpy as np

from serve.obs.frame import Column
from serve.svg import nice_step

#: Widths that people read easily.
BAR_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600,
                7200, 21600, 86400, 604800)  # fmt: skip
_MIN_BARS = 20


class Intervals:
    """Counts by name in equal intervals that cover a span of time, at most 72 of them."""

    def __init__(self, first_s: float, last_s: float) -> None:
        """Cover `first_s` to `last_s`, seconds since the epoch."""
        span = max(last_s - first_s, 0.01)
        self.width_s = next((w for w in BAR_SECONDS if span / w <= 72), nice_step(span, 72))
        self.start_s = math.floor(first_s / self.width_s) * self.width_s
        self.bars = max(_MIN_BARS, math.floor((last_s - self.start_s) / self.width_s) + 1)
        self._counts: dict[str, Column] = {}

    def slots(self, unix_ns: Column) -> Column:
        """Return the interval of each moment."""
        at = ((unix_ns / 1e9 - self.start_s) / self.width_s).astype(np.int64)
        return np.clip(at, 0, self.bars - 1)

    def add(self, name: str, slots: Column) -> None:
        """Count moments by their intervals."""
        self._counts[name] = self.counts(name) + np.bincount(slots, minlength=self.bars)

    def counts(self, name: str) -> Column:
        """Return the count of each interval."""
        return self._counts.get(name, np.zeros(self.bars, np.int64))
