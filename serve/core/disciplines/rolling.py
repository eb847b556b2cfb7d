"""No barrier: a lane takes the next task in plan order as soon as lane and memory are free."""

from serve.core.disciplines.base import Move, register_discipline
from serve.core.disciplines.order import next_launch
from serve.core.state.device_state import Board
from serve.core.types import Nanos


@register_discipline
class Rolling:
    """The next READY task in plan order; see ``order.next_launch`` for what fits when."""

    name = "rolling"
    holds_groups = False
    suspends = False

    def could_start(self, board: Board) -> bool:
        """Return True when a lane is idle."""
        return board.free_slots > 0

    def decide(self, board: Board, bypass_limit: int, now_ns: Nanos) -> Move:
        """Launch the next, if a lane is free."""
        return next_launch(board, bypass_limit, now_ns, lanes=board.free_slots, hold=True)
