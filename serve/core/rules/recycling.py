"""Lanes that hold too much memory or have served for long: each is started anew when idle.

What a lane holds between runs, as a model leaks, is in no reservation, so no ledger can keep it
within the budget. One lane at a time stands down for it, so that the others serve meanwhile; a lane
that holds twice what it may does not wait for that.
"""

from collections.abc import Set
from typing import Final

from serve.core.types import Bytes, LaneId, RecycleReason


class Recycling:
    """Lanes that are to be started anew, and the one that is starting."""

    def __init__(self, limit_bytes: Bytes | None, most_requests: int | None) -> None:
        """Set what a lane may hold, and the requests of one process; None sets no limit."""
        self._limit_bytes: Final = limit_bytes
        self._most_requests: Final = most_requests
        #: Of lanes that hold more than they may.
        self._held_bytes: dict[LaneId, Bytes] = {}
        #: Requests that each lane's process has run; empty without a limit.
        self._requests: dict[LaneId, int] = {}
        self._due: set[LaneId] = set()
        #: Lanes over a limit that have not stood down yet.
        self.over: Set[LaneId] = self._due
        self._leaving: LaneId | None = None

    @property
    def busy(self) -> bool:
        """True while a lane is being started anew."""
        return self._leaving is not None

    def measured(self, lane_id: LaneId, held_bytes: Bytes) -> None:
        """Note how much the lane holds between runs."""
        if self._limit_bytes is not None and held_bytes > self._limit_bytes:
            self._held_bytes[lane_id] = held_bytes
        else:
            self._held_bytes.pop(lane_id, None)
        self._judge(lane_id)

    def ran(self, lane_id: LaneId, requests: int) -> None:
        """Note that a run of so many requests has ended on the lane."""
        if self._most_requests is not None:
            self._requests[lane_id] = self._requests.get(lane_id, 0) + requests
            self._judge(lane_id)

    def next(self, idle: Set[LaneId]) -> tuple[LaneId, RecycleReason] | None:
        """Return the lane of `idle` to start anew now, and why; None when none is.

        Lanes that hold too much come first, and of these the one that holds most.
        """
        found = max(self._due & idle, key=self._rank, default=None)
        if found is None:
            return None
        held_bytes = self._held_bytes.get(found, Bytes(0))
        if self._leaving is not None and held_bytes <= 2 * (self._limit_bytes or 0):
            return None
        self.restarted(found)
        self._leaving = found
        return found, "memory" if held_bytes else "requests"

    def restarted(self, lane_id: LaneId) -> None:
        """Forget what the lane's former process held and ran."""
        self._held_bytes.pop(lane_id, None)
        self._requests.pop(lane_id, None)
        self._due.discard(lane_id)

    def removed(self, lane_id: LaneId) -> None:
        """Forget the lane, which never comes back."""
        self.restarted(lane_id)
        self.up(lane_id)

    def up(self, lane_id: LaneId) -> None:
        """Note that the lane serves again."""
        if self._leaving == lane_id:
            self._leaving = None

    def _judge(self, lane_id: LaneId) -> None:
        most = self._most_requests
        if lane_id in self._held_bytes or (most and self._requests.get(lane_id, 0) >= most):
            self._due.add(lane_id)
        else:
            self._due.discard(lane_id)

    def _rank(self, lane_id: LaneId) -> tuple[int, int, int]:
        return self._held_bytes.get(lane_id, 0), self._requests.get(lane_id, 0), -lane_id
