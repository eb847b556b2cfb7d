"""The slack governor: how many jobs may run beside the requests that are there now.

How much a job slows a run is learned from runs beside jobs (``JobSlowdownChanged``). Until there
were any, a job is taken to slow a run as one more run would (``SlowdownChanged``). Where the table
of ``JobRules`` says more, it counts.
"""

from collections.abc import Iterator

from serve.core.jobs.types import JobRules
from serve.core.lifecycle import State
from serve.core.rules.co_running import MARGIN
from serve.core.slowdown import NO_SLOWDOWN, slowdown_beside
from serve.core.state.device_state import Board
from serve.core.state.record import Record
from serve.core.types import Nanos


class SlackGovernor:
    """Bounds jobs by what they cost requests that would be in time without them."""

    __slots__ = ("_board", "_learned", "_slowdown", "_strict")

    def __init__(self, rules: JobRules, board: Board) -> None:
        self._board = board
        self._strict = rules.slack == "strict"
        self._slowdown = rules.slowdown
        self._learned: tuple[float, ...] = NO_SLOWDOWN

    def set_slowdown(self, learned: tuple[float, ...]) -> None:
        """Know how much longer runs take beside 0, 1, 2, … jobs."""
        self._learned = learned

    def most(self, now_ns: Nanos) -> int:
        """Return how many jobs may run now, on the slots that requests leave.

        As many as leave every request in time that is in time without them: those on lanes, and
        those ready to be launched. `strict`: none while there is one.
        """
        board = self._board
        room = board.open_slots
        if room <= 0:
            return 0
        if self._strict:
            return 0 if board.busy or board.plan.count else room
        if not self._disturbs:
            return room
        bearable = min(
            (slack_ns / left_ns for left_ns, slack_ns in self._waited_for(now_ns)), default=None
        )
        if bearable is None:
            return room
        while room and self._factor(room) * MARGIN > bearable:
            room -= 1
        return room

    def ends_ns(self, running: int, now_ns: Nanos) -> Nanos | None:
        """Return when so many jobs become too many unless something else happens first.

        Only a request that does not execute comes closer to its target without getting on.
        """
        if not running or self._strict or not self._disturbs:
            return None
        factor = self._factor(running) * MARGIN
        left = [
            slack_ns - factor * left_ns
            for left_ns, slack_ns in self._waited_for(now_ns, executing=False)
        ]
        return Nanos(now_ns + 1 + int(min(left))) if left and min(left) >= 0 else None

    @property
    def _disturbs(self) -> bool:
        assumed = self._board.slowdown if self._learned == NO_SLOWDOWN else self._learned
        return self._slowdown[-1] > 1.0 or assumed[-1] > 1.0

    def _factor(self, jobs: int) -> float:
        """Return how much longer a run takes beside so many jobs than beside the runs alone."""
        if self._learned == NO_SLOWDOWN:
            of_runs, others = self._board.slowdown, self._others
            of_jobs = slowdown_beside(of_runs, others + jobs) / slowdown_beside(of_runs, others)
        else:
            of_jobs = slowdown_beside(self._learned, jobs)
        return max(slowdown_beside(self._slowdown, jobs), of_jobs)

    @property
    def _others(self) -> int:
        """Runs beside each of those that execute."""
        return max(0, self._board.executing_count - 1)

    def _waited_for(self, now_ns: Nanos, *, executing: bool = True) -> Iterator[tuple[float, int]]:
        """Yield run time left, and the time for it, of each request that is in time without jobs.

        Run times are those beside as many requests as execute now.
        """
        board = self._board
        pace = slowdown_beside(board.slowdown, self._others)
        for run in board.busy.values():
            if run.executing and not executing:
                continue
            left_ns = board.left_ns(run, now_ns) * pace
            for record in run.members:
                yield from _in_time(record, left_ns, now_ns)
        for group in board.plan.groups:
            for record in group.members:
                if record.state is State.READY:
                    yield from _in_time(record, record.task.estimate.run_ns * pace, now_ns)


def _in_time(record: Record, left_ns: float, now_ns: Nanos) -> Iterator[tuple[float, int]]:
    slack_ns = record.task.run_due_ns - now_ns
    if left_ns <= slack_ns and not record.state.answered:
        yield left_ns, slack_ns
