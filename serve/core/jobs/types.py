"""Nouns of training: what a job is, what its steps need, and how it ended."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NewType

import msgspec

from serve.core.slowdown import NO_SLOWDOWN, check_slowdown
from serve.core.types import Bytes, Nanos

JobId = NewType("JobId", int)

NO_BYTES = Bytes(0)
#: Stopping or waking a process: tens of microseconds.
SWITCH_NS = Nanos(30_000)


class Job(msgspec.Struct, frozen=True):
    """Training of a model on a graph that the server holds."""

    #: Unique and increasing in order of submission; breaks every tie.
    job_id: JobId
    model: str
    graph: str
    #: Whole-graph steps in all.
    steps: int
    #: As of a request: 1 is the most urgent, 0 the default.
    priority: int = 0
    #: Steps that a checkpoint of an earlier life of the server holds.
    steps_done: int = 0


class JobNeeds(msgspec.Struct, frozen=True):
    """Memory and time of a job, known before its first step."""

    #: Graph, weights and the optimiser's state: from the first step to the last.
    held_bytes: Bytes
    #: Peak of a step beyond that, with the safety factor.
    step_bytes: Bytes
    #: Time of a step on a core of its own.
    step_ns: Nanos

    @property
    def reserve_bytes(self) -> Bytes:
        """What the job holds of the memory for training while it is on a worker."""
        return Bytes(self.held_bytes + self.step_bytes)


class JobEnd(Enum):
    """Way in which a job ended."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class JobOutcome(msgspec.Struct, frozen=True):
    """End of a job; `message` says why it failed."""

    end: JobEnd
    message: str = ""


@dataclass(frozen=True, slots=True)
class JobRules:
    """What jobs may take; without workers there are none."""

    #: Jobs that are on workers at once, each a process of its own.
    workers: int = 0
    #: For all jobs on workers together; no part of what requests may take.
    memory_bytes: Bytes = NO_BYTES
    #: Order of jobs, as of requests, and whether one starts before the group ahead has ended.
    policy: str = "lmcf"
    discipline: Literal["rolling", "barrier"] = "rolling"
    #: `strict`: jobs run only while no request is there.
    slack: Literal["governed", "strict"] = "strict"
    #: How much longer a request's run takes beside 0, 1, 2, … jobs that run, at least.
    slowdown: tuple[float, ...] = NO_SLOWDOWN
    #: Time that stopping a job, or letting it go on, takes.
    switch_ns: Nanos = SWITCH_NS

    def __post_init__(self) -> None:
        check_slowdown(self.slowdown)
        if min(self.workers, self.memory_bytes, self.switch_ns) < 0:
            raise ValueError(
                f"workers {self.workers}, memory {self.memory_bytes} bytes and switch "
                f"{self.switch_ns} ns must be at least 0"
            )


NO_JOBS = JobRules()
