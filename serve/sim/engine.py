"""The scheduler under a virtual clock: the live engine's decisions without its machine.

A heap of (time, sequence, event) drives the very ``Scheduler`` that serves; ``SimulatedDevice``
says how long runs take. Nothing is random here: the same offered requests give the same report.
"""

import gc
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

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
    TaskFailed,
    TaskFinished,
    TaskPrepared,
    Tick,
)
from serve.core.fleet.fleet import Fleet, make_scheduler
from serve.core.params import SchedulerParams
from serve.core.rules.cause import violation_cause
from serve.core.scheduler import Scheduler
from serve.core.types import Completed, FailReason, LaneId, Nanos, Task, TaskId, Usage
from serve.sim.device import DeviceModel, Offered, SimulatedDevice
from serve.sim.host import HostModel, Process
from serve.sim.report import Answered, SimReport, summarize


class Simulation:
    """One scheduler, its simulated devices, one stream of requests."""

    def __init__(self, scheduler: Scheduler | Fleet, model: DeviceModel) -> None:
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
        #: What the host does where it takes cores from the lanes, and who does it.
        self._host = model.host
        self._server, self._client = Process(), Process()
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
        for lane_id in self._of_lane:
            self._tell(LaneReady(lane_id))

    def run(self, requests: Iterable[Offered]) -> None:
        """Play `requests`, in order of arrival, until all are answered."""
        for offered in requests:
            arrived_ns = offered.task.arrived_ns
            while (next_ns := self.next_ns()) is not None and next_ns < arrived_ns:
                self._happen(next_ns)
            self.now_ns = max(self.now_ns, arrived_ns)
            self.offer(offered)
        while (next_ns := self.next_ns()) is not None:
            self._happen(next_ns)

    def offer(self, offered: Offered) -> None:
        """Send the request now; it arrives once client and server have done their part."""
        host = self._host
        if host is None:
            self._arrive(offered)
            return
        receive = partial(self._work, self._server, host.receive_ns, partial(self._arrive, offered))
        self._work(self._client, host.send_ns, receive)
        self._share_cores(host)

    def next_ns(self) -> int | None:
        """Return when something happens next by itself; None for never again."""
        next_ns: int | None = self.scheduler.next_wakeup()
        if self._due and (next_ns is None or self._due[0][0] < next_ns):
            next_ns = self._due[0][0]
        for device in self._devices:
            end = device.next_end()
            if end is not None and (next_ns is None or end[0] < next_ns):
                next_ns = end[0]
        if self._host is not None:
            for process in (self._server, self._client):
                end_ns = process.next_end()
                if end_ns is not None and (next_ns is None or end_ns < next_ns):
                    next_ns = end_ns
        return next_ns

    def step(self) -> None:
        """Let the next thing happen, if there is one."""
        next_ns = self.next_ns()
        if next_ns is not None:
            self._happen(next_ns)

    def _happen(self, next_ns: int) -> None:
        """Let happen what is due at `next_ns`: the end of a run first, a tick last."""
        self.now_ns = Nanos(next_ns)
        if not self._end_run(next_ns) and not self._end_work(next_ns):
            if self._due and self._due[0][0] == next_ns:
                self._tell(heapq.heappop(self._due)[2])
            else:
                self._tell(Tick())
        if self._host is not None:
            self._share_cores(self._host)

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
        finished = TaskFinished(task_id, lane_id, usage)
        if self._host is None:
            self._tell(finished)
        else:
            self._work(self._server, self._host.hear_ns, partial(self._tell, finished))
        return True

    def _tell(self, event: Event) -> None:
        for command in self.scheduler.handle(event, self.now_ns):
            self._obey(command)

    def _obey(self, command: Command) -> None:
        self._acts[type(command)](command)

    def _prepare(self, command: PrepareTask) -> None:
        prepare_ns = self._offered[command.task_id].prepare_ns
        prepared = TaskPrepared(command.task_id)
        if self._host is None:
            self._sequence += 1
            heapq.heappush(self._due, (self.now_ns + prepare_ns, self._sequence, prepared))
        else:
            self._work(self._server, prepare_ns, partial(self._tell, prepared))

    def _launch(self, command: LaunchTask) -> None:
        run_ns = self._run_ns(command)
        device = self._of_lane[command.lane_id]
        device.launch(command.lane_id, command.task_id, run_ns, self.now_ns)

    def _suspend(self, command: SuspendTask) -> None:
        self._of_lane[command.lane_id].suspend(command.lane_id, self.now_ns)

    def _resume(self, command: ResumeTask) -> None:
        self._of_lane[command.lane_id].resume(command.lane_id, self.now_ns)

    def _stop(self, command: StopTask) -> None:
        self._of_lane[command.lane_id].stop(command.lane_id, self.now_ns)

    def _answer(self, command: AnswerTask) -> None:
        offered, outcome = self._offered[command.task_id], command.outcome
        if not isinstance(outcome, Completed):
            self.answered.append(Answered(offered.task, outcome, self.now_ns, None))
        elif self._host is None:
            self._left(offered.task, outcome, Nanos(self.now_ns + offered.answer_ns))
        else:
            answered = partial(self._answered, self._host, offered.task, outcome)
            self._work(self._server, offered.answer_ns, answered)

    def _release(self, command: ReleaseTask) -> None:
        del self._offered[command.task_id]

    def _left(self, task: Task, outcome: Completed, answered_ns: Nanos) -> None:
        """Note that the answer is out."""
        cause = violation_cause(task, outcome, answered_ns)
        self.answered.append(Answered(task, outcome, answered_ns, cause))

    # The host, where it shares cores with the lanes.

    def _work(self, process: Process, work_ns: int, then: Callable[[], None]) -> None:
        process.do(work_ns, then, self.now_ns)

    def _end_work(self, next_ns: int) -> bool:
        """Go on with the work that a process of the host has just done, if there is any."""
        if self._host is not None:
            for process in (self._server, self._client):
                if process.next_end() == next_ns:
                    process.end(self.now_ns)()
                    return True
        return False

    def _arrive(self, offered: Offered) -> None:
        """Tell the scheduler that the request arrived."""
        if self._host is not None:
            task = msgspec.structs.replace(offered.task, arrived_ns=self.now_ns)
            offered = replace(offered, task=task)
        self._offered[offered.task.task_id] = offered
        self._tell(TaskArrived(offered.task))

    def _answered(self, host: HostModel, task: Task, outcome: Completed) -> None:
        """Note that the answer is out, which leaves work to do on both sides."""
        self._left(task, outcome, self.now_ns)
        self._work(self._server, host.finish_ns, _nothing)
        self._work(self._client, host.read_ns, _nothing)

    def _share_cores(self, host: HostModel) -> None:
        """Give each who wants a core now its share."""
        runs = [sum(on) for on in zip(*(d.executing_on for d in self._devices), strict=True)]
        shares = host.shares(self._server.busy, self._client.busy, runs)
        self._server.gets(shares.server, self.now_ns)
        self._client.gets(shares.client, self.now_ns)
        for device in self._devices:
            device.gets(shares.runs, self.now_ns)

    def _run_ns(self, command: LaunchTask) -> int:
        """Return what the launched run truly takes.

        A union is as far off its estimate as its members together are off theirs.
        """
        first = self._offered[command.task_id]
        unions = self.scheduler.params.unions
        if not command.companions or unions is None:
            return first.run_ns
        members = [first, *(self._offered[task_id] for task_id in command.companions)]
        sizes = [(offered.task.num_nodes, offered.task.num_edges) for offered in members]
        together = unions(first.task.model, sizes)
        assert together is not None
        true_ns = sum(offered.run_ns for offered in members)
        estimated_ns = sum(offered.task.estimate.run_ns for offered in members)
        return together.run_ns * true_ns // estimated_ns


def _nothing() -> None:
    """Do nothing: what follows the last piece of work for a request."""


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
