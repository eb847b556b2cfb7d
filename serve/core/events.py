"""Events: everything that can happen to the scheduler. Nothing else changes its state.

Each is handed to ``Scheduler.handle(event, now_ns)``. See ``commands`` for what comes back.
"""

import msgspec

from serve.core.jobs.events import JobEvent
from serve.core.slowdown import check_slowdown
from serve.core.types import (
    FIRST_DEVICE,
    Bytes,
    DeviceId,
    FailReason,
    LaneId,
    LaneLook,
    Nanos,
    Sized,
    Task,
    TaskId,
    TenantRules,
    Usage,
)


class TaskArrived(msgspec.Struct, frozen=True):
    """A request was decoded and estimated and asks to be admitted."""

    task: Task
    #: When the host began to stage its inputs, which are staged already. With None the scheduler
    #: says when to prepare it. A rejected task gets its ``ReleaseTask`` in any case.
    prepare_started_ns: Nanos | None = None


class TasksArrived(msgspec.Struct, frozen=True):
    """The tasks of a joint request ask to be admitted, all or none."""

    #: In the order of their ids; not empty.
    tasks: tuple[Task, ...]
    #: See ``TaskArrived``.
    prepare_started_ns: Nanos | None = None


class TaskPrepared(msgspec.Struct, frozen=True):
    """The host finished preparing the task's inputs; it may be launched."""

    task_id: TaskId
    #: The task's true size, when that was not known before, as with sampled neighbours. From now
    #: on it is planned, and its memory reserved, by this. None: it is as it arrived.
    found: Sized | None = None


class PrepareFailed(msgspec.Struct, frozen=True):
    """Preparing found the request's content invalid, or could not stage it."""

    task_id: TaskId
    reason: FailReason
    message: str


class TaskFinished(msgspec.Struct, frozen=True):
    """A lane delivered the task's result."""

    task_id: TaskId
    lane_id: LaneId
    usage: Usage


class TaskFailed(msgspec.Struct, frozen=True):
    """A lane ran the task and it ended in an error; the lane itself is fine."""

    task_id: TaskId
    lane_id: LaneId
    reason: FailReason
    message: str


class TaskOverran(msgspec.Struct, frozen=True):
    """A lane stopped the task as it asked for more memory than was reserved; the lane is fine."""

    task_id: TaskId
    lane_id: LaneId
    #: The lane's words, with its limit.
    message: str


class RunTakesLess(msgspec.Struct, frozen=True):
    """A lane that has begun a run found that it takes less: it replays a captured one.

    Should the run need what it gave back after all, the lane ends it with ``TaskOverran``.
    """

    task_id: TaskId
    lane_id: LaneId
    #: What the run takes at most, as in ``TaskEstimate.reserve_bytes``.
    reserve_bytes: Bytes


class TaskCancelled(msgspec.Struct, frozen=True):
    """The client went away. A no-op for a task already answered."""

    task_id: TaskId


class LaneReady(msgspec.Struct, frozen=True):
    """A lane started (again) and can take a task."""

    lane_id: LaneId


class LaneLost(msgspec.Struct, frozen=True):
    """A lane's process died; what it ran is handed over once, then answered."""

    lane_id: LaneId
    #: Other lanes of that process, which died with it.
    others: tuple[LaneId, ...] = ()


class LaneMeasured(msgspec.Struct, frozen=True):
    """Memory that a lane holds between runs beyond what it needs to serve."""

    lane_id: LaneId
    held_bytes: Bytes


class LaneReplaced(msgspec.Struct, frozen=True):
    """A new process has taken the place of the one of a lane that is up and runs nothing."""

    lane_id: LaneId


class LaneSeen(msgspec.Struct, frozen=True):
    """State of the lane that holds the task's run: the reply to ``LookAtLane``."""

    task_id: TaskId
    lane_id: LaneId
    look: LaneLook


class BudgetChanged(msgspec.Struct, frozen=True):
    """Models were loaded or unloaded: what is left of the device for tasks."""

    budget_bytes: Bytes
    device_id: DeviceId = FIRST_DEVICE


class SlowdownChanged(msgspec.Struct, frozen=True):
    """Runs slow one another more or less than assumed so far, on every device alike."""

    #: See ``DeviceFacts``.
    slowdown: tuple[float, ...]

    def __post_init__(self) -> None:
        check_slowdown(self.slowdown)


class TenantsChanged(msgspec.Struct, frozen=True):
    """Weights and limits of tenants, instead of those before; all others have none."""

    tenants: tuple[TenantRules, ...]


class LimitsChanged(msgspec.Struct, frozen=True):
    """What is accepted, and how long a run may take, instead of what ``SchedulerParams`` says.

    Accepted tasks stay, also where they are more than `max_queue`.
    """

    #: See ``SchedulerParams``, as are the others.
    max_queue: int
    shed_late: bool
    run_limit_ns: Nanos | None

    def __post_init__(self) -> None:
        for name in ("max_queue", "run_limit_ns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class ModelUnloaded(msgspec.Struct, frozen=True):
    """A model was unloaded: its quarantine ends, should it be loaded again."""

    model: str


class DomainOpened(msgspec.Struct, frozen=True):
    """A model of the trust domain is to be loaded: it needs lanes of its own, on a single device.

    Does nothing for a domain that has them.
    """

    domain: str


class DomainClosed(msgspec.Struct, frozen=True):
    """No model of the trust domain is served any more, and none of its tasks waits."""

    domain: str


class LaneRemoved(msgspec.Struct, frozen=True):
    """Nothing is left of a lane that was to be removed: its id may be that of another one."""

    lane_id: LaneId


class DrainStarted(msgspec.Struct, frozen=True):
    """Accept nothing new; finish everything accepted."""


class Tick(msgspec.Struct, frozen=True):
    """The time asked for by ``next_wakeup()`` has come."""


Event = (
    TaskArrived
    | TasksArrived
    | TaskPrepared
    | PrepareFailed
    | TaskFinished
    | TaskFailed
    | TaskOverran
    | RunTakesLess
    | TaskCancelled
    | LaneReady
    | LaneLost
    | LaneMeasured
    | LaneReplaced
    | LaneSeen
    | BudgetChanged
    | SlowdownChanged
    | TenantsChanged
    | LimitsChanged
    | ModelUnloaded
    | DomainOpened
    | DomainClosed
    | LaneRemoved
    | DrainStarted
    | Tick
    | JobEvent
)
