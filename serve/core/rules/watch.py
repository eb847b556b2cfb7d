"""Watch over runs that take far longer than expected: when their lanes are looked at, and why.

No clock tells whether a run hangs: lanes give way to everything else on the machine, so a healthy
run without a core is late. What counts is what its lane did meanwhile. A run that stood still
between two looks, asleep or stopped, with nothing to keep it from going on, hangs: its lane is
killed. A run that computes may go on until it has had a core for its time limit.
"""

from enum import Enum

from serve.core.state.device_state import Board
from serve.core.state.record import Run
from serve.core.types import LaneLook, LaneState, Nanos

_LEAST_NS, _FACTOR = 1_000_000_000, 50
#: A run may take so many times its estimate, and at least so long, where nothing else is set.
_LIMIT_LEAST_NS, _LIMIT_FACTOR = Nanos(60_000_000_000), 200
#: Looks until that limit, at least, unless they come sooner one after the other than that.
_LOOKS_TO_LIMIT, _LEAST_PAUSE_NS = 8, 1_000_000
NEVER_NS = Nanos(1 << 62)


class Verdict(Enum):
    """Verdict on a run after a look at its lane."""

    GOES_ON = "goes on"
    STANDS_STILL = "stands still"
    OVER_LIMIT = "over its limit"


class Watch:
    """Watch over a device's runs: when to look at their lanes, and what the looks mean."""

    __slots__ = ("_board", "_limit_ns", "next_ns")

    def __init__(self, board: Board, limit_ns: Nanos | None) -> None:
        """Watch runs; `limit_ns` is the most that any may take, None derives it from estimates."""
        self._board = board
        self._limit_ns = limit_ns
        #: Nothing is due before.
        self.next_ns = NEVER_NS

    def set_limit(self, limit_ns: Nanos | None) -> None:
        """Let runs take this from now on, those that execute from their next look on."""
        self._limit_ns = limit_ns

    def limit_ns(self, run: Run) -> Nanos:
        """Return the most that the run may take: what any may, or its model."""
        most_ns, own_ns = self._limit_ns, run.members[0].task.limits.run_ns
        if most_ns is None:
            if own_ns is not None:
                return own_ns
            most_ns = Nanos(_LIMIT_FACTOR * run.run_ns)
            return _LIMIT_LEAST_NS if most_ns < _LIMIT_LEAST_NS else most_ns
        return most_ns if own_ns is None or most_ns < own_ns else own_ns

    def begins(self, run: Run, now_ns: Nanos) -> None:
        """Watch the run, which was launched now."""
        run.look_ns = look_ns = self._pause_ns(run)
        due_ns = now_ns + look_ns
        if due_ns < self.next_ns:
            self.next_ns = Nanos(due_ns)

    def goes_on(self, run: Run, now_ns: Nanos) -> None:
        """Schedule the next look at the run, which executes."""
        due_ns = Nanos(now_ns + run.look_ns - run.executed_ns(now_ns))
        self.next_ns = min(self.next_ns, due_ns)

    def due(self, now_ns: Nanos) -> list[Run]:
        """Runs to be looked at now, each again a while later."""
        self.next_ns = NEVER_NS
        found = []
        for run in self._board.busy.values():
            if not run.executing or run.stopping:
                continue
            if run.executed_ns(now_ns) >= run.look_ns:
                run.look_ns = Nanos(run.executed_ns(now_ns) + self._pause_ns(run))
                found.append(run)
            self.goes_on(run, now_ns)
        return found

    def seen(self, run: Run, look: LaneLook, now_ns: Nanos) -> Verdict:
        """Return the verdict after a look at the run's lane."""
        before, run.look = run.look, look
        executed_ns = run.executed_ns(now_ns)
        since_ns, run.looked_ns = executed_ns - run.looked_ns, executed_ns
        if before is None:
            return Verdict.GOES_ON
        cpu_ns = max(0, look.cpu_ns - before.cpu_ns)
        at_rest = look.state in (LaneState.ASLEEP, LaneState.STOPPED)
        advanced = (look.cpu_ns, look.turns) != (before.cpu_ns, before.turns)
        run.still_ns = Nanos(run.still_ns + since_ns if at_rest and not advanced else 0)
        run.taken_ns += min(since_ns, cpu_ns) if look.state is LaneState.BUSY else since_ns
        patience_ns = self._patience_ns(run)
        run.overdue = max(2 * run.still_ns, run.taken_ns) >= patience_ns
        if 2 * run.still_ns >= patience_ns:
            return Verdict.STANDS_STILL
        if run.taken_ns >= self.limit_ns(run):
            return Verdict.OVER_LIMIT
        return Verdict.GOES_ON

    def _patience_ns(self, run: Run) -> int:
        """Return the time within which a run that stands still is noticed."""
        return max(_LEAST_NS, _FACTOR * run.run_ns)

    def _pause_ns(self, run: Run) -> Nanos:
        patience_ns = _FACTOR * run.run_ns
        if patience_ns < _LEAST_NS:
            patience_ns = _LEAST_NS
        half_ns, part_ns = patience_ns // 2, self.limit_ns(run) // _LOOKS_TO_LIMIT
        if part_ns < _LEAST_PAUSE_NS:
            part_ns = _LEAST_PAUSE_NS
        return Nanos(half_ns if half_ns < part_ns else part_ns)
