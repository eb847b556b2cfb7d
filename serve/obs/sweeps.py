"""What overlaps in time, found in one pass over rows in order of arrival.

Rows of a batch may start and end after the arrivals of later batches. So each step settles what
lies before the horizon, the last arrival seen, and keeps the rest.
"""

import numpy as np

from serve.obs.frame import Column

#: Longest window of the timeline, and the most runs in it.
WINDOW_NS = 2_000_000_000
MAX_RUNS = 300
#: Horizon when no more rows come.
END_NS = 2**62
#: Shortest overlap for which two runs count as concurrent. Times of records come from the wall
#: clock at arrival, which cannot distinguish "right after" from "at the same time".
_OVERLAP_NS = 50_000


class ConcurrentPeak:
    """Finds the largest sum of weights over intervals that overlap."""

    def __init__(self) -> None:
        self.highest = 0
        self._held = 0
        self._times = np.zeros(0, np.int64)
        self._changes = np.zeros(0, np.int64)

    def add(self, start_ns: Column, end_ns: Column, weight: Column, horizon_ns: int) -> None:
        """Add intervals; those of later calls start at `horizon_ns` or after it."""
        end_ns = np.maximum(end_ns - _OVERLAP_NS, start_ns)
        times = np.concatenate([self._times, end_ns, start_ns])
        changes = np.concatenate([self._changes, -weight, weight])
        # At equal times memory is freed before it is taken.
        order = np.lexsort((changes, times))
        times, changes = times[order], changes[order]
        settled = int(np.searchsorted(times, horizon_ns))
        if settled:
            levels = self._held + np.cumsum(changes[:settled])
            self.highest = max(self.highest, int(levels.max()))
            self._held = int(levels[-1])
        self._times, self._changes = times[settled:], changes[settled:]


class BusiestWindow:
    """Finds the window with the most late answers; ties go to the first with the most runs.

    A window is at most WINDOW_NS long and holds about MAX_RUNS runs at most.
    """

    def __init__(self) -> None:
        self._best = (-1, 0, 0)
        self._start = np.zeros(0, np.int64)
        self._end = np.zeros(0, np.int64)
        self._late = np.zeros(0, np.bool_)

    def add(self, start_ns: Column, end_ns: Column, late: Column, horizon_ns: int) -> None:
        """Add runs; those of later calls start at `horizon_ns` or after it."""
        starts = np.concatenate([self._start, start_ns])
        order = np.argsort(starts, kind="stable")
        starts = starts[order]
        ends = np.concatenate([self._end, end_ns])[order]
        lates = np.concatenate([self._late, late])[order]
        settled = int(np.searchsorted(starts, horizon_ns - WINDOW_NS, side="right"))
        if settled:
            sums = np.concatenate([[0], np.cumsum(lates)])
            first = np.arange(settled)
            after = np.minimum(
                np.searchsorted(starts, starts[:settled] + WINDOW_NS), first + MAX_RUNS
            )
            after = np.minimum(after, len(starts))
            score = (sums[after] - sums[first]) * (MAX_RUNS + 1) + (after - first)
            at = int(np.argmax(score))
            if score[at] > self._best[0]:
                end = int(min(ends[at : after[at]].max(), starts[at] + WINDOW_NS))
                self._best = (int(score[at]), int(starts[at]), end)
        self._start, self._end, self._late = starts[settled:], ends[settled:], lates[settled:]

    def window(self) -> tuple[int, int] | None:
        """Return begin and end in ns since the epoch, with a margin; None without runs."""
        score, begin, end = self._best
        if score < 0:
            return None
        margin = max((end - begin) // 100, 1000)
        return begin - margin, end + margin
