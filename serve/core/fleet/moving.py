"""Which tasks of a device may run on another, and what room a device has for those of others.

Looks at one scheduler at a time and changes nothing; see ``fleet`` for who moves where.
"""

from collections.abc import Iterator

from serve.core.lifecycle import State
from serve.core.rules.interference import company_on
from serve.core.scheduler import Scheduler
from serve.core.state.record import Record


def ranks(scheduler: Scheduler) -> bool:
    """Whether what runs next is decided by urgency alone, when a lane is free."""
    return scheduler._window.replans and not scheduler._discipline.holds_groups


def pending(scheduler: Scheduler) -> list[Record]:
    """Its tasks on no lane yet."""
    return [r for r in scheduler._tasks.records.values() if r.state.pending]


def room(scheduler: Scheduler) -> tuple[int, int]:
    """Slots and memory that the device has for others than what waits there already.

    A device that holds groups has none for others until nothing waits and its group has ended.
    """
    board = scheduler._board
    slots = board.free_slots - scheduler.queued_count
    held = scheduler._discipline.holds_groups and (scheduler.queued_count or board.plan.groups)
    if slots <= 0 or held:
        return 0, 0
    free_bytes = board.available_bytes
    if scheduler.queued_count:
        free_bytes -= sum(record.task.reserve_bytes for record in pending(scheduler))
    return slots, free_bytes


def stuck(scheduler: Scheduler, *, to_idle: bool) -> Iterator[Record]:
    """What waits at the device and could not start there now, those that run next first.

    With `to_idle`, where nothing executes, also what is not to join those that execute here.
    """
    board = scheduler._board
    company = company_on(board, scheduler._now) if to_idle else None
    slots, free_bytes = board.free_slots, board.available_bytes
    holds, groups = scheduler._discipline.holds_groups, scheduler._plan.groups
    first = groups[0] if groups else None
    for record in movable(scheduler):
        need_bytes: int = record.task.reserve_bytes
        startable = not holds or record.group is first
        apart = company and record.state is State.READY and not company.admits(record)
        if startable and slots > 0 and need_bytes <= free_bytes and not apart:
            slots -= 1
            free_bytes -= need_bytes
        else:
            yield record


def fitting(records: list[Record], slots: int, free_bytes: int, budget_bytes: int) -> list[Record]:
    """Those of the records, in order, that find room on a device.

    `budget_bytes`: all the memory there is, which is what a task that runs alone takes.
    """
    found: list[Record] = []
    for record in records:
        need_bytes: int = record.task.reserve_bytes
        if record.alone:
            need_bytes = max(need_bytes, budget_bytes)
        if need_bytes <= free_bytes:
            found.append(record)
            slots -= 1
            free_bytes -= need_bytes
            if slots == 0:
                break
    return found


def movable(scheduler: Scheduler) -> Iterator[Record]:
    """Pending tasks that may run elsewhere, those that run next first.

    Members of a group that has started under a discipline that holds groups stay with it; what
    has its place in a fixed window's slot stays until it is planned.
    """
    holds = scheduler._discipline.holds_groups
    for group in scheduler._plan.groups:
        if not (holds and group.active):
            yield from group.members
    if scheduler._window.replans:
        yield from (record for record in scheduler._planner.horizon() if record.group is None)
