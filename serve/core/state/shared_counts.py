"""Counts over all devices of a server: arrivals, tenants' shares, answers owed.

A ``Scheduler`` by itself has its own; those of a ``Fleet`` share one, so that a full queue, a fair
share and an overload are the server's and not one device's.
"""

from serve.core.rules.demand import Demand
from serve.core.rules.quarantine import Quarantine
from serve.core.rules.shares import Shares
from serve.core.rules.tenants import TenantRates
from serve.core.state.device_state import Board
from serve.core.state.history import History
from serve.core.types import GroupId, TaskId


class Totals:
    """Sums and numbers that belong to no device."""

    __slots__ = (
        "_boards",
        "_next_group_id",
        "demand",
        "history",
        "newest_id",
        "quarantine",
        "rates",
        "shares",
        "unanswered",
    )

    def __init__(self) -> None:
        self.demand = Demand()
        self.shares = Shares()
        self.rates = TenantRates()
        self.quarantine = Quarantine()
        self.history = History()
        #: Accepted tasks without an answer.
        self.unanswered = 0
        #: The last task that arrived.
        self.newest_id = TaskId(-1)
        self._boards: list[Board] = []
        self._next_group_id = 0

    def add_board(self, board: Board) -> None:
        """Add a device that works for this server."""
        self._boards.append(board)

    @property
    def slots(self) -> int:
        """Tasks that may execute at once on the lanes that are up; at least 1."""
        if len(self._boards) == 1:
            return self._boards[0].slots
        return sum(board.slots for board in self._boards if board.lanes_up) or 1

    def next_group_id(self) -> GroupId:
        """Return a number that no group of any device has."""
        group_id = self._next_group_id
        self._next_group_id = group_id + 1
        return GroupId(group_id)
