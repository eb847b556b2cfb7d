"""A device that exists only in numbers: how long things take on it, beside what."""

from dataclasses import dataclass
from operator import attrgetter

from serve.core.slowdown import slowdown_beside
from serve.core.types import ZERO_NS, LaneId, Nanos, Task, TaskId

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
    #: How many times slower everything is while what executes has reserved more than
    #: `capacity_bytes` together, as memory is then paged. None: no such limit.
    paging: float = 1.0
    #: How much longer a run takes beside 0, 1, 2, … training jobs that run.
    beside_jobs: tuple[float, ...] = (1.0,)
    #: What stopping a job costs the launch or the resumption that takes its core.
    pause_ns: Nanos = ZERO_NS
    capacity_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.paging < 1:
            raise ValueError(f"paging must be at least 1, got {self.paging}")
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

    __slots__ = (
        "executing", "lane_id", "mark", "reserve_bytes", "started_ns", "stopping", "task_id",
    )  # fmt: skip

    def __init__(
        self, task_id: TaskId, lane_id: LaneId, run_ns: int, started_ns: int, reserve_bytes: int
    ) -> None:
        self.task_id = task_id
        self.lane_id = lane_id
        self.reserve_bytes = reserve_bytes
        #: When its lane heard of it.
        self.started_ns = started_ns
        #: While executing, the device's progress at which it ends; else the work left.
        self.mark = float(run_ns)
        self.executing = False
        self.stopping = False


#: In which order runs end, as all advance alike.
_end_order = attrgetter("mark", "lane_id")


class SimulatedDevice:
    """Lanes on which runs make progress at a pace set by how many execute.

    All that execute advance alike, so one number tells how far each is: the work that a run which
    always executed would have done. Changing the pace touches no run. The host has cores enough of
    its own: requests are prepared and answered side by side.
    """

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._runs: dict[LaneId, SimulatedRun] = {}
        self._executing: dict[LaneId, SimulatedRun] = {}
        #: Work done by a run that always executes, in time on an idle device, up to `_at_ns`; and
        #: work done in a nanosecond.
        self._progress = 0.0
        self._pace = 1.0
        self._at_ns = 0
        #: What executes changed since the pace was found, with the first end at it.
        self._changed = False
        self._end: tuple[int, LaneId] | None = None
        #: Pace of each of 1, 2, 3, … that execute.
        self._together = [1 / slowdown for slowdown in model.slowdown]
        self._launch_ns = model.launching_ns
        #: What jobs that run take of the pace, and what the next to execute waits for one to stop.
        self._beside_jobs = 1.0
        self._delay_ns = 0

    def launch(
        self, lane_id: LaneId, task_id: TaskId, run_ns: int, now_ns: int, reserve_bytes: int = 0
    ) -> None:
        """Start a run of `run_ns` work and that memory on the idle lane."""
        work_ns = run_ns + self._launch_ns - self._model.switch_ns
        started_ns = now_ns + self._launch_ns
        self._runs[lane_id] = SimulatedRun(task_id, lane_id, work_ns, started_ns, reserve_bytes)
        self.resume(lane_id, now_ns)

    def suspend(self, lane_id: LaneId, now_ns: int) -> None:
        """Stop the run on the lane where it is, unless it has just ended."""
        self._advance(now_ns)
        run = self._executing.pop(lane_id, None)
        if run is None:
            return
        run.executing = False
        run.mark = max(0.0, run.mark - self._progress)

    def resume(self, lane_id: LaneId, now_ns: int) -> None:
        """Let the run on the lane go on, if there is one that does not."""
        self._advance(now_ns)
        run = self._runs.get(lane_id)
        if run is None or run.executing:
            return
        run.executing = True
        self._executing[lane_id] = run
        # It works only once the switch has taken effect.
        run.mark += self._progress + self._model.switch_ns + self._delay_ns
        self._delay_ns = 0

    def set_jobs(self, running: int, now_ns: int) -> None:
        """Have so many training jobs run beside the runs."""
        beside = slowdown_beside(self._model.beside_jobs, running)
        if beside != self._beside_jobs:
            self._advance(now_ns)
            self._beside_jobs = beside

    def delay_next(self) -> None:
        """Have the next that executes wait for a job to stop."""
        self._delay_ns += self._model.pause_ns

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

    def _advance(self, now_ns: int) -> None:
        """Advance all runs up to now at the speed so far; what executes is about to change."""
        passed_ns = now_ns - self._at_ns
        if passed_ns:
            if self._changed:
                self._look_ahead()
            self._progress += passed_ns * self._pace
            self._at_ns = now_ns
        self._changed = True

    @property
    def _paged(self) -> bool:
        """Whether what executes has reserved more memory than there is."""
        capacity_bytes = self._model.capacity_bytes
        if capacity_bytes is None:
            return False
        return sum(run.reserve_bytes for run in self._executing.values()) > capacity_bytes

    def _look_ahead(self) -> None:
        """Find the pace, and who ends first at it."""
        self._end = None
        executing = len(self._executing)
        if executing:
            self._pace = self._together[min(executing, len(self._together)) - 1]
            if self._paged:
                self._pace /= self._model.paging
            if self._beside_jobs != 1.0:
                self._pace /= self._beside_jobs
            run = min(self._executing.values(), key=_end_order)
            left_ns = (run.mark - self._progress) / self._pace
            self._end = self._at_ns + max(0, round(left_ns)), run.lane_id
