"""No barrier: a lane takes the next task in plan order as soon as lane and memory are free.

Order gives way in two cases, both bounded. A task being prepared holds an idle lane for as long
as its prepare is expected to take, so that a long follower does not start in front of it; later
than that the follower goes first. A prepared task that does not fit is passed by followers that
do, `bypass_limit` times; then the memory drains until it fits.
"""

from serve.core.board import Board
from serve.core.disciplines.base import WAIT, Launch, Move, Wait, register_discipline
from serve.core.lifecycle import State
from serve.core.plan import Record
from serve.core.types import Nanos


@register_discipline
class Rolling:
    """The next READY task in plan order."""

    name = "rolling"
    holds_groups = False

    def could_start(self, board: Board) -> bool:
        """When a lane is idle."""
        return board.free_slots > 0

    def decide(self, board: Board, bypass_limit: int, now_ns: Nanos) -> Move:
        """The first READY task that fits, unless the lane is held for an earlier one."""
        slots, available_bytes = board.free_slots, board.available_bytes
        if slots <= 0:
            return WAIT
        until_ns: Nanos | None = None
        bypassed: list[Record] = []
        for group in board.plan.groups:
            for record in group.members:
                need_bytes = record.task.reserve_bytes
                if record.state is State.READY:
                    if need_bytes <= available_bytes:
                        return Launch(record, tuple(bypassed))
                    if record.bypassed >= bypass_limit:
                        return Wait(until_ns)
                    bypassed.append(record)
                elif record.state is State.PREPARING and need_bytes <= available_bytes:
                    estimate = record.task.estimate
                    prepare_ns = estimate.solo_ns - estimate.run_ns
                    held_until_ns = Nanos(record.prepare_started_ns + prepare_ns)
                    if held_until_ns > now_ns:
                        slots -= 1
                        available_bytes -= need_bytes
                        if until_ns is None or held_until_ns < until_ns:
                            until_ns = held_until_ns
                        if slots == 0:
                            return Wait(until_ns)
        return Wait(until_ns)
