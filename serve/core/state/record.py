"""Records of tasks, of runs on lanes and of planned groups.

A ``Record`` is one accepted task, from its admission until it is released. A ``Run`` is what a lane
holds, from launch until the lane gives it back: one task, or several of one model merged. A
``PlannedGroup`` is what the plan has of tasks that are to run together.
"""

import msgspec
from msgspec.structs import replace

from serve.core.lifecycle import State
from serve.core.state.ordered import Key
from serve.core.types import ZERO_NS, Bytes, GroupId, LaneId, LaneLook, Nanos, Sized, Task, TaskId


class Record(msgspec.Struct, eq=False):
    """Accepted task: its state and what happened to it so far."""

    task: Task
    #: The policy's sort key for it.
    key: Key
    #: Work ahead of it on arrival, per lane.
    backlog_ns: Nanos
    #: Class of its target, and work up to that class that had left when it arrived.
    target_class: int
    left_before_ns: int
    #: Its estimated solo time on arrival. All sums of work use it, whatever is learned later.
    work_ns: Nanos
    state: State = State.QUEUED
    #: The group it is planned in or runs in.
    group: "PlannedGroup | None" = None
    #: Set exactly while the state is `on_lane`.
    run: "Run | None" = None
    #: Runs started, the current one included.
    attempt: int = 0
    #: It was handed over once, by a lost lane or as it overran: the next loss is its end.
    retried: bool = False
    #: It overran its memory, so it runs again with all that it may take: all that the device has,
    #: unless its model may take less.
    alone: bool = False
    #: A union with it failed: it is not merged again.
    apart: bool = False
    prepare_started_ns: Nanos = ZERO_NS
    prepared_ns: Nanos = ZERO_NS
    prepare_exposed_ns: Nanos = ZERO_NS
    #: Times a later task took memory that this one, ready, was waiting for.
    bypassed: int = 0
    #: It has waited too long and goes before every other.
    promoted: bool = False

    def resize(self, found: Sized) -> None:
        """Replace the task by what preparing found it to be; its target stays as promised."""
        self.task = self.task.found(found)

    def reserve_all(self, budget_bytes: Bytes) -> None:
        """Have it, pending, run with all the memory it may take of `budget_bytes`."""
        estimate = self.task.estimate
        reserve_bytes = Bytes(max(estimate.peak_bytes, self.task.most_bytes(budget_bytes)))
        estimate = replace(estimate, reserve_bytes=reserve_bytes)
        self.task = replace(self.task, estimate=estimate, block=None)


class Run(msgspec.Struct, eq=False):
    """Run that a lane holds, executing or suspended."""

    #: The task by which lanes and commands name the run: the first of its members.
    task_id: TaskId
    #: Never empty.
    members: tuple[Record, ...]
    lane_id: LaneId
    #: Estimated, of all members together.
    run_ns: Nanos
    reserve_bytes: Bytes
    launched_ns: Nanos
    #: Work it still needs, as time alone: from the board's `work_ns` on while it executes, else
    #: from now on.
    mark_ns: int
    executing: bool = True
    #: Nobody waits for it any more, and its lane was told to stop it.
    stopping: bool = False
    #: It holds less than was reserved for it; see ``RunTakesLess``.
    gave_back: bool = False
    #: How long it stood suspended.
    suspended_ns: Nanos = ZERO_NS
    #: Since when it stands suspended, when it does.
    stopped_ns: Nanos = ZERO_NS
    #: Most other runs seen executing during it.
    co_runners: int = 0
    #: How long others executed beside it, summed over them; counted from the board's `co_run_ns`
    #: while it executes.
    co_run_ns: int = 0
    #: The same of training jobs, from the board's `job_time`.
    job_run_ns: int = 0
    #: Its lane is looked at when it has executed so long; see ``watch``.
    look_ns: Nanos = ZERO_NS
    #: The last look, and how long it had executed then.
    look: LaneLook | None = None
    looked_ns: Nanos = ZERO_NS
    #: Time it had a core; and for how long it has stood still.
    taken_ns: int = 0
    still_ns: Nanos = ZERO_NS
    #: It takes far longer than expected.
    overdue: bool = False
    #: Why it is stopped, when that is for taking too long.
    over_limit: str = ""

    @property
    def model(self) -> str:
        """The model of all members."""
        return self.members[0].task.model

    def executed_ns(self, now_ns: Nanos) -> Nanos:
        """Return how long it has executed."""
        return Nanos(now_ns - self.launched_ns - self.stood_ns(now_ns))

    def stood_ns(self, now_ns: Nanos) -> Nanos:
        """Return how long it has stood suspended since its launch."""
        if self.executing:
            return self.suspended_ns
        return Nanos(self.suspended_ns + now_ns - self.stopped_ns)


class PlannedGroup(msgspec.Struct, eq=False):
    """Tasks planned together, as far as they have not been launched or answered."""

    #: In launch order.
    members: list[Record]
    #: Members as planned.
    size: int
    pinned: bool
    #: Given with its first launch.
    group_id: GroupId | None = None
    #: Members on a lane now.
    active: int = 0
    #: A run that takes far too long, by itself: it is not in the plan, so no group waits for it.
    let_go: bool = False
