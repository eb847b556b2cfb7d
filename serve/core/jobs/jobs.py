"""Training jobs of one device: which of them run, on what requests leave.

1. **Requests first.** No decision about a request reads anything of this module: jobs have
   workers and memory of their own, and slots are counted without them.
2. **What is left over**: the slots in which nothing executes once the discipline waits, also those
   that a barrier, memory or co-runners leave empty.
3. **Slack**: as many of the first jobs run as ``slack`` allows, the others stand paused.
4. **No thrashing**: a job goes on only if the next request is expected no sooner than several
   switches from now.

Which jobs are on workers together is for the policies of requests to say, with jobs as tasks
without a target: CoGNN's Base is `fifo`, its LMCF and BMC are `lmcf` and `bmc`.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from serve.core.jobs.commands import (
    EndJob,
    JobCommand,
    PauseJob,
    PrepareJob,
    ResumeJob,
    StartJob,
    StopJob,
)
from serve.core.jobs.events import (
    JobCancelled,
    JobEvent,
    JobFailed,
    JobFinished,
    JobLost,
    JobOverran,
    JobPrepared,
    JobSlowdownChanged,
    JobsTick,
    JobSubmitted,
    StepsDone,
)
from serve.core.jobs.lifecycle import TRANSITIONS, JobState
from serve.core.jobs.slack import SlackGovernor
from serve.core.jobs.types import Job, JobEnd, JobId, JobNeeds, JobOutcome, JobRules
from serve.core.policies import get_policy
from serve.core.rules.window import Window
from serve.core.state.device_state import Board
from serve.core.state.ledger import Ledger
from serve.core.types import Bytes, Capacity, Nanos, QoS, Task, TaskEstimate, TaskId
from serve.errors import InvariantViolation

#: The next request is expected no sooner than so many switches from now.
_SWITCHES_APART = 4
#: A job that was lost so often without a further step in between has failed.
_MOST_LOSSES = 3
_NO_TARGET = QoS(Nanos(1 << 62))


class JobRecord(msgspec.Struct, eq=False):
    """Job that has not ended."""

    job: Job
    state: JobState = JobState.QUEUED
    needs: JobNeeds | None = None
    reserve_bytes: Bytes = Bytes(0)
    steps_done: int = 0
    #: The most that were ever done, which a loss takes back.
    most_steps: int = 0
    #: Times it was lost since these were done.
    losses: int = 0
    overran: bool = False


class TrainingJobs:
    """Decides for the jobs of one device."""

    __slots__ = (
        "_board",
        "_governor",
        "_group",
        "_newest",
        "_on",
        "_out",
        "_plan",
        "_policy",
        "_rules",
        "_window",
        "ledger",
        "on_workers",
        "records",
        "wake_ns",
    )

    def __init__(self, rules: JobRules, board: Board, window: Window) -> None:
        self._rules, self._board, self._window = rules, board, window
        self._policy = get_policy(rules.policy)
        self._governor = SlackGovernor(rules, board)
        self.ledger = Ledger(rules.memory_bytes)
        #: All that have not ended.
        self.records: dict[JobId, JobRecord] = {}
        #: Those with a process, first started first; those that run come before those that stand.
        self.on_workers: list[JobRecord] = []
        #: When a ``JobsTick`` is needed unless another event comes first; None for never.
        self.wake_ns: Nanos | None = None
        self._newest = JobId(-1)
        #: Groups of READY jobs in order of their start; None when these have changed. With a
        #: barrier, what is left of the group that started.
        self._plan: list[list[JobRecord]] | None = None
        self._group: list[JobRecord] = []
        self._out: list[Any] = []
        self._on: dict[type[JobEvent], Callable[[Any], None]] = {
            JobSubmitted: self._on_submitted,
            JobPrepared: self._on_prepared,
            StepsDone: self._on_steps_done,
            JobFinished: lambda event: self._end(event, JobEnd.DONE),
            JobFailed: lambda event: self._end(event, JobEnd.FAILED, event.message),
            JobOverran: self._on_overran,
            JobLost: self._on_lost,
            JobCancelled: self._on_cancelled,
            JobSlowdownChanged: lambda event: self._governor.set_slowdown(event.slowdown),
            JobsTick: lambda event: None,
        }

    def take_in(self, event: JobEvent, out: list[Any]) -> None:
        """Change what the event is about; ``settle`` comes next."""
        self._out = out
        self._on[type(event)](event)

    def settle(
        self, now_ns: Nanos, out: list[Any], *, draining: bool, answers: bool = False
    ) -> None:
        """Pause, let go on, start and prepare jobs once all is decided for requests.

        With `answers` there may be some to give first: jobs go on and start at a ``JobsTick``,
        which is then asked for at once.
        """
        self._settle(now_ns, out, draining, answers)
        self._board.job_time.set_running(self.running_count, now_ns)

    def _settle(self, now_ns: Nanos, out: list[Any], draining: bool, answers: bool) -> None:
        self._out, self.wake_ns = out, None
        if draining:
            for record in [*self.on_workers]:
                self._leave(record, StopJob)
                out.append(StopJob(record.job.job_id))
            return
        most = self._governor.most(now_ns)
        pauses: list[JobCommand] = []
        for record in self.on_workers[most:]:
            if record.state is JobState.RUNNING:
                self._step(record, PauseJob)
                pauses.append(PauseJob(record.job.job_id))
        out[:0] = pauses
        resumable = [r for r in self.on_workers[:most] if r.state is JobState.PAUSED]
        startable = len(self.on_workers) < most and self._startable() is not None
        if resumable or startable:
            quiet_from_ns = self._window.quiet_from_ns(
                Nanos(_SWITCHES_APART * self._rules.switch_ns)
            )
            if answers or now_ns < quiet_from_ns:
                self.wake_ns = max(now_ns, quiet_from_ns)
            else:
                for record in resumable:
                    self._step(record, ResumeJob)
                    out.append(ResumeJob(record.job.job_id))
                self._start(most)
        self._prepare_next()
        ends_ns = self._governor.ends_ns(self.running_count, now_ns)
        if ends_ns is not None and (self.wake_ns is None or ends_ns < self.wake_ns):
            self.wake_ns = ends_ns

    @property
    def running_count(self) -> int:
        """Jobs that train now."""
        return sum(record.state is JobState.RUNNING for record in self.on_workers)

    def state(self, job_id: JobId) -> JobState | None:
        """Return the job's state; None if it was never submitted."""
        record = self.records.get(job_id)
        if record is not None:
            return record.state
        return JobState.ENDED if job_id <= self._newest else None

    # Starting.

    def _start(self, most: int) -> None:
        while len(self.on_workers) < most and (record := self._startable()) is not None:
            group = self._group if self._holds_groups else self._planned()[0]
            group.remove(record)
            self._step(record, StartJob)
            self.ledger.reserve(_task_id(record), record.reserve_bytes)
            self.on_workers.append(record)
            self._out.append(StartJob(record.job.job_id, record.reserve_bytes))

    @property
    def _holds_groups(self) -> bool:
        return self._rules.discipline == "barrier"

    def _startable(self) -> JobRecord | None:
        """Return the job that starts next, when a worker and memory are free for it.

        None passes another that waits for memory.
        """
        if len(self.on_workers) >= self._rules.workers:
            return None
        if self._holds_groups:
            if not self._group and not self.on_workers and self._planned():
                self._group = self._planned().pop(0)
            first = self._group[0] if self._group else None
        else:
            first = self._planned()[0][0] if self._planned() else None
        fits = first is not None and first.reserve_bytes <= self.ledger.available_bytes
        return first if fits else None

    def _planned(self) -> list[list[JobRecord]]:
        """Return the groups of READY jobs, none of them empty."""
        if self._plan is None:
            ready = [
                _as_task(record)
                for record in self.records.values()
                if record.state is JobState.READY and record not in self._group
            ]
            capacity = Capacity(self._rules.memory_bytes, max(1, self._rules.workers))
            # Without a target or an arrival, no policy looks at the clock.
            groups = self._policy.plan(ready, capacity, Nanos(0))
            self._plan = [
                [self.records[JobId(int(task.task_id))] for task in group.tasks] for group in groups
            ]
        while self._plan and not self._plan[0]:
            self._plan.pop(0)
        return self._plan

    def _prepare_next(self) -> None:
        """Have one job after another measured, in order of submission."""
        states = {record.state for record in self.records.values()}
        if JobState.QUEUED in states and JobState.PREPARING not in states:
            record = next(r for r in self.records.values() if r.state is JobState.QUEUED)
            self._step(record, PrepareJob)
            self._out.append(PrepareJob(record.job.job_id))

    # Events.

    def _on_submitted(self, event: JobSubmitted) -> None:
        job = event.job
        if job.job_id <= self._newest:
            raise InvariantViolation(f"job {job.job_id} after job {self._newest}")
        self._newest = job.job_id
        self.records[job.job_id] = record = JobRecord(
            job, steps_done=job.steps_done, most_steps=job.steps_done
        )
        if not self._rules.workers:
            self._ended(record, JobOutcome(JobEnd.FAILED, "there are no workers for training"))

    def _on_prepared(self, event: JobPrepared) -> None:
        record = self._record(event.job_id)
        if record is None:
            return
        need_bytes, most_bytes = event.needs.reserve_bytes, self._rules.memory_bytes
        if need_bytes > most_bytes:
            message = f"needs {need_bytes} bytes, there are {most_bytes} for training"
            self._end(JobFailed(event.job_id, message), JobEnd.FAILED, message)
            return
        record.needs, record.reserve_bytes = event.needs, need_bytes
        self._step(record, JobPrepared)

    def _on_steps_done(self, event: StepsDone) -> None:
        record = self._record(event.job_id)
        if record is not None:
            self._step(record, StepsDone)
            record.steps_done = event.steps
            if event.steps > record.most_steps:
                record.most_steps, record.losses = event.steps, 0

    def _on_overran(self, event: JobOverran) -> None:
        record = self._record(event.job_id)
        if record is None:
            return
        if record.overran or record.reserve_bytes >= self._rules.memory_bytes:
            most_bytes = self._rules.memory_bytes
            message = f"{event.message}; there are {most_bytes} bytes for training"
            self._end(event, JobEnd.FAILED, message)
            return
        self._leave(record, JobOverran)
        record.overran, record.reserve_bytes = True, self._rules.memory_bytes

    def _on_lost(self, event: JobLost) -> None:
        record = self._record(event.job_id)
        if record is None:
            return
        record.losses += 1
        if record.losses == _MOST_LOSSES:
            message = f"it was lost {_MOST_LOSSES} times without a further step in between"
            if event.message:
                message = f"{message}: {event.message}"
            self._end(event, JobEnd.FAILED, message)
            return
        self._leave(record, JobLost)
        record.steps_done = event.steps_kept

    def _on_cancelled(self, event: JobCancelled) -> None:
        record = self._record(event.job_id)
        if record is None:
            return
        if record.state.on_worker:
            self._out.append(StopJob(event.job_id))
        self._end(event, JobEnd.CANCELLED)

    # Moves.

    def _record(self, job_id: JobId) -> JobRecord | None:
        """Return the record; None if the job has ended."""
        if job_id > self._newest:
            raise InvariantViolation(f"job {job_id} was never submitted")
        return self.records.get(job_id)

    def _step(self, record: JobRecord, cause: type[object]) -> None:
        before = record.state
        after = TRANSITIONS.get((before, cause))
        if after is None:
            what = f"{cause.__name__} while {before.value}"
            raise InvariantViolation(f"job {record.job.job_id}: {what}")
        record.state = after
        if JobState.READY in (before, after) and cause is not StartJob:
            self._plan = None

    def _leave(self, record: JobRecord, cause: type[object]) -> None:
        """Take the record off its worker."""
        self._step(record, cause)
        self.on_workers.remove(record)
        self.ledger.give_back(_task_id(record))

    def _end(self, event: Any, end: JobEnd, message: str = "") -> None:
        record = self._record(event.job_id)
        if record is None:
            return
        cause = JobFailed if end is JobEnd.FAILED else type(event)
        if record.state.on_worker:
            self._leave(record, cause)
        else:
            self._step(record, cause)
        self._ended(record, JobOutcome(end, message))

    def _ended(self, record: JobRecord, outcome: JobOutcome) -> None:
        del self.records[record.job.job_id]
        if record in self._group:
            self._group.remove(record)
        self._out.append(EndJob(record.job.job_id, outcome))


def _task_id(record: JobRecord) -> TaskId:
    """Return the id by which the ledger and the policies know the job."""
    return TaskId(int(record.job.job_id))


def _as_task(record: JobRecord) -> Task:
    """Return the job as policies see it."""
    needs = record.needs
    assert needs is not None
    run_ns = Nanos(max(1, needs.step_ns * (record.job.steps - record.steps_done)))
    return Task(
        _task_id(record),
        record.job.model,
        0,
        0,
        Nanos(0),
        TaskEstimate(record.reserve_bytes, record.reserve_bytes, run_ns, run_ns),
        msgspec.structs.replace(_NO_TARGET, priority=record.job.priority),
    )
