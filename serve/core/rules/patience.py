"""Patience: the task that waited longest goes first after enough other launches.

Launches alone bound no wait where many are late: of forty, each would wait for 128 launches in
turn. So one that is late and has waited for ``LONG_WAIT_NS`` goes first after a sixteenth of them.
"""

from collections.abc import Iterator

from serve.core.rules.packing import YIELDING, urgency
from serve.core.state.backlog import Backlog
from serve.core.state.device_state import Board
from serve.core.state.record import Record
from serve.core.types import Nanos

#: From here on the wait of a late task is long.
LONG_WAIT_NS = 3_000_000_000
_SHARE_OF_LIMIT = 16


class Patience:
    """Counts launches past the longest waiting task, pending or suspended."""

    __slots__ = ("_holds_groups", "_limit", "_oldest", "_passed_over")

    def __init__(self, limit: int, *, holds_groups: bool) -> None:
        """Let `limit` go before another; with `holds_groups` none passes a pinned one for long."""
        self._limit = limit
        self._holds_groups = holds_groups
        self._oldest: Record | None = None
        self._passed_over = 0

    def nobody_waits(self) -> None:
        """Forget who waited longest: the one launched was the only one."""
        self._oldest, self._passed_over = None, 0

    def launched(self, backlog: Backlog, board: Board, now_ns: Nanos) -> Record | None:
        """Count a launch; return the longest waiting record once enough others went before it."""
        oldest = backlog.oldest()
        for record in self._beside_backlog(board):
            if not record.promoted and (
                oldest is None or record.task.task_id < oldest.task.task_id
            ):
                oldest = record
        if oldest is None or oldest is not self._oldest:
            self._oldest, self._passed_over = oldest, 0
            return None
        self._passed_over += 1
        if self._passed_over < self._limit_for(oldest, now_ns):
            return None
        self._oldest, self._passed_over = None, 0
        return oldest

    def _beside_backlog(self, board: Board) -> Iterator[Record]:
        """Yield what stands suspended, and what keeps its place in the plan and may be passed by.

        That is what was handed over, and all of a fixed window.
        """
        for run in board.busy.values():
            if not run.executing:
                yield from run.members
        if not self._holds_groups:
            for group in board.plan.groups:
                if not group.pinned:
                    break  # pinned ones come first
                yield from group.members

    def _limit_for(self, record: Record, now_ns: Nanos) -> int:
        """Return how many may go before it: fewer after a long wait, unless it yields to all.

        To let a tenant that is ahead of others through sooner would take their share: 41 instead of
        45 % for one beside six urgent clients (``test_six_urgent_clients_leave_...``).
        """
        task = record.task
        due_ns = task.arrived_ns + max(task.qos.target_ns, LONG_WAIT_NS)
        if now_ns < due_ns or urgency(task) >= YIELDING:
            return self._limit
        return max(self._limit // _SHARE_OF_LIMIT, 1)
