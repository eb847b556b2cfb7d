"""Patience: the task that waited longest goes first after enough other launches."""

from serve.core.state.backlog import Backlog
from serve.core.state.device_state import Board
from serve.core.state.record import Record


class Patience:
    """Counts launches past the longest waiting task, pending or suspended."""

    __slots__ = ("_limit", "_oldest", "_passed_over")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._oldest: Record | None = None
        self._passed_over = 0

    def nobody_waits(self) -> None:
        """Forget who waited longest: the one launched was the only one."""
        self._oldest, self._passed_over = None, 0

    def launched(self, backlog: Backlog, board: Board) -> Record | None:
        """Count a launch; return the longest waiting record once `limit` others went before it."""
        oldest = backlog.oldest()
        for run in board.busy.values():
            if run.executing:
                continue
            for record in run.members:
                if not record.promoted and (
                    oldest is None or record.task.task_id < oldest.task.task_id
                ):
                    oldest = record
        if oldest is None or oldest is not self._oldest:
            self._oldest, self._passed_over = oldest, 0
            return None
        self._passed_over += 1
        if self._passed_over < self._limit:
            return None
        self._oldest, self._passed_over = None, 0
        return oldest
