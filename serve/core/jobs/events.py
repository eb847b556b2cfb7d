"""Events of training jobs. None of them changes anything for requests."""

import msgspec

from serve.core.jobs.types import Job, JobId, JobNeeds
from serve.core.slowdown import check_slowdown


class JobSubmitted(msgspec.Struct, frozen=True):
    """A job asks to be trained; it ends with exactly one ``EndJob``."""

    job: Job


class JobPrepared(msgspec.Struct, frozen=True):
    """A step of the job was measured, so that what it needs is known."""

    job_id: JobId
    needs: JobNeeds


class StepsDone(msgspec.Struct, frozen=True):
    """So many steps of the job are done by now."""

    job_id: JobId
    steps: int


class JobFinished(msgspec.Struct, frozen=True):
    """All steps are done and the weights are kept; its process has ended."""

    job_id: JobId


class JobFailed(msgspec.Struct, frozen=True):
    """The job cannot be prepared, or a step ended in an error; its process has ended."""

    job_id: JobId
    message: str


class JobOverran(msgspec.Struct, frozen=True):
    """A step asked for more memory than the job may take; its process has ended."""

    job_id: JobId
    #: Its words, with the limit.
    message: str


class JobLost(msgspec.Struct, frozen=True):
    """The job's process died, or what it trained could not be published."""

    job_id: JobId
    #: Steps that its last checkpoint holds.
    steps_kept: int
    #: What went wrong, as far as is known.
    message: str = ""


class JobCancelled(msgspec.Struct, frozen=True):
    """Nobody wants the job any more. A no-op for one that has ended."""

    job_id: JobId


class JobSlowdownChanged(msgspec.Struct, frozen=True):
    """Jobs slow runs more or less than assumed so far, as runs beside them have shown."""

    #: How much longer a run takes beside 0, 1, 2, … jobs that run.
    slowdown: tuple[float, ...]

    def __post_init__(self) -> None:
        check_slowdown(self.slowdown)


class JobsTick(msgspec.Struct, frozen=True):
    """The time asked for by ``TrainingJobs.wake_ns`` has come."""


JobEvent = (
    JobSubmitted
    | JobPrepared
    | StepsDone
    | JobFinished
    | JobFailed
    | JobOverran
    | JobLost
    | JobCancelled
    | JobSlowdownChanged
    | JobsTick
)
