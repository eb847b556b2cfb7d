"""What overlaps in time, found in one pass over rows in order of arrival.

Rows of a batch may start and end after the arrivals of later batches. So each step settles what
lies before the horizon, the last arrival seen, and keeps the rest.
"""

from collections.abc import Sequence

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
    """Finds the largest sum over intervals that overlap, of each of several weights."""

    def __init__(self, weights: int) -> None:
        """Take so many weights of each interval."""
        self.highest = [0] * weights
        self._held = [0] * weights
        nothing = np.zeros(0, np.int64)
        #: What is not settled: ends with the weights of their intervals, and starts.
        self._ends = [nothing] * (1 + weights)
        self._starts = [nothing] * (1 + weights)

    def add(
        self, start_ns: Column, end_ns: Column, weights: Sequence[Column], horizon_ns: int
    ) -> None:
        """Add intervals; those of later calls start at `horizon_ns` or after it."""
        end_ns = np.maximum(end_ns - _OVERLAP_NS, start_ns)
        ends = _joined(self._ends, (end_ns, *weights))
        starts = _joined(self._starts, (start_ns, *weights))
        # At equal times memory is freed before it is taken. Both parts are nearly in order, which
        # this sort makes use of.
        times = np.concatenate([ends[0], starts[0]])
        order = np.argsort(times, kind="stable")
        settled = int(np.searchsorted(times, horizon_ns, sorter=order))
        for number in range(len(self.highest)) if settled else ():
            changes = np.concatenate([-ends[1 + number], starts[1 + number]])[order[:settled]]
            levels = self._held[number] + np.cumsum(changes)
            self.highest[number] = max(self.highest[number], int(levels.max()))
            self._held[number] = int(levels[-1])
        left = order[settled:]
        self._ends = [column[left[left < len(ends[0])]] for column in ends]
        self._starts = [column[left[left >= len(ends[0])] - len(ends[0])] for column in starts]


def _joined(left: Sequence[Column], more: Sequence[Column]) -> list[Column]:
    return [np.concatenate(pair) for pair in zip(left, more, strict=True)]


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
