"""The domain's nouns. Frozen, validated when built, units in names, integers inside.

Covers what a task is, what is known of it before it runs, where it ran and how it ended.
Does not cover how these change: see ``events``, ``commands`` and ``scheduler``.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Literal, NewType, Protocol

import msgspec

Nanos = NewType("Nanos", int)
Bytes = NewType("Bytes", int)
TaskId = NewType("TaskId", int)
GroupId = NewType("GroupId", int)
LaneId = NewType("LaneId", int)
#: Of several devices, counted from 0.
DeviceId = NewType("DeviceId", int)

ZERO_NS = Nanos(0)
FIRST_DEVICE = DeviceId(0)

#: Allocators hand out device memory in multiples of this, so reservations do too.
ALIGNMENT_BYTES = 512


def align_bytes(size_bytes: int) -> Bytes:
    """Round `size_bytes` up to a multiple of `ALIGNMENT_BYTES`."""
    return Bytes(-(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


class TaskEstimate(msgspec.Struct, frozen=True):
    """Memory and time of a task, known before anything runs."""

    #: Peak memory of one forward pass (PMC): inputs, activations and output.
    peak_bytes: Bytes
    #: `peak_bytes` with the safety factor, 512-byte aligned: what the ledger holds for it.
    reserve_bytes: Bytes
    #: Median time on an idle lane, forward pass only.
    run_ns: Nanos
    #: Median time in the server when alone: prepare, run and answer.
    solo_ns: Nanos

    def __post_init__(self) -> None:
        if self.peak_bytes < 0 or self.reserve_bytes < self.peak_bytes:
            raise ValueError(f"0 <= peak {self.peak_bytes} <= reserve {self.reserve_bytes} bytes")
        if not 0 < self.run_ns <= self.solo_ns:
            raise ValueError(f"0 < run {self.run_ns} ns <= solo {self.solo_ns} ns")


class UnionEstimate(Protocol):
    """Estimator of what several graphs take in one run of a model."""

    def __call__(self, model: str, sizes: Sequence[tuple[int, ...]], /) -> TaskEstimate | None:
        """Return the estimate for graphs of these counts; None when unions are not allowed.

        The counts of each are a task's ``Task.counted``.

        The reservation covers what tasks reserve by themselves, and joining them. Must give the
        same for the same arguments as long as no run ended in between.
        """
        ...


class QoS(msgspec.Struct, frozen=True):
    """Quality of service: the promised target, and what the client asked for."""

    #: QT: answer within this after arrival, or it counts as a violation.
    target_ns: Nanos
    #: Drop the request when it is not answered this long after arrival; None: never.
    timeout_ns: Nanos | None = None
    #: 0 is the model's default, 1 the most urgent, larger is less urgent.
    priority: int = 0

    def __post_init__(self) -> None:
        if self.target_ns <= 0:
            raise ValueError(f"QoS target must be positive, got {self.target_ns} ns")
        if self.timeout_ns is not None and self.timeout_ns <= 0:
            raise ValueError(f"timeout must be positive, got {self.timeout_ns} ns")
        if self.priority < 0:
            raise ValueError(f"priority must be at least 0, got {self.priority}")


class InputBlock(msgspec.Struct, frozen=True):
    """Inputs that the tasks of a joint request have in common, in one place for all of them."""

    #: The first of these tasks.
    block_id: TaskId
    #: Part of each one's reservation; on lanes of one device they hold it once.
    size_bytes: Bytes


class RunLimits(msgspec.Struct, frozen=True):
    """What a run of one model may take at most; None for what any run may take."""

    #: Reservation: inputs, activations and outputs.
    memory_bytes: Bytes | None = None
    #: Time with a core.
    run_ns: Nanos | None = None


NO_LIMITS = RunLimits()


class Task(msgspec.Struct, frozen=True):
    """Request, admitted or to be admitted, as the scheduler sees it."""

    #: Unique and increasing in order of arrival; breaks every tie.
    task_id: TaskId
    #: `name:version`; tasks of one model may be merged, and share interference facts.
    model: str
    num_nodes: int
    num_edges: int
    arrived_ns: Nanos
    estimate: TaskEstimate
    qos: QoS
    tenant: str = ""
    #: None unless it shares inputs with others.
    block: InputBlock | None = None
    #: What its model counts, where that is more than nodes and edges; of nodes first.
    counts: tuple[int, ...] = ()
    #: Trust domain of its model, which has lanes of its own; empty for the lanes that others share.
    domain: str = ""
    #: It runs only while nothing else is there, and is given up when anything comes.
    best_effort: bool = False
    #: Those of its model.
    limits: RunLimits = NO_LIMITS

    def __post_init__(self) -> None:
        if self.block is not None and self.block.size_bytes > self.estimate.reserve_bytes:
            raise ValueError(
                f"shared inputs of {self.block.size_bytes} bytes are part of the reservation of "
                f"{self.estimate.reserve_bytes}"
            )

    @property
    def counted(self) -> tuple[int, ...]:
        """What its model counts: nodes and edges, unless `counts` says more."""
        return self.counts or (self.num_nodes, self.num_edges)

    @property
    def due_ns(self) -> Nanos:
        """The QoS deadline: arrival + QT."""
        return Nanos(self.arrived_ns + self.qos.target_ns)

    @property
    def run_due_ns(self) -> Nanos:
        """Latest end of the run: half of the server's own share of the solo time is answering."""
        estimate = self.estimate
        answer_ns = (estimate.solo_ns - estimate.run_ns) // 2
        return Nanos(self.arrived_ns + self.qos.target_ns - answer_ns)

    @property
    def latest_start_ns(self) -> Nanos:
        """Started later than this on an idle lane, the task misses its target."""
        return Nanos(self.due_ns - self.estimate.solo_ns)

    @property
    def expires_ns(self) -> Nanos | None:
        """Time at which the client stops waiting; None if it never does."""
        timeout = self.qos.timeout_ns
        return None if timeout is None else Nanos(self.arrived_ns + timeout)

    @property
    def reserve_bytes(self) -> Bytes:
        """Memory that the ledger holds while the task is on a lane."""
        return self.estimate.reserve_bytes

    def most_bytes(self, there_bytes: int) -> int:
        """Return what its run may take of so much memory."""
        limit_bytes = self.limits.memory_bytes
        return there_bytes if limit_bytes is None else min(limit_bytes, there_bytes)

    def lacks(self, budget_bytes: Bytes, now: str = "") -> str:
        """Return why its run will never have the memory that it needs; empty when it may.

        `now` ends what is said of a device that has too little.
        """
        need_bytes, limit_bytes = self.reserve_bytes, self.limits.memory_bytes
        if limit_bytes is not None and need_bytes > limit_bytes:
            return f"needs {need_bytes} bytes, its model may take {limit_bytes} (model.max_memory)"
        if need_bytes > budget_bytes:
            return f"needs {need_bytes} bytes, the device has {budget_bytes} for tasks{now}"
        return ""

    def found(self, sized: "Sized") -> "Task":
        """Return the task as preparing found it to be; its target stays as promised."""
        estimate, block = sized.estimate, self.block
        if block is not None and block.size_bytes > estimate.reserve_bytes:
            block = None  # it takes less than it shares, and is counted by itself
        return msgspec.structs.replace(
            self,
            num_nodes=sized.num_nodes,
            num_edges=sized.num_edges,
            estimate=estimate,
            block=block,
            counts=sized.counts,
        )


