"""Several devices: one scheduler each, and who of them gets which task.

A task goes to the device where it is expected to start first, of those whose memory can ever hold
it. From there it is that device's, with its policy, window and ledger; but as long as it is on no
lane it may move, since the host prepares it for all devices alike:

- to a device that could start it at once, while its own could not: no device idles while another
  has a queue for it;
- to a device of which a lane comes free, if it is the most urgent of all that wait for one;
- away from a device whose lanes are all down, or whose memory can no longer hold it.

Arrivals, tenants' shares and answers owed are counted over all devices (``totals``), so limits and
fairness are the server's. With one device there is nothing to choose: see ``make_scheduler``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from serve.core.commands import Command
from serve.core.events import (
    BudgetChanged,
    DrainStarted,
    Event,
    LaneLost,
    LaneMeasured,
    LaneReady,
    ModelUnloaded,
    SlowdownChanged,
    TaskArrived,
    TaskFailed,
    TaskFinished,
    TaskPrepared,
    Tick,
)
from serve.core.fleet.moving import fitting, movable, pending, ranks, room, stuck
from serve.core.lifecycle import State
from serve.core.params import SchedulerParams
from serve.core.scheduler import Scheduler
from serve.core.state.record import Record
from serve.core.state.shared_counts import Totals
from serve.core.types import Bytes, LaneId, Nanos, TaskId
from serve.errors import InvariantViolation


class Fleet:
    """Decides for several devices; to its driver it is a ``Scheduler``."""

    def __init__(self, params: SchedulerParams) -> None:
        self.params = params
        self._totals = Totals()
        self._devices = tuple(
            Scheduler(replace(params, device=device, more_devices=()), self._totals)
            for device in params.devices
        )
        self._of_lane: dict[LaneId, Scheduler] = {
            lane_id: scheduler
            for scheduler in self._devices
            for lane_id in scheduler.params.device.lane_ids
        }
        self._now = Nanos(0)
        #: Those that gave or got tasks and have not been asked since what to do about it.
        self._changed: list[Scheduler] = []

    def handle(self, event: Event, now_ns: Nanos) -> list[Command]:
        """See ``Scheduler.handle``."""
        self._now = max(self._now, now_ns)
        out: list[Command] = []
        for scheduler in self._concerned(event):
            out += scheduler.handle(event, self._now)
        for scheduler in self._devices:
            wake_ns = scheduler.next_wakeup()
            if wake_ns is not None and wake_ns <= self._now:
                self._changed.append(scheduler)
        self._leave_lost_devices()
        self._ask_changed(out)
        self._fill_idle_devices(out)
        return out

    def next_wakeup(self) -> Nanos | None:
        """See ``Scheduler.next_wakeup``."""
        wakes = [scheduler.next_wakeup() for scheduler in self._devices]
        return min((wake_ns for wake_ns in wakes if wake_ns is not None), default=None)

    @property
    def queued_count(self) -> int:
        """Accepted tasks not on a lane yet."""
        return sum(scheduler.queued_count for scheduler in self._devices)

    @property
    def running_count(self) -> int:
        """Runs on lanes, suspended ones included."""
        return sum(scheduler.running_count for scheduler in self._devices)

    @property
    def suspended_count(self) -> int:
        """Runs on lanes that stand suspended."""
        return sum(scheduler.suspended_count for scheduler in self._devices)

    @property
    def overdue_count(self) -> int:
        """See ``Scheduler.overdue_count``."""
        return sum(scheduler.overdue_count for scheduler in self._devices)

    @property
    def lanes_up(self) -> int:
        """Lanes that can work."""
        return sum(scheduler.lanes_up for scheduler in self._devices)

    @property
    def reserved_bytes(self) -> Bytes:
        """Memory that tasks on lanes hold, on all devices."""
        return Bytes(sum(scheduler.reserved_bytes for scheduler in self._devices))

    @property
    def budget_bytes(self) -> Bytes:
        """Memory for tasks, of all devices."""
        return Bytes(sum(scheduler.budget_bytes for scheduler in self._devices))

    @property
    def devices(self) -> tuple[Scheduler, ...]:
        """Who decides for each device, by DeviceId; to be looked at only."""
        return self._devices

    @property
    def draining(self) -> bool:
        """Nothing new is accepted."""
        return self._devices[0].draining

    @property
    def drained(self) -> bool:
        """Draining, and everything accepted is answered and released."""
        return all(scheduler.drained for scheduler in self._devices)

    @property
    def prepares_at_once(self) -> bool:
        """See ``Scheduler.prepares_at_once``; on one of the devices."""
        return any(scheduler.prepares_at_once for scheduler in self._devices)

    def quarantine_reason(self, model: str, now_ns: Nanos | None = None) -> str:
        """See ``Scheduler.quarantine_reason``."""
        return self._totals.quarantine.reason(model, self._now if now_ns is None else now_ns)

    def state(self, task_id: TaskId) -> State | None:
        """See ``Scheduler.state``."""
        return self._holder(task_id).state(task_id)

    def story(self, task_id: TaskId) -> tuple[str, ...]:
        """See ``Scheduler.story``; its moves between devices are not part of it."""
        return self._totals.history.story(task_id)

    @property
    def schedulers(self) -> tuple[Scheduler, ...]:
        """One for each device."""
        return tuple(self._devices)

    def has_idle_device_with_work_elsewhere(self) -> bool:
        """Whether a task could move to an idle device at once; never between two events."""
        return next(self._steals(), None) is not None

    # Who is concerned.

    def _concerned(self, event: Any) -> Iterable[Scheduler]:
        """Those that must hear of the event."""
        match event:
            case TaskArrived(task):
                return [self._soonest(task.reserve_bytes)]
            case LaneReady(lane_id) | LaneLost(lane_id) | LaneMeasured(lane_id):
                return [self._device_of(lane_id)]
            case BudgetChanged(budget_bytes, device_id):
                scheduler = self._devices[device_id]
                self._make_fit(scheduler, budget_bytes)
                return [scheduler]
            case TaskFinished(task_id) | TaskFailed(task_id):
                holder = self._holder(task_id)
                self._bring_urgent(holder, task_id)
                return [holder]
            case ModelUnloaded():
                return self._devices[:1]  # the quarantine is that of all devices
            case SlowdownChanged() | DrainStarted() | Tick():
                return self._devices
            case TaskPrepared(task_id, found) if found is not None:
                holder = self._holder(task_id)
                record = holder._tasks.records.get(task_id)
                if record is None or not record.state.pending:
                    return [holder]
                return [self._holding(record, found.estimate.reserve_bytes, holder)]
            case _:
                return [self._holder(event.task_id)]

    def _holder(self, task_id: TaskId) -> Scheduler:
        """The device that the task is on; any, when it is on none."""
        for scheduler in self._devices:
            if task_id in scheduler._tasks.records:
                return scheduler
        return self._devices[0]

    def _device_of(self, lane_id: LaneId) -> Scheduler:
        scheduler = self._of_lane.get(lane_id)
        if scheduler is None:
            raise InvariantViolation(f"lane {lane_id} is not one of {sorted(self._of_lane)}")
        return scheduler

    # Where a task goes.

    def _soonest(self, need_bytes: int) -> Scheduler:
        """The device where a task of that size is expected to start first.

        One that can never hold it is chosen when none can: the largest, which says so.
        """
        fitting = [s for s in self._devices if s.budget_bytes >= need_bytes]
        if not fitting:
            return max(self._devices, key=lambda s: s.budget_bytes)
        working = [s for s in fitting if s.lanes_up]
        return min(working or fitting, key=lambda s: self._wait(s, need_bytes))

    def _wait(self, scheduler: Scheduler, need_bytes: int) -> tuple[int, int]:
        """Expected wait for a slot, and the work per slot that is there; both in ns."""
        board = scheduler._board
        runs = board.busy.values()
        done_ns = sum(run.run_ns - board.left_ns(run, self._now) for run in runs)
        ahead_ns = (scheduler._tasks.work_ns - done_ns) // board.slots
        slots, free_bytes = room(scheduler)
        return (0 if slots > 0 and need_bytes <= free_bytes else ahead_ns), ahead_ns

    def _make_fit(self, scheduler: Scheduler, budget_bytes: int) -> None:
        """The device's budget is about to be this: what it could no longer hold moves."""
        if budget_bytes < scheduler.budget_bytes and scheduler.queued_count:
            for record in pending(scheduler):
                if record.task.reserve_bytes > budget_bytes:
                    self._holding(record, record.task.reserve_bytes, scheduler, budget_bytes)

    def _holding(
        self, record: Record, need_bytes: int, holder: Scheduler, budget_bytes: int | None = None
    ) -> Scheduler:
        """The record's device, or if its budget is too small, one with room, to which it moves."""
        if need_bytes <= (holder.budget_bytes if budget_bytes is None else budget_bytes):
            return holder
        others = [s for s in self._devices if s is not holder and s.budget_bytes >= need_bytes]
        if not others:
            return holder
        other = min(others, key=lambda s: (not s.lanes_up, self._wait(s, need_bytes)))
        self._move([record], holder, other)
        return other

    def _leave_lost_devices(self) -> None:
        """What waits for a device without lanes runs elsewhere, if it can."""
        working = [s for s in self._devices if s.lanes_up]
        for lost in self._devices:
            if lost.lanes_up or not lost.queued_count or not working:
                continue
            for record in pending(lost):
                need_bytes = record.task.reserve_bytes
                fitting = [s for s in working if s.budget_bytes >= need_bytes]
                if fitting:
                    other = min(fitting, key=lambda s: self._wait(s, need_bytes))
                    self._move([record], lost, other)

    def _fill_idle_devices(self, out: list[Command]) -> None:
        """Move tasks until no device idles while another has a queue for it."""
        for _ in range(self._totals.unanswered + 1):
            stolen = next(self._steals(), None)
            if stolen is None:
                return
            records, source, target = stolen
            self._move(records, source, target)
            self._ask_changed(out)
        raise InvariantViolation("tasks move between devices without end")

    def _bring_urgent(self, target: Scheduler, task_id: TaskId) -> None:
        """A lane is about to come free: the most urgent of all that wait gets it, if it can.

        Of tasks that are prepared and wait for a slot on their device. Where groups are held, or
        plans never change, each device keeps to its own.
        """
        record = target._tasks.records.get(task_id)
        if record is None or record.run is None or not ranks(target):
            return
        board = target._board
        free_bytes = board.available_bytes + record.run.reserve_bytes
        best: tuple[Any, Record, Scheduler] | None = None
        for source in self._devices:
            if source._board.free_slots and source is not target:
                continue
            first = next((r for r in movable(source) if r.state is State.READY), None)
            if first is not None and not first.alone and first.task.reserve_bytes <= free_bytes:
                rank = board.rank(first, first.task.estimate.run_ns, self._now)
                if best is None or rank < best[0]:
                    best = rank, first, source
        if best is not None and best[2] is not target:
            self._move([best[1]], best[2], target)

    def _steals(self) -> Iterator[tuple[list[Record], Scheduler, Scheduler]]:
        """Tasks that wait for their device while another could start them; from where to where."""
        waiting = [s for s in self._devices if s.queued_count]
        if not waiting:
            return
        rooms = [(s, *room(s)) for s in self._devices]
        targets = [(s, slots, size) for s, slots, size in rooms if slots > 0]
        if not targets:
            return
        waiting.sort(key=lambda s: -s.queued_count)
        queues: dict[bool, list[tuple[Scheduler, list[Record]]]] = {}
        for target, slots, free_bytes in targets:
            idle = not target._board.executing_count and len(target._board.slowdown) > 1
            if idle not in queues:
                stuck_there = [(s, list(stuck(s, to_idle=idle))) for s in waiting]
                queues[idle] = [(s, records) for s, records in stuck_there if records]
            for source, records in queues[idle]:
                found = fitting(records, slots, free_bytes, target.budget_bytes)
                if source is not target and found:
                    yield found, source, target

    def _move(self, records: list[Record], source: Scheduler, target: Scheduler) -> None:
        """The records, pending, are the other device's from now on."""
        self._changed += target, source
        planned = records[0].group is not None
        for record in records:
            source._tasks.take_out(record, self._now)
            target._tasks.put_in(record)
            if record.alone:
                record.reserve_all(target.budget_bytes)
        handed_over = [r for r in records if r.attempt or r.promoted]
        for record in reversed(handed_over):
            target._plan.put_first(record)
        others = [r for r in records if r not in handed_over]
        if others and planned and not target._window.replans:
            target._plan.append(others, pinned=True)
            return
        for record in others:
            target._backlog.add(record)
            target._window.arrived(record.task, self._now)

    def _ask_changed(self, out: list[Command]) -> None:
        while self._changed:
            out += self._changed.pop(0).handle(Tick(), self._now)


def make_scheduler(params: SchedulerParams) -> Scheduler | Fleet:
    """Whoever decides for the devices of `params`."""
    return Fleet(params) if params.more_devices else Scheduler(params)
