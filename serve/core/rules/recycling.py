"""Lanes that hold more memory than they may, as a model leaks: each is started anew when idle.

What a lane holds between runs is in no reservation, so no ledger can keep it within the budget. One
lane at a time stands down for it, so that the others serve meanwhile; a lane that holds twice what
it may does not wait for that.
"""

from collections.abc import Set
from typing import Final

from serve.core.types import Bytes, LaneId


class Recycling:
    """Lanes that are to be started anew, and the one that is starting."""

    def __init__(self, limit_bytes: Bytes | None) -> None:
        """Set the limit; None lets lanes hold any amount."""
        self._limit_bytes: Final = limit_bytes
        #: Of lanes over the limit.
        self._held_bytes: dict[LaneId, Bytes] = {}
        #: Lanes over the limit that have not stood down yet.
        self.over: Set[LaneId] = self._held_bytes.keys()
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

    def next(self, idle: Set[LaneId]) -> LaneId | None:
        """Return the lane of `idle` to start anew now, the one that holds most first, or None."""
        found = max(self._held_bytes.keys() & idle, key=self._rank, default=None)
        if found is None or self._limit_bytes is None:
            return None
        if self._leaving is not None and self._held_bytes[found] <= 2 * self._limit_bytes:
            return None
        del self._held_bytes[found]
        self._leaving = found
        return found

    def restarted(self, lane_id: LaneId) -> None:
        """Forget what the lane's former process held."""
        self._held_bytes.pop(lane_id, None)

    def removed(self, lane_id: LaneId) -> None:
        """Forget the lane, which never comes back."""
        self.restarted(lane_id)
        self.up(lane_id)

    def up(self, lane_id: LaneId) -> None:
        """Note that the lane serves again."""
        if self._leaving == lane_id:
            self._leaving = None

    def _rank(self, lane_id: LaneId) -> tuple[int, int]:
        return self._held_bytes[lane_id], -lane_id
