"""The scheduler under a virtual clock: the live engine's decisions without its machine.

A heap of (time, sequence, event) drives the very ``Scheduler`` that serves; ``SimulatedDevice``
says how long runs take. Nothing is random here: the same offered requests give the same report.
"""

import gc
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from serve.core.commands import (
    AnswerTask,
    Command,
    LaunchTask,
    LookAtLane,
    PrepareTask,
    ReleaseTask,
    ResumeTask,
    StopTask,
    SuspendTask,
)
from serve.core.events import (
    Event,
    LaneReady,
    TaskArrived,
    TaskCancelled,
    TaskFailed,
    TaskFinished,
    TaskPrepared,
    Tick,
)
from serve.core.fleet.fleet import Fleet, make_scheduler
from serve.core.jobs.commands import (
    EndJob,
    JobCommand,
    PauseJob,
    PrepareJob,
    ResumeJob,
    StartJob,
    StopJob,
)
from serve.core.params import SchedulerParams
from serve.core.rules.cause import violation_cause
from serve.core.scheduler import Scheduler
from serve.core.types import Completed, FailReason, LaneId, Nanos, TaskId, Usage
from serve.sim.device import DeviceModel, Offered, SimulatedDevice
from serve.sim.jobs import OfferedJob, SimulatedJobs
from serve.sim.report import Answered, SimReport, summarize


