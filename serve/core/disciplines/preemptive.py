"""Rolling, and a running task is suspended when a more urgent one is ready.

A suspended task keeps its lane and its memory and goes on later; so a device for this has more
lanes than it executes tasks at once. The policy says who is more urgent. Where tasks cannot be
suspended this is ``rolling``.
"""

from serve.core.disciplines.base import (
    WAIT,
    LaunchMove,
    Move,
    ResumeMove,
    SuspendMove,
    WaitMove,
    register_discipline,
)
from serve.core.disciplines.order import next_launch
from serve.core.rules.packing import DEFAULT_PRIORITY, urgency
from serve.core.state.device_state import Board
from serve.core.state.record import Record, Run
from serve.core.types import Nanos


@register_discipline
class Preemptive:
    """The most urgent tasks execute."""

    name = "preemptive"
    holds_groups = False
    suspends = True

    def could_start(self, board: Board) -> bool:
        """Return True when a lane is idle: a task that is urgent enough gets a slot there."""
        return bool(board.idle) if board.can_suspend else board.free_slots > 0

    def decide(self, board: Board, bypass_limit: int, now_ns: Nanos) -> Move:
        """Start or resume the most urgent, in a free slot or in place of a less urgent one."""
        if not board.can_suspend:
            return next_launch(board, bypass_limit, now_ns, lanes=board.free_slots, hold=True)
        move = next_launch(board, bypass_limit, now_ns, lanes=len(board.idle), hold=False)
        executing, open_slots = board.executing_count, board.open_slots
        suspended = len(board.busy) - executing
        if not suspended and (isinstance(move, WaitMove) or open_slots > 0):
            return move
        joining: Record | None = None
        if isinstance(move, LaunchMove):
            joining = move.record
            if suspended and (
                is_late(joining, now_ns) or (is_last_lane(joining, board) and is_demoted(joining))
            ):
                joining = None
        if joining is None and suspended == 1 and open_slots > 0:
            run = next(run for run in board.busy.values() if not run.executing)
            return ResumeMove(run)
        order = board.urgent_first(joining, now_ns)
        at = 0
        for first in order:
            if not (isinstance(first, Run) and first.executing):
                break
            at += 1
        if open_slots > 0:
            if isinstance(first, Run):
                return ResumeMove(first)
            return move
        if at == executing:
            return WAIT
        for victim in reversed(order[at:]):
            if isinstance(victim, Run) and victim.executing and not victim.stopping:
                break
        else:
            return WAIT
        if isinstance(first, Run):
            return SuspendMove(victim, ResumeMove(first))
        if is_last_lane(first, board) and (is_demoted(first) or can_wait(first, board, now_ns)):
            return WAIT
        assert isinstance(move, LaunchMove)
        return SuspendMove(victim, move)


def is_late(record: Record, now_ns: Nanos) -> bool:
    """Return True when the record misses its target even if it starts now.

    Such a record takes no lane while runs are suspended. It would gain nothing, and would soon be
    suspended itself on a lane that a task still in time needs. Under overload, suspended runs
    would otherwise use up the lanes.
    """
    task = record.task
    return not record.promoted and now_ns + task.estimate.run_ns > task.run_due_ns


def is_last_lane(record: Record, board: Board) -> bool:
    """Return True when one idle lane is left that may run the record's task."""
    return len(board.idle_for(record.task)) == 1


def is_demoted(record: Record) -> bool:
    """Return True when the record comes after those of the default priority.

    Such a record does not get the last lane while runs are suspended: under a flood, demoted
    tasks would soon hold every lane, and the other tenants would find none.
    """
    return urgency(record.task) > DEFAULT_PRIORITY


def can_wait(record: Record, board: Board, now_ns: Nanos) -> bool:
    """Return True when the record can wait for the first slot that comes free and be in time.

    Once every lane is held, no newcomer can be served early, however urgent; so the last idle
    lane goes only to a task that cannot wait.
    """
    soonest_ns = min(board.left_ns(run, now_ns) for run in board.busy.values() if run.executing)
    return now_ns + soonest_ns + record.task.estimate.run_ns <= record.task.run_due_ns
