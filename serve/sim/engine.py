"""The scheduler under a virtual clock: the live engine's decisions without its machine.

A heap of (time, sequence, event) drives the very ``Scheduler`` that serves; ``SimulatedDevice``
says how long runs take. Nothing is random here: the same offered requests give the same report.
"""

import heapq
from collections.abc import Iterable, Sequence

from serve.core.blame import violation_cause
from serve.core.commands import (
    AnswerTask,
    Command,
    LaunchTask,
    PrepareTask,
    ResumeTask,
    SuspendTask,
)
from serve.core.events import Event, LaneReady, TaskArrived, TaskFinished, TaskPrepared, Tick
from serve.core.params import SchedulerParams
from serve.core.scheduler import Scheduler
from serve.core.types import Completed, LaneId, Nanos, TaskId, Usage
from serve.sim.device import DeviceModel, Offered, SimulatedDevice
from serve.sim.report import Answered, SimReport, summarize


class Simulation:
    """One scheduler, one simulated device, one stream of requests."""

    def __init__(self, params: SchedulerParams, model: DeviceModel) -> None:
        self.scheduler = Scheduler(params)
        self.answered: list[Answered] = []
        self._device = SimulatedDevice(model)
        self._offered: dict[TaskId, Offered] = {}
        self._now = 0
        self._sequence = 0
        #: (time, sequence, event) or, for the foreseen end of a run, (…, (lane, task, version)).
        self._due: list[tuple[int, int, Event | tuple[LaneId, TaskId, int]]] = []
        for lane_id in params.device.lane_ids:
            self._tell(LaneReady(lane_id))

    def run(self, requests: Iterable[Offered]) -> None:
        """Play `requests`, in order of arrival, until all are answered."""
        for offered in requests:
            self._play_until(offered.task.arrived_ns)
            self._now = max(self._now, offered.task.arrived_ns)
            self._offered[offered.task.task_id] = offered
            self._tell(TaskArrived(offered.task))
        self._play_until(None)

    def _play_until(self, end_ns: int | None) -> None:
        """Everything that happens before `end_ns`, or until nothing is left to happen."""
        while True:
            wake_ns = self.scheduler.next_wakeup()
            due_ns = self._due[0][0] if self._due else None
            times = [time for time in (wake_ns, due_ns) if time is not None]
            if not times or (end_ns is not None and min(times) >= end_ns):
                return
            self._now = min(times)
            if due_ns != self._now:
                self._tell(Tick())
                continue
            _, _, entry = heapq.heappop(self._due)
            if isinstance(entry, tuple):
                self._end_run(*entry)
            else:
                self._tell(entry)

    def _end_run(self, lane_id: LaneId, task_id: TaskId, version: int) -> None:
        if not self._device.current(lane_id, task_id, version):
            return
        run = self._device.end(lane_id, self._now)
        self._foresee()
        peak_bytes = self._offered[task_id].task.estimate.peak_bytes
        usage = Usage(Nanos(run.worked_ns), peak_bytes)
        self._tell(TaskFinished(task_id, lane_id, usage))

    def _tell(self, event: Event) -> None:
        changed = False
        for command in self.scheduler.handle(event, Nanos(self._now)):
            changed |= self._obey(command)
        if changed:
            self._foresee()

    def _obey(self, command: Command) -> bool:
        """Carry out one command; whether it changed what executes."""
        match command:
            case PrepareTask(task_id):
                prepare_ns = self._offered[task_id].prepare_ns
                self._later(self._now + prepare_ns, TaskPrepared(task_id))
            case LaunchTask(task_id, lane_id):
                self._device.launch(lane_id, task_id, self._offered[task_id].run_ns, self._now)
                return True
            case SuspendTask(_, lane_id):
                self._device.suspend(lane_id, self._now)
                return True
            case ResumeTask(_, lane_id):
                self._device.resume(lane_id, self._now)
                return True
            case AnswerTask(task_id, outcome):
                offered = self._offered.pop(task_id)
                late = None
                answered_ns = self._now + offered.answer_ns
                if isinstance(outcome, Completed):
                    late = violation_cause(offered.task, outcome, answered_ns)
                self.answered.append(Answered(offered.task, outcome, Nanos(answered_ns), late))
        return False

    def _foresee(self) -> None:
        for at_ns, lane_id, task_id, version in self._device.ends():
            self._later(at_ns, (lane_id, task_id, version))

    def _later(self, at_ns: int, entry: Event | tuple[LaneId, TaskId, int]) -> None:
        self._sequence += 1
        heapq.heappush(self._due, (at_ns, self._sequence, entry))


def simulate(
    requests: Sequence[Offered], params: SchedulerParams, model: DeviceModel | None = None
) -> SimReport:
    """Serve `requests`, in order of arrival, and report how that went."""
    simulation = Simulation(params, model or DeviceModel())
    simulation.run(requests)
    return summarize(simulation.answered)
