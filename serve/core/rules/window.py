"""The window: when the tasks that have come in since the last planning are planned.

A window opens with the first arrival after a planning and closes at a time it names itself; the
scheduler asks for that time, plans when it has come, and says so.
"""

from typing import Protocol

from serve.core.types import ZERO_NS, Nanos, Task


class Window(Protocol):
    """Collects arrivals until it closes."""

    #: True: at each close everything not launched is planned anew together with the newcomers.
    #: False: the newcomers are planned by themselves, behind what is planned already.
    replans: bool
    #: Something has arrived since it last closed.
    open: bool

    def arrived(self, task: Task, now_ns: Nanos) -> None:
        """Note that one more task waits to be planned."""
        ...

    def passed(self, now_ns: Nanos) -> None:
        """Note a task that was planned by itself as it arrived, while the window was not open."""
        ...

    def closes_ns(self, lane_waits: bool) -> Nanos | None:
        """Return when the open window closes; None when nothing has arrived.

        `lane_waits`: a lane could take work now.
        """
        ...

    def closed(self, now_ns: Nanos, planned: int) -> None:
        """Close the window: all arrivals were planned, which looked at `planned` tasks."""
        ...

    def quiet_from_ns(self, gap_ns: Nanos) -> Nanos:
        """Return from when on the next arrival is expected no sooner than `gap_ns` later."""
        ...


class FixedWindow:
    """Slots of equal length, as in the paper: the arrivals of a slot are planned at its end."""

    replans = False

    def __init__(self, window_ns: Nanos) -> None:
        self._window_ns = window_ns
        self._closes_ns: Nanos | None = None
        self.open = False

    def arrived(self, task: Task, now_ns: Nanos) -> None:
        """Open the slot that `now_ns` falls into, unless it is open."""
        if self._closes_ns is None:
            self._closes_ns = Nanos((now_ns // self._window_ns + 1) * self._window_ns)
            self.open = True

    def passed(self, now_ns: Nanos) -> None:
        """Do nothing: slots are those of the clock."""

    def closes_ns(self, lane_waits: bool) -> Nanos | None:
        """Return the end of the slot, whether or not a lane waits."""
        return self._closes_ns

    def closed(self, now_ns: Nanos, planned: int) -> None:
        """Close the slot; the next arrival opens another."""
        self._closes_ns = None
        self.open = False

    def quiet_from_ns(self, gap_ns: Nanos) -> Nanos:
        """Return 0: what arrives waits for the end of its slot."""
        return ZERO_NS


class AdaptiveWindow:
    """Closes at once when a lane could take work, otherwise as late as is free of cost.

    While every lane is busy a plan changes nothing but what is prepared next, so the window
    stays open for about `GATHER` arrivals at the measured rate. It closes earlier when the
    tightest newcomer would have to start, so that it is prepared by then. Planning costs time
    in proportion to the tasks looked at, so the next close comes no earlier than
    `REST_PER_TASK_NS` for each of them: under overload a few percent of a core goes into plans.
    """

    replans = True

    #: Arrivals worth waiting for while no lane could take work.
    GATHER = 8
    #: Bounds of the time given to that.
    MIN_LENGTH_NS = 200_000
    MAX_LENGTH_NS = 5_000_000
    #: Weight of the newest gap between arrivals in the running mean.
    GAP_WEIGHT = 0.1
    #: About twenty times what planning one task takes.
    REST_PER_TASK_NS = 30_000

    def __init__(self) -> None:
        self._gap_ns = float(self.MAX_LENGTH_NS)
        self._last_arrival_ns: Nanos | None = None
        self._opened_ns: Nanos | None = None
        self.open = False
        self._tightest_ns = Nanos(0)
        self._rest_until_ns = 0

    def arrived(self, task: Task, now_ns: Nanos) -> None:
        """Update the arrival rate and the tightest newcomer."""
        last_ns, self._last_arrival_ns = self._last_arrival_ns, now_ns
        if last_ns is not None:
            self._count_gap(now_ns - last_ns)
        start_ns = task.latest_start_ns
        if self._opened_ns is None:
            self._opened_ns = now_ns
            self.open = True
            self._tightest_ns = start_ns
        elif start_ns < self._tightest_ns:
            self._tightest_ns = start_ns

    def passed(self, now_ns: Nanos) -> None:
        """Update the arrival rate, and rest as after planning one task."""
        last_ns, self._last_arrival_ns = self._last_arrival_ns, now_ns
        if last_ns is not None:
            self._count_gap(now_ns - last_ns)
        self._rest_until_ns = now_ns + self.REST_PER_TASK_NS

    def _count_gap(self, gap_ns: int) -> None:
        # One long pause says nothing about the gaps of the next burst, so it is cut.
        if gap_ns > self.MAX_LENGTH_NS:
            gap_ns = self.MAX_LENGTH_NS
        self._gap_ns += self.GAP_WEIGHT * (gap_ns - self._gap_ns)

    def closes_ns(self, lane_waits: bool) -> Nanos | None:
        """Return the opening for a waiting lane, else the end of gathering, after the rest."""
        opened_ns = self._opened_ns
        if opened_ns is None:
            return None
        if lane_waits:
            return Nanos(max(opened_ns, self._rest_until_ns))
        length_ns = int(self.GATHER * self._gap_ns)
        length_ns = min(max(length_ns, self.MIN_LENGTH_NS), self.MAX_LENGTH_NS)
        return Nanos(max(min(opened_ns + length_ns, self._tightest_ns), self._rest_until_ns))

    def closed(self, now_ns: Nanos, planned: int) -> None:
        """Close the window and rest in proportion to the planning's work."""
        self._opened_ns = None
        self.open = False
        self._rest_until_ns = now_ns + planned * self.REST_PER_TASK_NS

    def quiet_from_ns(self, gap_ns: Nanos) -> Nanos:
        """Return 0 while gaps are as long on average, else when that long none has arrived."""
        if self._last_arrival_ns is None or self._gap_ns >= gap_ns:
            return ZERO_NS
        return Nanos(self._last_arrival_ns + gap_ns)


def make_window(name: str, window_ns: Nanos) -> Window:
    """The window called `name`: `fixed`, with slots of `window_ns`, or `adaptive`."""
    return FixedWindow(window_ns) if name == "fixed" else AdaptiveWindow()
