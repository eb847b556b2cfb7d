"""The life of a training job: its states and every move between them.

A pair that has no row cannot happen in a correct server: ``InvariantViolation``. What is said of a
job that has ended comes too late and changes nothing.
"""

from enum import Enum

from serve.core.jobs.commands import PauseJob, PrepareJob, ResumeJob, StartJob, StopJob
from serve.core.jobs.events import (
    JobCancelled,
    JobFailed,
    JobFinished,
    JobLost,
    JobOverran,
    JobPrepared,
    StepsDone,
)


class JobState(Enum):
    """State of a job."""

    #: Submitted, waits for its step to be measured.
    QUEUED = "queued"
    #: Its step is measured.
    PREPARING = "preparing"
    #: Waits for a worker, for memory and for a core that requests leave.
    READY = "ready"
    #: Trains on a core, memory reserved.
    RUNNING = "running"
    #: Stopped for requests, memory reserved.
    PAUSED = "paused"
    #: Done, failed or cancelled.
    ENDED = "ended"

    @property
    def on_worker(self) -> bool:
        """True when it has a process and reserved memory."""
        return self in (JobState.RUNNING, JobState.PAUSED)


TRANSITIONS: dict[tuple[JobState, type[object]], JobState] = {
    (JobState.QUEUED, PrepareJob): JobState.PREPARING,
    (JobState.QUEUED, JobCancelled): JobState.ENDED,
    (JobState.PREPARING, JobPrepared): JobState.READY,
    (JobState.PREPARING, JobFailed): JobState.ENDED,  # or needs more than there is for all jobs
    (JobState.PREPARING, JobCancelled): JobState.ENDED,
    (JobState.READY, StartJob): JobState.RUNNING,
    (JobState.READY, JobCancelled): JobState.ENDED,
    (JobState.RUNNING, PauseJob): JobState.PAUSED,
    (JobState.PAUSED, ResumeJob): JobState.RUNNING,
}
for _on in (JobState.RUNNING, JobState.PAUSED):
    # A paused job was heard of just before it stopped, or was killed.
    TRANSITIONS |= {
        (_on, StepsDone): _on,
        (_on, JobFinished): JobState.ENDED,
        (_on, JobFailed): JobState.ENDED,
        (_on, JobOverran): JobState.READY,  # with all memory for training, once
        (_on, JobLost): JobState.READY,  # from its last checkpoint
        (_on, StopJob): JobState.READY,  # the server drains
        (_on, JobCancelled): JobState.ENDED,
    }


def mermaid() -> str:
    """Return the table as a Mermaid state diagram, without moves that change nothing."""
    causes: dict[tuple[JobState, JobState], list[str]] = {}
    for (state, cause), target in TRANSITIONS.items():
        if target is not state:
            causes.setdefault((state, target), []).append(cause.__name__)
    lines = ["stateDiagram-v2", f"    [*] --> {JobState.QUEUED.value}: JobSubmitted"]
    lines += [
        f"    {state.value} --> {target.value}: {', '.join(names)}"
        for (state, target), names in causes.items()
    ]
    lines.append(f"    {JobState.ENDED.value} --> [*]")
    return "\n".join(lines) + "\n"
