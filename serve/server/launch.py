"""What one lane is told to run: one request, or several of one model merged into one.

Belongs to the driver's lock, like the tickets.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from serve.core.types import Bytes, Completed, FailReason, LaneId, Nanos, Usage
from serve.ipc.messages import RunTask, TaskDone, TaskError

if TYPE_CHECKING:
    from serve.server.ticket import RequestTicket

#: Why a run ends that the lane is fine after.
_REASONS = frozenset(
    reason.value
    for reason in (FailReason.MODEL_ERROR, FailReason.OUT_OF_MEMORY, FailReason.STOPPED)
)
_FLOAT_BYTES = 4

#: Has a run correct the estimates; keeps nothing of its requests.
Lesson = Callable[[], None]

#: The packets of a launch and of its end, at least; most of it is the lane waking up.
LAUNCH_NS = Nanos(30_000)


class Launch:
    """A run from the command to launch it until its lane says how it ended."""

    def __init__(self, tickets: Sequence["RequestTicket"], lane_id: LaneId) -> None:
        """All tickets are prepared; the first one's task names the run."""
        self.tickets = tuple(tickets)
        self.lane_id = lane_id
        self.entry = self.tickets[0].entry
        self._learned = False
        for ticket in self.tickets:
            ticket.run = self
        first = self.tickets[0]
        if len(self.tickets) == 1:
            self.estimate = first.task.estimate
        else:
            self.estimate = self.entry.estimator.union(self._sizes)

    @property
    def _sizes(self) -> list[tuple[int, int]]:
        return [(ticket.task.num_nodes, ticket.task.num_edges) for ticket in self.tickets]

    def message(self, reserve_bytes: int) -> RunTask:
        """What the lane is to do within `reserve_bytes`, which what is staged counts against."""
        first = self.tickets[0]
        parts = tuple(ticket.launch() for ticket in self.tickets)
        staged_bytes = sum(ticket.input_bytes for ticket in self.tickets)
        staged_bytes += sum(part.output_capacity_bytes for part in parts)
        limit_bytes = max(0, reserve_bytes - staged_bytes)
        return RunTask(first.task.task_id, self.entry.key, parts, limit_bytes, self.estimate.run_ns)

    def complaint(self, said: TaskDone | TaskError) -> str:
        """What cannot be true of what the lane says of the end; empty when all can."""
        if said.task_id != self.tickets[0].task.task_id:
            return f"ended task {said.task_id}, which it does not run"
        if isinstance(said, TaskError):
            return "" if said.reason in _REASONS else f"failed for the reason {said.reason!r}"
        if len(said.rows) != len(self.tickets):
            return f"ended {len(self.tickets)} requests with {len(said.rows)} outputs"
        for ticket, rows in zip(self.tickets, said.rows, strict=True):
            size_bytes = _FLOAT_BYTES * rows * said.columns
            if size_bytes > ticket.output_capacity_bytes:
                return f"wrote {size_bytes} bytes into {ticket.output_capacity_bytes}"
        return ""

    def ended(self, said: TaskDone) -> Usage:
        """Note the shape of every output; what the run took."""
        for ticket, rows in zip(self.tickets, said.rows, strict=True):
            ticket.output_shape = (rows, said.columns)
        # A union's inputs are the lane's own joined copy, which it has counted.
        staged = self.tickets[0].input_bytes if len(self.tickets) == 1 else 0
        peak = None if said.peak_bytes is None else Bytes(said.peak_bytes + staged)
        held = None if said.held_bytes is None else Bytes(said.held_bytes + staged)
        return Usage(Nanos(said.run_ns), peak, held)

    def lesson(self, outcome: Completed) -> Lesson | None:
        """What corrects the estimates by the run, of which a request was answered so; once."""
        if self._learned:
            return None
        self._learned = True
        usage, when = outcome.usage, outcome.timeline
        executed_ns = when.finished_ns - when.launched_ns - when.suspended_ns
        run_ns = usage.run_ns - when.suspended_ns
        beside = when.beside_ns / max(1, executed_ns)
        # A union is estimated as if its loops were unknown.
        num_loops = self.tickets[0].num_loops if len(self.tickets) == 1 else None
        peak_bytes: int | None = usage.peak_bytes
        held_bytes: int | None = usage.held_bytes
        if peak_bytes is not None and len(self.tickets) == 1:
            # Estimates are of edges as int64.
            spared_bytes = self.tickets[0].spared_bytes
            peak_bytes += spared_bytes
            held_bytes = None if held_bytes is None else held_bytes + spared_bytes
        observe = self.entry.estimator.observe_union
        return partial(observe, self._sizes, run_ns, peak_bytes, held_bytes, beside, num_loops)

    def share_bytes(self, ticket: "RequestTicket", peak_bytes: int | None) -> int | None:
        """The ticket's share of the run's peak, by what each would need alone."""
        if peak_bytes is None or len(self.tickets) == 1:
            return peak_bytes
        total_bytes = sum(other.task.estimate.peak_bytes for other in self.tickets)
        return peak_bytes * ticket.task.estimate.peak_bytes // max(1, total_bytes)
