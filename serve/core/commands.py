"""Commands: everything the scheduler asks its driver to do, in the order given.

For every task that arrived there is exactly one ``AnswerTask`` and exactly one ``ReleaseTask``.
"""

import msgspec

from serve.core.jobs.commands import JobCommand
from serve.core.types import Bytes, GroupId, LaneId, Outcome, RecycleReason, TaskId


class PrepareTask(msgspec.Struct, frozen=True):
    """Validate and stage the task's inputs on the host; answer with ``TaskPrepared``."""

    task_id: TaskId


class LaunchTask(msgspec.Struct, frozen=True):
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
    #: The run stays off the part of the device that is reserved for short ones.
    bounded: bool = False


class SuspendTask(msgspec.Struct, frozen=True):
    """Stop the task where it is; lane and memory stay its own.

    It may have ended already: its ``TaskFinished`` is welcome while it counts as suspended, and
    the lane must then be woken by the driver, as it is idle.
    """

    task_id: TaskId
    lane_id: LaneId


class ResumeTask(msgspec.Struct, frozen=True):
    """Let the suspended task go on."""

    task_id: TaskId
    lane_id: LaneId


class StopTask(msgspec.Struct, frozen=True):
    """End the run, suspended or not, as soon as can be: nobody waits for it, or it took too long.

    It ends as any run does, by whatever comes first: it may also finish.
    """

    task_id: TaskId
    lane_id: LaneId


class LookAtLane(msgspec.Struct, frozen=True):
    """Say what the run's lane does, by ``LaneSeen``; without that it is asked again later."""

    task_id: TaskId
    lane_id: LaneId


class KillLane(msgspec.Struct, frozen=True):
    """End the lane's process, in which the run goes on no more; ``LaneLost`` follows."""

    task_id: TaskId
    lane_id: LaneId


class AnswerTask(msgspec.Struct, frozen=True):
    """Tell the client how its request ended."""

    task_id: TaskId
    outcome: Outcome


class ReleaseTask(msgspec.Struct, frozen=True):
    """No lane touches the task's buffers any more: they may be reused.

    Comes with the answer, or later when a task was answered while still on a lane.
    """

    task_id: TaskId


class RecycleLane(msgspec.Struct, frozen=True):
    """End the idle lane's process and start another, for what it holds or has run.

    The lane counts as down from now on, until its ``LaneReady``.
    """

    lane_id: LaneId
    reason: RecycleReason


class AddLane(msgspec.Struct, frozen=True):
    """Make a lane for the models of the trust domain alone; `LaneReady` follows when it is up."""

    lane_id: LaneId
    domain: str


class RemoveLane(msgspec.Struct, frozen=True):
    """End the lane, up or not, which runs nothing; `LaneRemoved` and no other event follows."""

    lane_id: LaneId


class QuarantineModel(msgspec.Struct, frozen=True):
    """Tell operators that the model is not run for a while, as its runs keep ending their lanes.

    The scheduler itself rejects the model's tasks until then; see ``rules.quarantine``.
    """

    model: str
    #: How many lanes its runs ended, and for how long it is not run.
    reason: str


TaskCommand = (
    PrepareTask
    | LaunchTask
    | SuspendTask
    | ResumeTask
    | StopTask
    | LookAtLane
    | KillLane
    | AnswerTask
    | ReleaseTask
)
Command = TaskCommand | RecycleLane | AddLane | RemoveLane | QuarantineModel | JobCommand