class Sized(msgspec.Struct, frozen=True):
    """Size and estimate of a task that only preparing could find."""

    num_nodes: int
    num_edges: int
    estimate: TaskEstimate
    #: As in ``Task``.
    counts: tuple[int, ...] = ()


class Capacity(msgspec.Struct, frozen=True):
    """Memory and slots that one group may use."""

    memory_bytes: Bytes
    #: Tasks that can run at once.
    slots: int

    def __post_init__(self) -> None:
        if self.memory_bytes < 0 or self.slots < 1:
            raise ValueError(f"memory {self.memory_bytes} >= 0 bytes, slots {self.slots} >= 1")


class Group(msgspec.Struct, frozen=True):
    """Tasks planned to run together, in launch order."""

    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("a group holds at least one task")

    @property
    def reserve_bytes(self) -> Bytes:
        """Memory that the group holds when all its tasks run at once."""
        return Bytes(sum(task.reserve_bytes for task in self.tasks))


class Usage(msgspec.Struct, frozen=True):
    """Time and memory that a run was measured to take, on its lane."""

    #: From when the lane heard of it, time spent suspended included.
    run_ns: Nanos
    #: Inputs and tensors at their peak; None where the lane cannot measure it.
    peak_bytes: Bytes | None
    #: `peak_bytes` with what kernels took besides.
    held_bytes: Bytes | None = None


class Placement(msgspec.Struct, frozen=True):
    """Placement of a task's run: lane, group and co-runners."""

    lane_id: LaneId
    group_id: GroupId
    #: Tasks planned together with it, itself included.
    group_size: int
    #: Most other tasks seen running on the device during its run.
    co_runners: int
    #: 1; more when a lane was lost, it overran its memory or its union failed.
    attempt: int
    #: Tasks that ran as one disjoint union, itself included.
    merged: int = 1
    #: An earlier run of it needed more memory than was reserved, so this one had all there is.
    overran: bool = False


