"""Commands about training jobs.

A ``PauseJob`` stands before the launch that needs its core. For every job that was submitted there
is exactly one ``EndJob``, unless the server ends first.
"""

import msgspec

from serve.core.jobs.types import JobId, JobOutcome
from serve.core.types import Bytes


class PrepareJob(msgspec.Struct, frozen=True):
    """Measure what a step needs; answer with ``JobPrepared`` or ``JobFailed``."""

    job_id: JobId


class StartJob(msgspec.Struct, frozen=True):
    """Start a process that trains from the last checkpoint on. Its memory is reserved already."""

    job_id: JobId
    #: What it may take.
    reserve_bytes: Bytes


class PauseJob(msgspec.Struct, frozen=True):
    """Stop the job's process where it is; it keeps its memory."""

    job_id: JobId


class ResumeJob(msgspec.Struct, frozen=True):
    """Let the job's process go on."""

    job_id: JobId


class StopJob(msgspec.Struct, frozen=True):
    """End the job's process; its last checkpoint stays. No event about that process follows."""

    job_id: JobId


class EndJob(msgspec.Struct, frozen=True):
    """Tell who waits how the job ended."""

    job_id: JobId
    outcome: JobOutcome


JobCommand = PrepareJob | StartJob | PauseJob | ResumeJob | StopJob | EndJob