class Simulation:
    """One scheduler, its simulated devices, one stream of requests, and jobs beside it."""

    def __init__(
        self, scheduler: Scheduler | Fleet, model: DeviceModel, jobs: tuple[OfferedJob, ...] = ()
    ) -> None:
        self.scheduler = scheduler
        #: Every request at its end, in order of their answers.
        self.answered: list[Answered] = []
        self.now_ns = Nanos(0)
        self._devices: list[SimulatedDevice] = []
        self._of_lane: dict[LaneId, SimulatedDevice] = {}
        for facts in scheduler.params.devices:
            device = SimulatedDevice(model)
            self._devices.append(device)
            self._of_lane |= dict.fromkeys(facts.lane_ids, device)
        #: Every request that is not released.
        self._offered: dict[TaskId, Offered] = {}
        self._sequence = 0
        #: (time, sequence, event).
        self._due: list[tuple[int, int, Event]] = []
        self._acts: dict[type[Command], Callable[[Any], None]] = {
            PrepareTask: self._prepare,
            LaunchTask: self._launch,
            SuspendTask: self._suspend,
            ResumeTask: self._resume,
            StopTask: self._stop,
            # Simulated lanes never hang.
            LookAtLane: lambda command: None,
            AnswerTask: self._answer,
            ReleaseTask: self._release,
        }
        self.jobs: SimulatedJobs | None = None
        if jobs:
            self.jobs = SimulatedJobs(scheduler.devices[0].jobs, jobs)
            for kind in (PrepareJob, StartJob, PauseJob, ResumeJob, StopJob, EndJob):
                self._acts[kind] = self._obey_for_jobs
        for lane_id in self._of_lane:
            self._tell(LaneReady(lane_id))

    def run(self, requests: Iterable[Offered]) -> None:
        """Play `requests`, in order of arrival, until all are answered."""
        for offered in requests:
            arrived_ns = offered.task.arrived_ns
            self.advance(arrived_ns)
            self.offer(offered)
        while (next_ns := self.next_ns()) is not None:
            self._happen(next_ns)

    def advance(self, until_ns: int) -> None:
        """Let everything happen that is due before `until_ns`, which is now then."""
        while (next_ns := self.next_ns()) is not None and next_ns < until_ns:
            self._happen(next_ns)
        self.now_ns = Nanos(max(self.now_ns, until_ns))

    def cancel(self, task_id: TaskId) -> None:
        """Tell the scheduler that the client of a request goes away now."""
        self._tell(TaskCancelled(task_id))

    def offer(self, offered: Offered) -> None:
        """Tell the scheduler that the request arrives now."""
        self._offered[offered.task.task_id] = offered
        # What is of best effort comes prepared, as in the server.
        prepared_ns = self.now_ns if offered.task.best_effort else None
        self._tell(TaskArrived(offered.task, prepared_ns))

    def next_ns(self) -> int | None:
        """Return when something happens next by itself; None for never again."""
        next_ns: int | None = self.scheduler.next_wakeup()
        if self._due and (next_ns is None or self._due[0][0] < next_ns):
            next_ns = self._due[0][0]
        for device in self._devices:
            end = device.next_end()
            if end is not None and (next_ns is None or end[0] < next_ns):
                next_ns = end[0]
        if self.jobs is not None:
            job_ns = self.jobs.next_ns(self.now_ns)
            if job_ns is not None and (next_ns is None or job_ns < next_ns):
                next_ns = job_ns
        return next_ns

    def step(self) -> None:
        """Let the next thing happen, if there is one."""
        next_ns = self.next_ns()
        if next_ns is not None:
            self._happen(next_ns)

    def _happen(self, next_ns: int) -> None:
        """Let happen what is due at `next_ns`: the end of a run first, a tick, then jobs."""
        self.now_ns = Nanos(next_ns)
        if self._end_run(next_ns):
            return
        if self._due and self._due[0][0] == next_ns:
            self._tell(heapq.heappop(self._due)[2])
        elif self.jobs is None or self.scheduler.next_wakeup() == next_ns:
            self._tell(Tick())
        else:
            self._tell(self.jobs.take(next_ns))

    def _end_run(self, next_ns: int) -> bool:
        """Tell the end of the run that is over now, if there is one."""
        for device in self._devices:
            end = device.next_end()
            if end is not None and end[0] == next_ns:
                break
        else:
            return False
        lane_id = end[1]
        run = device.end(lane_id, self.now_ns)
        task_id = run.task_id
        if run.stopping:
            self._tell(TaskFailed(task_id, lane_id, FailReason.STOPPED, "stopped"))
            return True
        peak_bytes = self._offered[task_id].task.estimate.peak_bytes
        # As a lane counts it: from when it heard of the task, also while it stood suspended.
        usage = Usage(Nanos(max(0, self.now_ns - run.started_ns)), peak_bytes)
        self._tell(TaskFinished(task_id, lane_id, usage))
        return True

    def _tell(self, event: Event) -> None:
        for command in self.scheduler.handle(event, self.now_ns):
            self._obey(command)

    def _obey(self, command: Command) -> None:
        self._acts[type(command)](command)

    def _obey_for_jobs(self, command: JobCommand) -> None:
        assert self.jobs is not None
        self.jobs.obey(command, self.now_ns)
        device = self._devices[0]
        device.set_jobs(self.jobs.running, self.now_ns)
        if isinstance(command, PauseJob):
            device.delay_next()

    def _prepare(self, command: PrepareTask) -> None:
        at_ns = self.now_ns + self._offered[command.task_id].prepare_ns
        self._sequence += 1
        heapq.heappush(self._due, (at_ns, self._sequence, TaskPrepared(command.task_id)))

    def _launch(self, command: LaunchTask) -> None:
        run_ns = self._run_ns(command)
        device = self._of_lane[command.lane_id]
        device.launch(command.lane_id, command.task_id, run_ns, self.now_ns, command.reserve_bytes)

    def _suspend(self, command: SuspendTask) -> None:
        self._of_lane[command.lane_id].suspend(command.lane_id, self.now_ns)

    def _resume(self, command: ResumeTask) -> None:
        self._of_lane[command.lane_id].resume(command.lane_id, self.now_ns)

    def _stop(self, command: StopTask) -> None:
        self._of_lane[command.lane_id].stop(command.lane_id, self.now_ns)

    def _answer(self, command: AnswerTask) -> None:
        offered, outcome = self._offered[command.task_id], command.outcome
        answered_ns, cause = self.now_ns, None
        if isinstance(outcome, Completed):
            answered_ns = Nanos(answered_ns + offered.answer_ns)
            cause = violation_cause(offered.task, outcome, answered_ns)
        self.answered.append(Answered(offered.task, outcome, answered_ns, cause))

    def _release(self, command: ReleaseTask) -> None:
        del self._offered[command.task_id]

    def _run_ns(self, command: LaunchTask) -> int:
        """Return what the launched run truly takes.

        A union is as far off its estimate as its members together are off theirs.
        """
        first = self._offered[command.task_id]
        unions = self.scheduler.params.unions
        if not command.companions or unions is None:
            return first.run_ns
        members = [first, *(self._offered[task_id] for task_id in command.companions)]
        sizes = [offered.task.counted for offered in members]
        together = unions(first.task.model, sizes)
        assert together is not None
        true_ns = sum(offered.run_ns for offered in members)
        estimated_ns = sum(offered.task.estimate.run_ns for offered in members)
        return together.run_ns * true_ns // estimated_ns


def simulate(
    requests: Sequence[Offered], params: SchedulerParams, model: DeviceModel | None = None
) -> SimReport:
    """Serve `requests`, in order of arrival, and report how that went."""
    simulation = Simulation(make_scheduler(params), model or DeviceModel())
    # Nothing here refers back to itself, so looking for garbage among a million answers finds none.
    collecting = gc.isenabled()
    gc.disable()
    try:
        simulation.run(requests)
    finally:
        if collecting:
            gc.enable()
    return summarize(simulation.answered)
