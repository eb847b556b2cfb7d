"""The next launch in plan order, for the disciplines without a barrier."""

from serve.core.disciplines.base import WAIT, LaunchMove, WaitMove
from serve.core.lifecycle import State
from serve.core.rules.co_running import co_runners_on
from serve.core.rules.packing import BEYOND_LIMITS, urgency
from serve.core.state.device_state import Board
from serve.core.state.record import Record
from serve.core.types import Nanos

#: When so many had better not join those that execute, no more are asked: each costs about 10 µs.
MOST_APART = 4

#: Looked up for every task in the plan.
_PREPARING, _READY = State.PREPARING, State.READY


def next_launch(
    board: Board, bypass_limit: int, now_ns: Nanos, *, lanes: int, hold: bool
) -> LaunchMove | WaitMove:
    """The first READY task in plan order that fits, for one of `lanes` lanes.

    Order gives way in two cases, both bounded. A prepared task that does not fit is passed by
    followers that do, `bypass_limit` times; then the memory drains until it fits. With `hold`,
    a task being prepared holds a lane for as long as its prepare is expected to take, so that
    no long follower starts in front of it; later than that followers go first. Where there is no
    follower that time is nobody's: drivers need no timer for a request that is alone.

    Where runs disturb one another, one that is not to join those that execute waits, and its
    followers are looked at; see ``company``.
    """
    if lanes <= 0 or not board.plan.count:
        return WAIT
    ledger, available_bytes = board.ledger, board.available_bytes
    co_runners, apart, free = co_runners_on(board, now_ns), 0, lanes
    until_ns: Nanos | None = None
    bypassed: list[Record] = []
    for group in board.plan.groups:
        for record in group.members:
            need_bytes = ledger.need_bytes(record.task)
            if record.state is _READY:
                if not board.idle_for(record.task):
                    continue  # it waits for a lane of its domain, which followers cannot take
                if leaves_last_lane(record, board, free):
                    continue
                if need_bytes <= available_bytes:
                    if co_runners is None or co_runners.admits(record):
                        return LaunchMove(record, tuple(bypassed))
                    apart += 1
                    if apart == MOST_APART:
                        return WaitMove(until_ns)
                    continue
                if record.bypassed >= bypass_limit:
                    return WaitMove(until_ns)
                bypassed.append(record)
            elif hold and record.state is _PREPARING and need_bytes <= available_bytes:
                estimate = record.task.estimate
                prepare_ns = estimate.solo_ns - estimate.run_ns
                held_until_ns = Nanos(record.prepare_started_ns + prepare_ns)
                if held_until_ns > now_ns:
                    lanes -= 1
                    available_bytes -= need_bytes
                    if until_ns is None or held_until_ns < until_ns:
                        until_ns = held_until_ns
                    if lanes == 0:
                        return WaitMove(until_ns) if _has_ready(board) else WAIT
    return WaitMove(until_ns) if bypassed else WAIT


def leaves_last_lane(record: Record, board: Board, lanes: int) -> bool:
    """Return True when the record is beyond its tenant's limits, and one lane is left beside runs.

    `lanes` counts those that could be taken. The next request of another tenant finds one then,
    also where no run can be suspended for it.
    """
    return (
        lanes == 1
        and urgency(record.task) >= BEYOND_LIMITS
        and bool(board.busy)
        and not record.promoted
    )


def _has_ready(board: Board) -> bool:
    return any(
        record.state is State.READY for group in board.plan.groups for record in group.members
    )
