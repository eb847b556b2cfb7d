"""The run of one lane: one request, or several of one model merged into one.

Belongs to the driver's lock, like the tickets.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from serve.core.types import Bytes, Completed, FailReason, LaneId, Nanos, Task, Usage
from serve.errors import InvariantViolation
from serve.ipc.messages import Part, RunTask, TaskDone, TaskError
from serve.server.catalogue import ModelEntry
from serve.server.clock import now_ns
from serve.server.request_inputs import RequestInputs

#: Reasons for the end of a run that leave the lane intact.
_REASONS = frozenset(
    reason.value
    for reason in (
        FailReason.MODEL_ERROR,
        FailReason.OUT_OF_MEMORY,
        FailReason.NONFINITE,
        FailReason.STOPPED,
    )
)
_FLOAT_BYTES = 4

#: Corrects the estimates by a run; keeps nothing of its requests.
Lesson = Callable[[], None]

#: Lower bound of the time that the packets of a launch and of its end take; most of it is the
#: lane waking up.
LAUNCH_NS = Nanos(30_000)


class RunMember(Protocol):
    """A request as its run sees it."""

    entry: ModelEntry
    inputs: RequestInputs
    task: Task
    output_shape: tuple[int, int]
    nonfinite_values: int


class LaneRun:
    """A run from the command to launch it until its lane says how it ended."""

    def __init__(self, members: Sequence[RunMember], lane_id: LaneId) -> None:
        """All members are staged; the first one's task names the run."""
        self.members = tuple(members)
        self.lane_id = lane_id
        self.entry = self.members[0].entry
        self.launched_ns = now_ns()
        #: When the lane began it, as it says at the end; 0 before, or when that is not known.
        self.began_ns = 0
        self._learned = False
        if len(self.members) == 1:
            self.estimate = self.members[0].task.estimate
        else:
            self.estimate = self.entry.estimator.union(self._sizes)

    @property
    def task_id(self) -> int:
        """Id of the task that names the run."""
        return self.members[0].task.task_id

    @property
    def _sizes(self) -> list[tuple[int, ...]]:
        return [member.task.counted for member in self.members]

    def message(self, reserve_bytes: int, *, bounded: bool = False) -> RunTask:
        """Return the order to the lane to run within `reserve_bytes`, staged tensors included.

        `bounded`: see ``LaunchTask``.
        """
        parts = tuple(_part(member) for member in self.members)
        staged_bytes = sum(member.inputs.input_bytes for member in self.members)
        staged_bytes += sum(part.output_capacity_bytes for part in parts)
        limit_bytes = max(0, reserve_bytes - staged_bytes)
        return RunTask(
            self.task_id, self.entry.key, parts, limit_bytes, self.estimate.run_ns, bounded
        )

    def complaint(self, end: TaskDone | TaskError) -> str:
        """Return what cannot be true of the end that the lane reports; empty when all can."""
        if end.task_id != self.task_id:
            return f"ended task {end.task_id}, which it does not run"
        if isinstance(end, TaskError):
            return "" if end.reason in _REASONS else f"failed for the reason {end.reason!r}"
        if len(end.rows) != len(self.members):
            return f"ended {len(self.members)} requests with {len(end.rows)} outputs"
        if len(end.nonfinite) not in (0, len(self.members)):
            return f"counted {len(end.nonfinite)} outputs of {len(self.members)} requests"
        for member, rows in zip(self.members, end.rows, strict=True):
            size_bytes = _FLOAT_BYTES * rows * end.columns
            capacity_bytes = member.inputs.output_capacity_bytes
            if size_bytes > capacity_bytes:
                return f"wrote {size_bytes} bytes into {capacity_bytes}"
        return ""

    def ended(self, done: TaskDone) -> Usage:
        """Note the shape of every output, and return the time and memory that the run took."""
        for member, rows in zip(self.members, done.rows, strict=True):
            member.output_shape = (rows, done.columns)
        for member, count in zip(self.members, done.nonfinite, strict=False):
            member.nonfinite_values = count
        self.began_ns = done.began_ns
        # A union's inputs are the lane's own joined copy, which it has counted.
        staged = self.members[0].inputs.input_bytes if len(self.members) == 1 else 0
        peak = None if done.peak_bytes is None else Bytes(done.peak_bytes + staged)
        held = None if done.held_bytes is None else Bytes(done.held_bytes + staged)
        return Usage(Nanos(done.run_ns), peak, held)

    def lesson(self, outcome: Completed) -> Lesson | None:
        """Return the correction that the run teaches; None when it was returned before.

        `outcome` is that of any of its requests.
        """
        if self._learned:
            return None
        self._learned = True
        usage, when = outcome.usage, outcome.timeline
        executed_ns = when.finished_ns - when.launched_ns - when.suspended_ns
        run_ns = usage.run_ns - when.suspended_ns
        co_runners = when.co_run_ns / max(1, executed_ns)
        jobs = when.job_run_ns / max(1, executed_ns)
        peak_bytes: int | None = usage.peak_bytes
        held_bytes: int | None = usage.held_bytes
        # A union is estimated as if nothing were known of what its tensors hold.
        num_loops = by_kind = None
        if len(self.members) == 1:
            (only,) = self.members
            num_loops = only.inputs.num_loops
            by_kind = only.inputs.by_kind
            if peak_bytes is not None:
                # Estimates are of edges as int64.
                spared_bytes = only.inputs.spared_bytes(only.task.num_edges)
                peak_bytes += spared_bytes
                held_bytes = None if held_bytes is None else held_bytes + spared_bytes
        observe = self.entry.estimator.observe_union
        return partial(
            observe,
            self._sizes,
            run_ns,
            peak_bytes,
            held_bytes,
            co_runners,
            num_loops,
            by_kind,
            jobs,
        )

    def share_bytes(self, task: Task, peak_bytes: int | None) -> int | None:
        """Return the task's share of the run's peak, in proportion to each one's estimate."""
        if peak_bytes is None or len(self.members) == 1:
            return peak_bytes
        total_bytes = sum(other.task.estimate.peak_bytes for other in self.members)
        return peak_bytes * task.estimate.peak_bytes // max(1, total_bytes)


def _part(member: RunMember) -> Part:
    staged = member.inputs.staged
    if staged is None:
        raise InvariantViolation(f"task {member.task.task_id} is launched but was not prepared")
    return Part(
        staged.inputs,
        staged.output_offset_bytes,
        staged.output_capacity_bytes,
        staged.gather,
        member.inputs.output_refs,
        staged.is_shared,
    )
