"""Everything the scheduler asks its driver to do, in the order given.

For every ``TaskArrived`` there is exactly one ``AnswerTask`` and exactly one ``ReleaseTask``.
"""

from dataclasses import dataclass

from serve.core.types import Bytes, GroupId, LaneId, Outcome, TaskId


@dataclass(frozen=True, slots=True)
class PrepareTask:
    """Validate and stage the task's inputs on the host; answer with ``TaskPrepared``."""

    task_id: TaskId


@dataclass(frozen=True, slots=True)
class LaunchTask:
    """Start the prepared task on an idle lane. Its memory is reserved already."""

    task_id: TaskId
    lane_id: LaneId
    group_id: GroupId
    group_size: int
    #: What the run may take: what the ledger holds for it.
    reserve_bytes: Bytes
    #: Prepared tasks of the same model that run with it as one disjoint union, behind it. The
    #: lane tells the end of them all as the end of `task_id`, which also names the run below.
    companions: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class SuspendTask:
    """Stop the task where it is; lane and memory stay its own.

    It may have ended already: its ``TaskFinished`` is welcome while it counts as suspended, and
    the lane must then be woken by the driver, as it is idle.
    """

    task_id: TaskId
    lane_id: LaneId


@dataclass(frozen=True, slots=True)
class ResumeTask:
    """Let the suspended task go on."""

    task_id: TaskId
    lane_id: LaneId


@dataclass(frozen=True, slots=True)
class StopTask:
    """End the run, suspended or not, as soon as can be: nobody waits for it any more.

    It ends as any run does, by whatever comes first: it may also finish.
    """

    task_id: TaskId
    lane_id: LaneId


@dataclass(frozen=True, slots=True)
class AnswerTask:
    """Tell the client how its request ended."""

    task_id: TaskId
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class ReleaseTask:
    """No lane touches the task's buffers any more: they may be reused.

    Comes with the answer, or later when a task was answered while still on a lane.
    """

    task_id: TaskId


Command = PrepareTask | LaunchTask | SuspendTask | ResumeTask | StopTask | AnswerTask | ReleaseTask
