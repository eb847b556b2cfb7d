"""The paper's way: one group at a time, the next when all of it has ended.

A group's tasks start as each is prepared and fits. Those that end early leave their lane idle:
this is what the barrier costs.
"""

from serve.core.disciplines.base import WAIT, LaunchMove, Move, register_discipline
from serve.core.lifecycle import State
from serve.core.state.device_state import Board
from serve.core.types import Nanos


@register_discipline
class Barrier:
    """Only the first group of the plan runs."""

    name = "barrier"
    holds_groups = True
    suspends = False

    def could_start(self, board: Board) -> bool:
        """Return True when no group is under way and a lane is idle."""
        return board.free_slots > 0 and not (board.plan.groups and board.plan.groups[0].pinned)

    def decide(self, board: Board, bypass_limit: int, now_ns: Nanos) -> Move:
        """The first READY member of the first group that fits."""
        if board.plan.groups and board.free_slots > 0:
            ledger = board.ledger
            for record in board.plan.groups[0].members:
                if (
                    record.state is State.READY
                    and ledger.need_bytes(record.task) <= ledger.available_bytes
                    and board.idle_for(record.task)
                ):
                    return LaunchMove(record)
        return WAIT