class Timeline(msgspec.Struct, frozen=True):
    """Times at which a task passed each stage, on the scheduler's clock."""

    arrived_ns: Nanos
    prepare_started_ns: Nanos
    prepared_ns: Nanos
    launched_ns: Nanos
    finished_ns: Nanos
    #: How long an idle lane with free memory stood waiting for this task's prepare;
    #: the rest of the prepare was hidden behind other tasks' execution.
    prepare_exposed_ns: Nanos
    #: Work ahead of it on arrival, per slot: estimated solo time of tasks pending or running.
    backlog_ns: Nanos
    #: How much of the time between launch and finish it stood suspended for others.
    suspended_ns: Nanos = ZERO_NS
    #: How long others executed beside its run, summed over them.
    co_run_ns: Nanos = ZERO_NS
    #: How long training jobs ran beside it, summed over them.
    job_run_ns: Nanos = ZERO_NS
    #: The lanes had more work of its urgency, or of all, than they could do; see ``demand``.
    overloaded: bool = False


class LaneState(Enum):
    """Activity of a lane that holds a run."""

    #: Computes, or would if it had a core or what it reads from a disk.
    BUSY = "busy"
    #: Every thread sleeps, within the run.
    ASLEEP = "asleep"
    #: Every thread sleeps, and the run has not begun, or is over and nobody heard of it yet.
    IDLE = "idle"
    #: Somebody else stopped its process.
    STOPPED = "stopped"


#: Why a lane is started anew: what it holds between runs, or how many requests it has run.
RecycleReason = Literal["memory", "requests"]


class LaneLook(msgspec.Struct, frozen=True):
    """A look at a lane, to be compared with the one before."""

    state: LaneState
    #: Time on a core since its process began.
    cpu_ns: Nanos
    #: How often its threads gave up a core.
    turns: int


class TenantRules(msgspec.Struct, frozen=True):
    """Weight and limits of a tenant; None for no limit."""

    name: str
    #: Share of the lanes under load, in proportion to the others' weights, 1 by default.
    weight: float = 1.0
    #: Requests that wait or run, those included whose runs nobody waits for any more.
    max_in_queue: int | None = None
    requests_per_s: float | None = None


class RejectReason(Enum):
    """Reason for rejecting a task before it was accepted."""

    TOO_BIG = "too_big"
    QUEUE_FULL = "queue_full"
    #: Its tenant has as many as it may, or sends more a second, see ``tenants``.
    TENANT_LIMIT = "tenant_limit"
    DRAINING = "draining"
    #: Its model is in quarantine, see ``quarantine``.
    QUARANTINED = "quarantined"
    #: It is of best effort, and something else is there.
    BUSY = "busy"


class FailReason(Enum):
    """Reason for an accepted task to have no result."""

    INVALID_INPUT = "invalid_input"
    MODEL_ERROR = "model_error"
    OUT_OF_MEMORY = "out_of_memory"
    #: Its output has values that are no finite numbers, which its model forbids.
    NONFINITE = "nonfinite_output"
    LANE_LOST = "lane_lost"
    #: Another server did not give the features that it holds.
    ROWS_LOST = "rows_lost"
    #: Its model went into quarantine while it waited.
    QUARANTINED = "quarantined"
    #: Its run took longer than any may.
    TIME_LIMIT = "time_limit"
    #: Stopped as nobody waited for it any more; no client hears this.
    STOPPED = "stopped"


class Completed(msgspec.Struct, frozen=True):
    """The task ran and has a result."""

    timeline: Timeline
    placement: Placement
    usage: Usage


class Rejected(msgspec.Struct, frozen=True):
    """The task never entered; `message` names the numbers compared."""

    reason: RejectReason
    message: str
    #: When trying again makes sense; None: never.
    retry_after_ns: Nanos | None = None
    #: Of a joint request: the task that the message is about, for which all are refused.
    task_id: TaskId | None = None


class Expired(msgspec.Struct, frozen=True):
    """The client's own time limit passed first."""

    #: The life-cycle state it was in: `queued`, `running`, …
    stage: str


class Withdrawn(msgspec.Struct, frozen=True):
    """The client went away first."""

    stage: str


class Failed(msgspec.Struct, frozen=True):
    """Accepted, and ended without a result."""

    reason: FailReason
    message: str


Outcome = Completed | Rejected | Expired | Withdrawn | Failed
