"""A device that exists only in numbers: how long things take on it, beside what."""

from dataclasses import dataclass

from serve.core.types import ZERO_NS, LaneId, Nanos, Task, TaskId

#: Stopping or waking a process: tens of microseconds.
SWITCH_NS = Nanos(30_000)
#: From the command to stop a run until its lane is free: up to one operation of its model.
STOP_NS = Nanos(500_000)
#: Of a core, for a lane beside work of the host: what their niceness gives lanes on Linux.
_LEAST_SHARE = 0.25


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
    #: Cores that lanes share with the host; None: the host has cores of its own.
    shared_cores: int | None = None
    #: How much of a core each request being prepared or answered then takes from the lanes, 0 to 1:
    #: the server's own process, and the client where it is on the same machine.
    host_share: float = 0.0

    def __post_init__(self) -> None:
        if not self.slowdown or min(self.slowdown) <= 0:
            raise ValueError(f"slowdown must be positive numbers, got {self.slowdown}")
        if not 0 <= self.host_share <= 1:
            raise ValueError(f"host_share must be 0 to 1, got {self.host_share}")
        if self.shared_cores is not None and self.shared_cores < 1:
            raise ValueError(f"shared_cores must be at least 1, got {self.shared_cores}")

    @property
    def shares_cores(self) -> bool:
        """Whether work of the host slows runs down."""
        return self.shared_cores is not None and self.host_share > 0

    def pace(self, executing: int, in_host: int) -> float:
        """How much longer runs take while `executing` of them do, beside the host's work."""
        slowdown = self.slowdown_beside(executing - 1)
        if self.shared_cores is None:
            return slowdown
        left = self.shared_cores - self.host_share * in_host
        # However much the host has to do, the system leaves lanes a part of their cores.
        left = max(left, min(executing, self.shared_cores) * _LEAST_SHARE)
        return slowdown * max(1.0, min(executing, self.shared_cores) / left)

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
        self._in_host = 0
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

    def host(self, change: int, now_ns: int) -> None:
        """So many requests more, or fewer, are being prepared or answered."""
        self._advance(now_ns)
        self._in_host += change

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
        self._slowdown = slowdown = self._model.pace(len(runs), self._in_host)
        first, lane_id = min([(run.mark, lane_id) for lane_id, run in runs.items()])
        left_ns = round((first - self._progress) * slowdown)
        self._end = self._at_ns + (left_ns if left_ns > 0 else 0), lane_id
