"""Everything that can happen to the scheduler. Nothing else changes its state.

Each is handed to ``Scheduler.handle(event, now_ns)``. See ``commands`` for what comes back.
"""

from dataclasses import dataclass

from serve.core.types import Bytes, FailReason, LaneId, Sized, Task, TaskId, Usage


@dataclass(frozen=True, slots=True)
class TaskArrived:
    """A request was decoded and estimated and asks to be admitted."""

    task: Task


@dataclass(frozen=True, slots=True)
class TaskPrepared:
    """The host finished preparing the task's inputs; it may be launched."""

    task_id: TaskId
    #: Given where the size was not known before, as when neighbours are sampled: from now on the
    #: task is planned and its memory reserved by this. None: it is as it arrived.
    found: Sized | None = None


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """Preparing found the request's content invalid, or could not stage it."""

    task_id: TaskId
    reason: FailReason
    message: str


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """A lane delivered the task's result."""

    task_id: TaskId
    lane_id: LaneId
    usage: Usage


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A lane ran the task and it ended in an error; the lane itself is fine."""

    task_id: TaskId
    lane_id: LaneId
    reason: FailReason
    message: str


@dataclass(frozen=True, slots=True)
class TaskOverran:
    """A lane stopped the task as it asked for more memory than was reserved; the lane is fine."""

    task_id: TaskId
    lane_id: LaneId
    #: The lane's words, with its limit.
    message: str


@dataclass(frozen=True, slots=True)
class TaskCancelled:
    """The client went away. A no-op for a task already answered."""

    task_id: TaskId


@dataclass(frozen=True, slots=True)
class LaneReady:
    """A lane started (again) and can take a task."""

    lane_id: LaneId


@dataclass(frozen=True, slots=True)
class LaneLost:
    """A lane's process died; what it ran is handed over once, then answered."""

    lane_id: LaneId


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """Models were loaded or unloaded: what is left of the device for tasks."""

    budget_bytes: Bytes


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """Accept nothing new; finish everything accepted."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time asked for by ``next_wakeup()`` has come."""


Event = (
    TaskArrived
    | TaskPrepared
    | PrepareFailed
    | TaskFinished
    | TaskFailed
    | TaskOverran
    | TaskCancelled
    | LaneReady
    | LaneLost
    | BudgetChanged
    | DrainStarted
    | Tick
)
