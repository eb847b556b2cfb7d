"""A device as a fleet sees it: which of its tasks may run elsewhere, and its room for others'.

Reads one scheduler's parts; changes them only in `take_out` and `put_in`. See ``fleet`` for which
task moves where.
"""

from collections.abc import Iterable, Iterator

from serve.core.lifecycle import State
from serve.core.rules.co_running import co_runners_on
from serve.core.scheduler import Scheduler
from serve.core.state.ordered import Key
from serve.core.state.record import Record
from serve.core.types import Nanos, TaskId


class DeviceView:
    """One device of several."""

    __slots__ = ("_board", "_holds_groups", "_parts", "_tasks", "scheduler")

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._parts = scheduler.parts
        self._board, self._tasks = scheduler.parts.board, scheduler.parts.tasks
        self._holds_groups = scheduler.parts.discipline.holds_groups

    @property
    def queued_count(self) -> int:
        """Its tasks on no lane yet."""
        return self._tasks.pending

    @property
    def lanes_up(self) -> int:
        """Lanes that can work."""
        return self._board.lanes_up

    @property
    def budget_bytes(self) -> int:
        """Memory for tasks."""
        return self._board.ledger.budget_bytes

    @property
    def available_bytes(self) -> int:
        """Memory not reserved."""
        return self._board.available_bytes

    @property
    def free_slots(self) -> int:
        """Tasks that could be launched now if memory allows."""
        return self._board.free_slots

    @property
    def ranks(self) -> bool:
        """True when urgency alone decides what runs next on a free lane."""
        return self._parts.window.replans and not self._holds_groups

    @property
    def is_idle(self) -> bool:
        """True when nothing executes that could slow a newcomer, where runs slow one another."""
        return not self._board.executing_count and len(self._board.slowdown) > 1

    def record(self, task_id: TaskId) -> Record | None:
        """Return the record of a task on this device; None when it is not here."""
        return self._tasks.records.get(task_id)

    def pending(self) -> list[Record]:
        """Return its tasks on no lane yet."""
        return [r for r in self._tasks.records.values() if r.state.pending]

    def rank(self, record: Record, now_ns: Nanos) -> tuple[int, Key]:
        """Return how urgent the record, not launched, would be here; smaller is more urgent."""
        return self._board.rank(record, record.task.estimate.run_ns, now_ns)

    def wait_ns(self, need_bytes: int, now_ns: Nanos) -> tuple[int, int]:
        """Return the expected wait for a slot, and the work per slot that is there, in ns."""
        board = self._board
        runs = board.busy.values()
        done_ns = sum(run.run_ns - board.left_ns(run, now_ns) for run in runs)
        ahead_ns = (self._tasks.work_ns - done_ns) // board.slots
        slots, free_bytes = self.room()
        return (0 if slots > 0 and need_bytes <= free_bytes else ahead_ns), ahead_ns

    def room(self) -> tuple[int, int]:
        """Return slots and bytes free for others' tasks, beyond what waits here already.

        A device that holds groups has none until nothing waits and its group has ended.
        """
        board, queued = self._board, self._tasks.pending
        slots = board.free_slots - queued
        if slots <= 0 or (self._holds_groups and (queued or board.plan.groups)):
            return 0, 0
        free_bytes = board.available_bytes
        if queued:
            free_bytes -= sum(record.task.reserve_bytes for record in self.pending())
        return slots, free_bytes

    def movable(self) -> Iterator[Record]:
        """Yield pending tasks that may run elsewhere, in the order in which they would run here.

        Members of a started group stay with it where groups are held; tasks in a slot of a fixed
        window stay until they are planned.
        """
        for group in self._parts.plan.groups:
            if not (self._holds_groups and group.active):
                yield from group.members
        if self._parts.window.replans:
            horizon = self._parts.planner.horizon()
            yield from (record for record in horizon if record.group is None)

    def stuck(self, *, to_idle: bool) -> Iterator[Record]:
        """Yield movable tasks that could not start here now.

        With `to_idle`, for a device where nothing executes, also those that had better not join
        the runs that execute here.
        """
        board, groups = self._board, self._parts.plan.groups
        co_runners = co_runners_on(board, self._tasks.now_ns) if to_idle else None
        slots, free_bytes = board.free_slots, board.available_bytes
        first = groups[0] if groups else None
        for record in self.movable():
            need_bytes: int = record.task.reserve_bytes
            startable = not self._holds_groups or record.group is first
            waits = co_runners and record.state is State.READY and not co_runners.admits(record)
            if startable and slots > 0 and need_bytes <= free_bytes and not waits:
                slots -= 1
                free_bytes -= need_bytes
            else:
                yield record

    def take_out(self, records: Iterable[Record], now_ns: Nanos) -> None:
        """Remove pending records, which go to another device."""
        for record in records:
            self._tasks.take_out(record, now_ns)

    def put_in(self, records: list[Record], now_ns: Nanos, *, planned: bool) -> None:
        """Add pending records of another device, which had `planned` them or not."""
        parts = self._parts
        for record in records:
            self._tasks.put_in(record)
            if record.alone:
                record.reserve_all(parts.board.ledger.budget_bytes)
        handed_over = [r for r in records if r.attempt or r.promoted]
        for record in reversed(handed_over):
            parts.plan.put_first(record)
        others = [r for r in records if r not in handed_over]
        if others and planned and not parts.window.replans:
            parts.plan.append(others, pinned=True)
            return
        for record in others:
            parts.backlog.add(record)
            parts.window.arrived(record.task, now_ns)
