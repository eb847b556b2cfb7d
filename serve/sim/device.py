"""A device that exists only in numbers: how long things take on it, beside what."""

from dataclasses import dataclass
from operator import attrgetter

from serve.core.types import ZERO_NS, LaneId, Nanos, Task, TaskId
from serve.sim.host import HostModel

#: Stopping or waking a process: tens of microseconds.
SWITCH_NS = Nanos(30_000)
#: From the command to stop a run until its lane is free: up to one operation of its model.
STOP_NS = Nanos(500_000)


@dataclass(frozen=True, slots=True)
class Offered:
    """Request with what it truly takes; its task carries the estimates."""

    task: Task
    #: Forward pass on an idle device.
    run_ns: Nanos
    #: Preparing on the host.
    prepare_ns: Nanos
    #: From the end of the run until the answer is out.
    answer_ns: Nanos = ZERO_NS


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Timings of a simulated device."""

    #: How much longer a run takes beside 0, 1, 2, … other executing tasks; the last value
    #: counts for more. (1.0,): no interference.
    slowdown: tuple[float, ...] = (1.0,)
    #: From a command to suspend or resume until it has taken effect.
    switch_ns: Nanos = SWITCH_NS
    #: From a command to stop until the lane is free, at most.
    stop_ns: Nanos = STOP_NS
    #: The same of a launch, with hearing of the run's end, as messages go to a lane and back;
    #: None: as `switch_ns`.
    launch_ns: Nanos | None = None
    #: The host's work on the cores of the lanes; None: the host has cores enough of its own, and
    #: requests are prepared and answered side by side.
    host: HostModel | None = None

    def __post_init__(self) -> None:
        if not self.slowdown or min(self.slowdown) <= 0:
            raise ValueError(f"slowdown must be positive numbers, got {self.slowdown}")

    @property
    def launching_ns(self) -> Nanos:
        """Time that a launch takes of the device."""
        return self.switch_ns if self.launch_ns is None else self.launch_ns

    def slowdown_beside(self, others: int) -> float:
        """The slowdown of a task with `others` executing beside it."""
        return self.slowdown[min(others, len(self.slowdown) - 1)]


class SimulatedRun:
    """Task on a lane of a simulated device."""

    __slots__ = ("core", "executing", "lane_id", "mark", "started_ns", "stopping", "task_id")

    def __init__(self, task_id: TaskId, lane_id: LaneId, run_ns: int, started_ns: int) -> None:
        self.task_id = task_id
        self.lane_id = lane_id
        #: When its lane heard of it.
        self.started_ns = started_ns
        #: While executing, its core's progress at which it ends; else the work left.
        self.mark = float(run_ns)
        self.core = 0
        self.executing = False
        self.stopping = False


#: In which order runs end that advance alike.
_end_on_one_core = attrgetter("mark", "lane_id")


class SimulatedDevice:
    """Lanes on which runs make progress at a pace set by how many execute.

    All that execute on a core advance alike, so one number tells how far each is: the work that a
    run which always executed would have done. Changing the pace touches no run. Cores are told
    apart only where the host takes from them (``DeviceModel.host``); without that all runs count
    as on one, whose pace has the cores in it (``DeviceModel.slowdown``).
    """

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._runs: dict[LaneId, SimulatedRun] = {}
        self._executing: dict[LaneId, SimulatedRun] = {}
        cores = 1 if model.host is None else model.host.cores
        #: By core: work done by one that always executes, in time on an idle device, up to
        #: `_at_ns`; work done in a nanosecond; runs that execute there.
        self._progress = [0.0] * cores
        self._pace = [1.0] * cores
        self.executing_on = [0] * cores
        self._at_ns = 0
        #: What executes changed since the pace was found, with the first end at it.
        self._changed = False
        self._end: tuple[int, LaneId] | None = None
        #: Of each core, for its runs.
        self._shares = (1.0,) * cores
        #: Where each lane was pinned last.
        self._core_of: dict[LaneId, int] = {}
        #: Pace of each of 1, 2, 3, … that execute on one core.
        self._together = [1 / slowdown for slowdown in model.slowdown]
        self._launch_ns = model.launching_ns

    def launch(self, lane_id: LaneId, task_id: TaskId, run_ns: int, now_ns: int) -> None:
        """Start a run of `run_ns` work on the idle lane."""
        work_ns = run_ns + self._launch_ns - self._model.switch_ns
        self._runs[lane_id] = SimulatedRun(task_id, lane_id, work_ns, now_ns + self._launch_ns)
        self.resume(lane_id, now_ns)

    def suspend(self, lane_id: LaneId, now_ns: int) -> None:
        """Stop the run on the lane where it is, unless it has just ended."""
        self._advance(now_ns)
        run = self._executing.pop(lane_id, None)
        if run is None:
            return
        self.executing_on[run.core] -= 1
        run.executing = False
        run.mark = max(0.0, run.mark - self._progress[run.core])

    def resume(self, lane_id: LaneId, now_ns: int) -> None:
        """Let the run on the lane go on, if there is one that does not."""
        self._advance(now_ns)
        run = self._runs.get(lane_id)
        if run is None or run.executing:
            return
        run.executing = True
        run.core = self._core_for(lane_id)
        self._executing[lane_id] = run
        self.executing_on[run.core] += 1
        # It works only once the switch has taken effect.
        run.mark += self._progress[run.core] + self._model.switch_ns

    def gets(self, shares: tuple[float, ...], now_ns: int) -> None:
        """Set the share of each core that its runs get together from now on."""
        if shares != self._shares:
            self._advance(now_ns)
            self._shares = shares

    def stop(self, lane_id: LaneId, now_ns: int) -> None:
        """Have the run on the lane end within `stop_ns`, also if it was suspended."""
        run = self._runs.get(lane_id)
        if run is None:
            return
        if run.executing:
            self.suspend(lane_id, now_ns)
        run.mark = min(run.mark, float(self._model.stop_ns))
        run.stopping = True
        self.resume(lane_id, now_ns)

    def end(self, lane_id: LaneId, now_ns: int) -> SimulatedRun:
        """Take the run off its lane."""
        if self._runs[lane_id].executing:
            self.suspend(lane_id, now_ns)
        return self._runs.pop(lane_id)

    def next_end(self) -> tuple[int, LaneId] | None:
        """Return (when, lane) of the run that ends first at this speed; None when none advances."""
        if self._changed:
            self._changed = False
            self._look_ahead()
        return self._end

    def _core_for(self, lane_id: LaneId) -> int:
        """Return the lane's last core, or a free one when that is taken; lanes are pinned."""
        cores = len(self.executing_on)
        if cores == 1:
            return 0
        core = self._core_of.get(lane_id, lane_id % cores)
        if self.executing_on[core]:
            core = next((other for other in range(cores) if not self.executing_on[other]), core)
        self._core_of[lane_id] = core
        return core

    def _advance(self, now_ns: int) -> None:
        """Advance all runs up to now at the speed so far; what executes is about to change."""
        passed_ns = now_ns - self._at_ns
        if passed_ns:
            if self._changed:
                self._look_ahead()
            for core, pace in enumerate(self._pace):
                self._progress[core] += passed_ns * pace
            self._at_ns = now_ns
        self._changed = True

    def _look_ahead(self) -> None:
        """Find the pace, and who ends first at it."""
        self._end = None
        executing = len(self._executing)
        if not executing:
            return
        cores, paces, progress = len(self._pace), self._pace, self._progress
        if cores == 1 and self._model.host is None:
            paces[0] = self._together[min(executing, len(self._together)) - 1]
            run = min(self._executing.values(), key=_end_on_one_core)
            left_ns = (run.mark - progress[0]) / paces[0]
            self._end = self._at_ns + max(0, round(left_ns)), run.lane_id
            return
        # Those on one core take turns: no more than one of them is beside others.
        slowdown = self._model.slowdown_beside(min(executing, cores) - 1)
        for core, share in enumerate(self._shares):
            paces[core] = share / max(1, self.executing_on[core]) / slowdown
        ends = [
            ((run.mark - progress[run.core]) / paces[run.core], run.lane_id)
            for run in self._executing.values()
            if paces[run.core] > 0
        ]
        if ends:
            left_ns, lane_id = min(ends)
            self._end = self._at_ns + max(0, round(left_ns)), lane_id
