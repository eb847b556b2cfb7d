"""A device that exists only in numbers: how long things take on it, beside what."""

from dataclasses import dataclass

from serve.core.types import ZERO_NS, LaneId, Nanos, Task, TaskId
from serve.sim.host import HostModel

#: Stopping or waking a process: tens of microseconds.
SWITCH_NS = Nanos(30_000)
#: From the command to stop a run until its lane is free: up to one operation of its model.
STOP_NS = Nanos(500_000)


@dataclass(frozen=True, slots=True)
class Offered:
    """One request with what it truly takes; the task carries what is estimated."""

    task: Task
    #: Forward pass on an idle device.
    run_ns: Nanos
    #: Preparing on the host.
    prepare_ns: Nanos
    #: From the end of the run until the answer is out.
    answer_ns: Nanos = ZERO_NS


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """What the numbers are."""

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

    def slowdown_beside(self, others: int) -> float:
        """The slowdown of a task with `others` executing beside it."""
        return self.slowdown[min(others, len(self.slowdown) - 1)]


class Run:
    """One task on a lane."""

    __slots__ = ("executing", "mark", "started_ns", "stopping", "task_id")

    def __init__(self, task_id: TaskId, run_ns: int, started_ns: int) -> None:
        self.task_id = task_id
        #: When its lane heard of it.
        self.started_ns = started_ns
        #: While executing, the device's progress at which it ends; else the work left.
        self.mark = float(run_ns)
        self.executing = False
        self.stopping = False


class SimulatedDevice:
    """Lanes on which runs make progress at a pace set by how many execute.

    All that execute advance alike, so one number tells how far each is: the work that a run which
    always executed would have done. Changing the pace touches no run.
    """

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._runs: dict[LaneId, Run] = {}
        self._executing: dict[LaneId, Run] = {}
        #: Work done by one that always executes, in time on an idle device, up to `_at_ns`.
        self._progress = 0.0
        self._at_ns = 0
        self._slowdown = 1.0
        #: What executes changed since the pace was found, with the first end at it.
        self._changed = False
        self._end: tuple[int, LaneId] | None = None
        #: Of a core, for each run.
        self._share = 1.0
        self._launch_ns = model.switch_ns if model.launch_ns is None else model.launch_ns

    def launch(self, lane_id: LaneId, task_id: TaskId, run_ns: int, now_ns: int) -> None:
        """Start a run of `run_ns` work on the idle lane."""
        work_ns = run_ns + self._launch_ns - self._model.switch_ns
        self._runs[lane_id] = Run(task_id, work_ns, now_ns + self._launch_ns)
        self.resume(lane_id, now_ns)

    def suspend(self, lane_id: LaneId, now_ns: int) -> None:
        """Stop the run on the lane where it is."""
        self._advance(now_ns)
        run = self._executing.pop(lane_id)
        run.executing = False
        run.mark = max(0.0, run.mark - self._progress)

    def resume(self, lane_id: LaneId, now_ns: int) -> None:
        """Let the run on the lane go on, if it does not."""
        self._advance(now_ns)
        run = self._executing[lane_id] = self._runs[lane_id]
        if run.executing:
            return
        run.executing = True
        # It works only once the switch has taken effect.
        run.mark += self._progress + self._model.switch_ns

    @property
    def executing_count(self) -> int:
        """Runs that execute."""
        return len(self._executing)

    def gets(self, share: float, now_ns: int) -> None:
        """From now on each run gets so much of a core."""
        if share != self._share:
            self._advance(now_ns)
            self._share = share

    def stop(self, lane_id: LaneId, now_ns: int) -> None:
        """Have the run on the lane end within `stop_ns`, also if it was suspended."""
        run = self._runs[lane_id]
        if run.executing:
            self.suspend(lane_id, now_ns)
        run.mark = min(run.mark, float(self._model.stop_ns))
        run.stopping = True
        self.resume(lane_id, now_ns)

    def end(self, lane_id: LaneId, now_ns: int) -> Run:
        """Take the run off its lane."""
        if self._runs[lane_id].executing:
            self.suspend(lane_id, now_ns)
        return self._runs.pop(lane_id)

    def next_end(self) -> tuple[int, LaneId] | None:
        """(when, lane) of the run that ends first if the pace stays; None when none executes."""
        if self._changed:
            self._changed = False
            self._look_ahead()
        return self._end

    def _advance(self, now_ns: int) -> None:
        """Up to now at the pace so far; what executes is about to change."""
        if now_ns != self._at_ns:
            if self._changed:
                self._look_ahead()
            self._progress += (now_ns - self._at_ns) / self._slowdown
            self._at_ns = now_ns
        self._changed = True

    def _look_ahead(self) -> None:
        """Find the pace, and who ends first at it."""
        runs = self._executing
        if not runs:
            self._end = None
            return
        self._slowdown = slowdown = self._model.slowdown_beside(len(runs) - 1) / self._share
        first, lane_id = min([(run.mark, lane_id) for lane_id, run in runs.items()])
        left_ns = round((first - self._progress) * slowdown)
        self._end = self._at_ns + (left_ns if left_ns > 0 else 0), lane_id
