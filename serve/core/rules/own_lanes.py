"""Lanes of trust domains: as many as tasks may execute at once, for as long as models need them.

They add no slots and no memory: a task on such a lane executes instead of one on another. A lane of
a domain that is closed goes when its run has ended.
"""

from collections.abc import Iterable, Iterator
from itertools import count, islice

from serve.core.commands import AddLane, RemoveLane
from serve.core.rules.recycling import Recycling
from serve.core.state.device_state import Board
from serve.core.types import LaneId
from serve.errors import InvariantViolation


class OwnLanes:
    """The lanes of all trust domains of a device."""

    __slots__ = ("_board", "_ending", "_recycling", "_shared", "leaving")

    def __init__(self, board: Board, shared: Iterable[LaneId], recycling: Recycling) -> None:
        """Begin without domains; `shared` are the lanes of models without one."""
        self._board, self._recycling = board, recycling
        self._shared = frozenset(shared)
        #: Lanes to be removed when they run nothing.
        self.leaving: set[LaneId] = set()
        #: Lanes that are removed, of which something may be left.
        self._ending: set[LaneId] = set()

    def require(self, lane_id: LaneId) -> None:
        """Raise InvariantViolation unless there is such a lane."""
        if lane_id not in self._shared and lane_id not in self._board.domain_of:
            known = sorted({*self._shared, *self._board.domain_of})
            raise InvariantViolation(f"lane {lane_id} is not one of {known}")

    def open(self, domain: str) -> list[AddLane]:
        """Have the domain keep its lanes, and return those to be made for it."""
        there = self._of(domain)
        self.leaving.difference_update(there)
        lacking = self._board.max_slots - len(there)
        added = [AddLane(lane_id, domain) for lane_id in islice(self._free_ids(), lacking)]
        for one in added:
            self._board.add_lane(one.lane_id, domain)
        return added

    def close(self, domain: str) -> None:
        """Have the domain's lanes removed as soon as they run nothing."""
        self.leaving.update(self._of(domain))

    def remove_idle(self) -> list[RemoveLane]:
        """Remove the leaving lanes that run nothing."""
        idle = sorted(self.leaving - self._board.busy.keys())
        for lane_id in idle:
            self._board.remove_lane(lane_id)
            self._recycling.removed(lane_id)
        self.leaving.difference_update(idle)
        self._ending.update(idle)
        return [RemoveLane(lane_id) for lane_id in idle]

    def removed(self, lane_id: LaneId) -> None:
        """Note that nothing is left of a lane; raises InvariantViolation for one that is there."""
        if lane_id not in self._ending:
            raise InvariantViolation(f"lane {lane_id} is gone and was not removed")
        self._ending.remove(lane_id)

    def _of(self, domain: str) -> list[LaneId]:
        return [lane_id for lane_id, name in self._board.domain_of.items() if name == domain]

    def _free_ids(self) -> Iterator[LaneId]:
        taken = self._shared | self._ending | self._board.domain_of.keys()
        return (LaneId(number) for number in count() if number not in taken)
