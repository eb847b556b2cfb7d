"""Training jobs under a virtual clock: they get on while they run, and stand while paused."""

from dataclasses import dataclass

from serve.core.jobs.commands import (
    EndJob,
    JobCommand,
    PauseJob,
    PrepareJob,
    ResumeJob,
    StartJob,
    StopJob,
)
from serve.core.jobs.events import JobEvent, JobFinished, JobPrepared, JobsTick, JobSubmitted
from serve.core.jobs.jobs import TrainingJobs
from serve.core.jobs.types import Job, JobId, JobNeeds, JobOutcome


@dataclass(frozen=True, slots=True)
class OfferedJob:
    """Job with what it takes, and when it comes."""

    job: Job
    needs: JobNeeds
    at_ns: int = 0


class _Work:
    """What is left of a job; its mark is the time of its end while it runs."""

    __slots__ = ("left_ns", "since_ns")

    def __init__(self, left_ns: int) -> None:
        self.left_ns = left_ns
        self.since_ns: int | None = None


class SimulatedJobs:
    """Processes of jobs, each on a core that no request's run executes on."""

    def __init__(self, jobs: TrainingJobs, offered: tuple[OfferedJob, ...]) -> None:
        self._jobs = jobs
        self._offered = {one.job.job_id: one for one in offered}
        self._to_come = sorted(offered, key=lambda one: (one.at_ns, one.job.job_id))
        self._work: dict[JobId, _Work] = {}
        self._prepared: list[JobId] = []
        #: How each ended, and when.
        self.ended: dict[JobId, tuple[int, JobOutcome]] = {}
        #: Time that jobs got in all, up to their last pause or end; and how often they stopped.
        self.trained_ns = 0
        self.pauses = 0

    @property
    def running(self) -> int:
        """Jobs that get on now."""
        return sum(work.since_ns is not None for work in self._work.values())

    def next_ns(self, now_ns: int) -> int | None:
        """Return when something happens next by itself; None for never again."""
        due = [now_ns] if self._prepared else []
        if self._to_come:
            due.append(self._to_come[0].at_ns)
        if self._jobs.wake_ns is not None:
            due.append(self._jobs.wake_ns)
        due += [
            work.since_ns + work.left_ns
            for work in self._work.values()
            if work.since_ns is not None
        ]
        return max(now_ns, min(due)) if due else None

    def take(self, now_ns: int) -> JobEvent:
        """Return the event that is due now."""
        if self._prepared:
            job_id = self._prepared.pop(0)
            return JobPrepared(job_id, self._offered[job_id].needs)
        for job_id, work in self._work.items():
            if work.since_ns is not None and work.since_ns + work.left_ns <= now_ns:
                self.trained_ns += work.left_ns
                del self._work[job_id]
                return JobFinished(job_id)
        if self._to_come and self._to_come[0].at_ns <= now_ns:
            return JobSubmitted(self._to_come.pop(0).job)
        return JobsTick()

    def obey(self, command: JobCommand, now_ns: int) -> None:
        """Carry out a command."""
        job_id = command.job_id
        match command:
            case PrepareJob():
                self._prepared.append(job_id)
            case StartJob():
                one = self._offered[job_id]
                self._work[job_id] = work = _Work(one.job.steps * one.needs.step_ns)
                work.since_ns = now_ns
            case PauseJob():
                self.pauses += 1
                self._stand(self._work[job_id], now_ns)
            case ResumeJob():
                self._work[job_id].since_ns = now_ns
            case StopJob():
                self._stand(self._work.pop(job_id), now_ns)
            case EndJob(outcome=outcome):
                self.ended[job_id] = now_ns, outcome

    def stand_at(self, now_ns: int) -> None:
        """Count what jobs got up to now."""
        for work in self._work.values():
            if work.since_ns is not None:
                self._stand(work, now_ns)
                work.since_ns = now_ns

    def _stand(self, work: _Work, now_ns: int) -> None:
        if work.since_ns is not None:
            passed_ns = now_ns - work.since_ns
            work.left_ns -= passed_ns
            self.trained_ns += passed_ns
            work.since_ns = None
