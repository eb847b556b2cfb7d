"""A device that exists only in numbers: how long things take on it, beside what."""

from dataclasses import dataclass

from serve.core.types import ZERO_NS, LaneId, Nanos, Task, TaskId

#: Stopping or waking a process: tens of microseconds.
SWITCH_NS = Nanos(30_000)


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
    #: From a command to launch, suspend or resume until it has taken effect.
    switch_ns: Nanos = SWITCH_NS

    def __post_init__(self) -> None:
        if not self.slowdown or min(self.slowdown) <= 0:
            raise ValueError(f"slowdown must be positive numbers, got {self.slowdown}")

    def slowdown_beside(self, others: int) -> float:
        """The slowdown of a task with `others` executing beside it."""
        return self.slowdown[min(others, len(self.slowdown) - 1)]


class Run:
    """One task on a lane."""

    __slots__ = ("executing", "left_ns", "since_ns", "task_id", "version", "worked_ns")

    def __init__(self, task_id: TaskId, left_ns: float) -> None:
        self.task_id = task_id
        #: Work left, in time on an idle device, as of `since_ns`.
        self.left_ns = left_ns
        #: Time spent executing so far.
        self.worked_ns = 0
        self.since_ns = 0
        self.executing = False
        #: Counts the changes of its pace; an end foreseen before the last one is void.
        self.version = 0


class SimulatedDevice:
    """Lanes on which runs make progress at a pace set by how many execute."""

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._runs: dict[LaneId, Run] = {}
        self._executing = 0

    def launch(self, lane_id: LaneId, task_id: TaskId, run_ns: int, now_ns: int) -> None:
        """Start a run of `run_ns` work on the idle lane."""
        run = Run(task_id, float(run_ns))
        self._runs[lane_id] = run
        self._start(run, now_ns)

    def suspend(self, lane_id: LaneId, now_ns: int) -> None:
        """Stop the run on the lane where it is."""
        self._progress(now_ns)
        run = self._runs[lane_id]
        run.executing = False
        run.version += 1
        self._executing -= 1

    def resume(self, lane_id: LaneId, now_ns: int) -> None:
        """Let the run on the lane go on."""
        self._start(self._runs[lane_id], now_ns)

    def end(self, lane_id: LaneId, now_ns: int) -> Run:
        """Take the ended run off the lane."""
        self._progress(now_ns)
        run = self._runs.pop(lane_id)
        self._executing -= run.executing
        return run

    def current(self, lane_id: LaneId, task_id: TaskId, version: int) -> bool:
        """Whether an end foreseen at that version still stands."""
        run = self._runs.get(lane_id)
        return run is not None and run.task_id == task_id and run.version == version

    def ends(self) -> list[tuple[int, LaneId, TaskId, int]]:
        """(when, lane, task, version) for every executing run, at the pace of this moment."""
        slowdown = self._model.slowdown_beside(self._executing - 1)
        found = []
        for lane_id, run in self._runs.items():
            if run.executing:
                run.version += 1
                at_ns = run.since_ns + round(run.left_ns * slowdown)
                found.append((at_ns, lane_id, run.task_id, run.version))
        return found

    def _start(self, run: Run, now_ns: int) -> None:
        self._progress(now_ns)
        run.executing = True
        # It works only once the switch has taken effect.
        run.left_ns += self._model.switch_ns
        run.since_ns = now_ns
        self._executing += 1

    def _progress(self, now_ns: int) -> None:
        """Account for the work done since the pace last changed."""
        slowdown = self._model.slowdown_beside(self._executing - 1)
        for run in self._runs.values():
            if run.executing:
                passed_ns = now_ns - run.since_ns
                run.worked_ns += passed_ns
                run.left_ns = max(0.0, run.left_ns - passed_ns / slowdown)
                run.since_ns = now_ns
