"""Co-running: decides whether one more run keeps more targets than its slowdown costs.

Runs on one device slow one another, see ``slowdown``. Where they do so much, a free lane is not yet
a reason to launch: two runs that would each be in time one after the other can both be late side
by side. The decision looks at the runs that execute and the one that would join, as if no other
came.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

from serve.core.slowdown import ends_ns, slowdown_beside
from serve.core.state.device_state import Board
from serve.core.state.record import Record, Run
from serve.core.types import Nanos, Task

#: Factor on expected ends, as run times are not exact.
MARGIN = 1.1


def co_runners_on(board: Board, now_ns: Nanos) -> "CoRunners | None":
    """Return the runs that one more would slow; None if there are none, or the policy ignores it.

    Returns None also where runs can be suspended: executing the most urgent keeps more targets.
    """
    if board.slowdown[-1] == 1.0 or not board.weighs_slowdown or not board.executing_count:
        return None
    return CoRunners(board, now_ns)


class CoRunners:
    """Runs that execute on a device now, at least one, for every task that might join them."""

    __slots__ = ("_ends", "_lefts", "_limits", "_now_ns", "_slowdown")

    def __init__(self, board: Board, now_ns: Nanos) -> None:
        runs = sorted(
            (board.left_ns(run, now_ns), lane_id, _time_ns(run, now_ns))
            for lane_id, run in board.busy.items()
            if run.executing
        )
        self._slowdown = board.slowdown
        self._now_ns = now_ns
        self._lefts = [left_ns for left_ns, _, _ in runs]
        self._limits = [limit_ns for _, _, limit_ns in runs]
        self._ends = ends_ns(self._lefts, self._slowdown)

    def admits(self, record: Record) -> bool:
        """Return True to launch the READY record beside them, False to wait for one to end.

        - If it will be in time, no more than one of them, in time so far, is made late by it.
        - If it is late, one more like it could still come, join and be in time: the late must not
          take the place of those to come.
        - What has waited too long for others joins whoever is there.
        """
        if record.promoted:
            return True
        task = record.task
        run_ns, limit_ns = task.estimate.run_ns, (task.due_ns - self._now_ns) / MARGIN
        if run_ns <= limit_ns:
            at = bisect_right(self._lefts, run_ns)
            together = ends_ns([*self._lefts[:at], run_ns, *self._lefts[at:]], self._slowdown)
            if together.pop(at) <= limit_ns:
                return self._made_late(together) <= 1
        return leaves_room(task, self._slowdown, len(self._lefts))

    def _made_late(self, ends: Sequence[float]) -> int:
        """Return how many of them are in time now and would not be with these ends."""
        return sum(
            before_ns * MARGIN <= limit_ns < after_ns * MARGIN
            for limit_ns, before_ns, after_ns in zip(self._limits, self._ends, ends, strict=True)
        )


def leaves_room(late: Task, slowdown: Sequence[float], executing: int) -> bool:
    """Return True when a task like it that joins later could still be in time."""
    most = late.qos.target_ns / late.estimate.solo_ns / MARGIN
    return slowdown_beside(slowdown, executing + 1) <= max(1.0, most)


def _time_ns(run: Run, now_ns: Nanos) -> float:
    """Return how long the run may still take for all its members to be in time."""
    return min((r.task.due_ns for r in run.members if not r.state.answered), default=inf) - now_ns
