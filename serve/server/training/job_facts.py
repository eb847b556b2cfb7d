"""What is told of a training job, and what one is asked for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from serve.errors import InvalidInput
from serve.obs.live.training import MOST_SHOWN, ShownJob
from serve.server.training.job_folder import MOST_EPOCHS

#: Of Adam.
LEARNING_RATE = 0.005


@dataclass(frozen=True, slots=True)
class JobCall:
    """Training that a client asks for."""

    model: str
    graph: str
    epochs: int
    learning_rate: float = LEARNING_RATE
    seed: int = 0
    #: From new weights, not from those of the version that answers.
    fresh: bool = False
    priority: int = 0

    def check(self) -> None:
        """Raise InvalidInput for a value out of bounds."""
        if not 1 <= self.epochs <= MOST_EPOCHS:
            raise InvalidInput(f"epochs: {self.epochs} is not in 1..{MOST_EPOCHS}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InvalidInput(f"learning_rate: {self.learning_rate} is not above 0")
        for name in ("seed", "priority"):
            if not 0 <= getattr(self, name) < 1 << 31:
                raise InvalidInput(f"{name}: {getattr(self, name)} is not in 0..2^31 - 1")


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as it stands."""

    job_id: int
    model: str
    graph: str
    epochs: int
    epochs_done: int
    #: `queued`, `preparing`, `ready`, `running`, `paused`; `done`, `cancelled` or `failed`.
    state: str
    #: Of the last epoch that was told; 0 before.
    loss: float
    #: Mean time of an epoch lately, standing still not counted.
    epoch_ns: int
    #: Share of held-out nodes that are classified right, after the last epoch.
    accuracy: float
    #: Version that it was published as; 0 before.
    version: int
    #: Why it failed.
    message: str
    #: Memory that it holds, or will.
    reserve_bytes: int

    @property
    def ended(self) -> bool:
        """True when nothing follows."""
        return self.state in ("done", "cancelled", "failed")


class TrainingEstimate(msgspec.Struct, frozen=True):
    """The memory of a training step, as `gnnserve estimate --train` shows it."""

    model: str
    version: str
    executor: str
    num_nodes: int
    num_edges: int
    num_features: int
    graph_bytes: int
    #: Weights, buffers and the optimiser's state.
    persistent_bytes: int
    #: All tensors at the peak of a step (PMC): graph and what is persistent included.
    peak_bytes: int
    #: What a job reserves, with what kernels take besides and a margin.
    reserve_bytes: int
    #: CoGNN's published closed form of the peak; None for a model that it does not cover.
    closed_form_bytes: int | None
    #: Why the estimate is not exact; empty when it is.
    warning: str


def shown_jobs(jobs: Sequence[JobStatus]) -> tuple[ShownJob, ...]:
    """Return what the live page shows: jobs that go on, and the newest of those that ended."""
    shown = sorted(jobs, key=lambda job: (job.ended, -job.job_id))[:MOST_SHOWN]
    return tuple(msgspec.convert(job, ShownJob, from_attributes=True) for job in shown)
