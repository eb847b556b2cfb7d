"""Several devices: one scheduler each, and which of them gets which task.

A task goes to the device where it is expected to start first, of those whose memory can ever hold
it. From there it is that device's, with its policy, window and ledger. While it is on no lane it
may move, since the host prepares it for all devices alike:

- to a device that could start it at once, while its own could not: no device idles while another
  has a queue for it;
- to a device whose lane comes free, if it is the most urgent of all tasks that wait for a lane;
- away from a device whose lanes are all down, or whose memory can no longer hold it.

Arrivals, tenants' shares and answers owed are counted over all devices (``shared_counts``), so
limits and fairness are the server's. With one device there is nothing to choose: see
``make_scheduler``.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from serve.core.commands import Command
from serve.core.device_view import DeviceView
from serve.core.events import (
    BudgetChanged,
    DomainClosed,
    DomainOpened,
    DrainStarted,
    Event,
    LaneLost,
    LaneMeasured,
    LaneReady,
    LaneReplaced,
    LimitsChanged,
    ModelUnloaded,
    SlowdownChanged,
    TaskArrived,
    TaskFailed,
    TaskFinished,
    TaskPrepared,
    TasksArrived,
    TenantsChanged,
    Tick,
)
from serve.core.fleet.moving import TaskMover
from serve.core.jobs.events import JobSubmitted
from serve.core.lifecycle import State
from serve.core.params import SchedulerParams
from serve.core.scheduler import Scheduler
from serve.core.state.shared_counts import Totals
from serve.core.types import Bytes, LaneId, Nanos, TaskId
from serve.errors import InvariantViolation


class Fleet:
    """Decides for several devices; to its driver it is a ``Scheduler``."""

    def __init__(self, params: SchedulerParams) -> None:
        self.params = params
        self._totals = Totals()
        #: The scheduler of each device, by DeviceId; to be looked at only.
        self.devices = tuple(
            Scheduler(replace(params, device=device, more_devices=()), self._totals)
            for device in params.devices
        )
        self._views = tuple(map(DeviceView, self.devices))
        self._of_lane: dict[LaneId, DeviceView] = {
            lane_id: view
            for view in self._views
            for lane_id in view.scheduler.params.device.lane_ids
        }
        self._mover = TaskMover(self._views)

    def handle(self, event: Event, now_ns: Nanos) -> list[Command]:
        """See ``Scheduler.handle``."""
        mover = self._mover
        now_ns = mover.now_ns = max(mover.now_ns, now_ns)
        out: list[Command] = []
        for view in self._concerned(event):
            out += view.scheduler.handle(event, now_ns)
        for view in self._views:
            wake_ns = view.scheduler.next_wakeup()
            if wake_ns is not None and wake_ns <= now_ns:
                mover.changed.append(view)
        mover.leave_lost_devices()
        self._ask_changed(out)
        self._fill_idle_devices(out)
        return out

    def next_wakeup(self) -> Nanos | None:
        """See ``Scheduler.next_wakeup``."""
        wakes = [scheduler.next_wakeup() for scheduler in self.devices]
        return min((wake_ns for wake_ns in wakes if wake_ns is not None), default=None)

    @property
    def jobs_wake_ns(self) -> Nanos | None:
        """See ``Scheduler.jobs_wake_ns``; no jobs train beside several devices."""
        return None

    @property
    def queued_count(self) -> int:
        """Accepted tasks not on a lane yet."""
        return sum(scheduler.queued_count for scheduler in self.devices)

    @property
    def running_count(self) -> int:
        """Runs on lanes, suspended ones included."""
        return sum(scheduler.running_count for scheduler in self.devices)

    @property
    def suspended_count(self) -> int:
        """Runs on lanes that stand suspended."""
        return sum(scheduler.suspended_count for scheduler in self.devices)

    @property
    def overdue_count(self) -> int:
        """See ``Scheduler.overdue_count``."""
        return sum(scheduler.overdue_count for scheduler in self.devices)

    @property
    def lanes_up(self) -> int:
        """Lanes that can work."""
        return sum(scheduler.lanes_up for scheduler in self.devices)

    @property
    def reserved_bytes(self) -> Bytes:
        """Memory that tasks on lanes hold, on all devices."""
        return Bytes(sum(scheduler.reserved_bytes for scheduler in self.devices))

    @property
    def budget_bytes(self) -> Bytes:
        """Memory for tasks, of all devices."""
        return Bytes(sum(scheduler.budget_bytes for scheduler in self.devices))

    @property
    def draining(self) -> bool:
        """True when nothing new is accepted."""
        return self.devices[0].draining

    @property
    def drained(self) -> bool:
        """Draining, and everything accepted is answered and released."""
        return all(scheduler.drained for scheduler in self.devices)

    @property
    def prepares_at_once(self) -> bool:
        """See ``Scheduler.prepares_at_once``; on one of the devices."""
        return any(scheduler.prepares_at_once for scheduler in self.devices)

    def quarantine_reason(self, model: str, now_ns: Nanos) -> str:
        """See ``Scheduler.quarantine_reason``."""
        return self._totals.quarantine.reason(model, now_ns)

    def state(self, task_id: TaskId) -> State | None:
        """See ``Scheduler.state``."""
        return self._holder(task_id).scheduler.state(task_id)

    def story(self, task_id: TaskId) -> tuple[str, ...]:
        """See ``Scheduler.story``; its moves between devices are not part of it."""
        return self._totals.history.story(task_id)

    def has_idle_device_with_work_elsewhere(self) -> bool:
        """Return True when a task could move to an idle device; never between two events."""
        return next(self._mover.steals(), None) is not None

    def _concerned(self, event: Any) -> Iterable[DeviceView]:
        """Return the devices that must hear of the event, to which its task may have moved."""
        match event:
            case TaskArrived(task):
                return [self._mover.soonest(task.reserve_bytes)]
            case TasksArrived(tasks):
                return [self._mover.soonest(max(task.reserve_bytes for task in tasks))]
            case (
                LaneReady(lane_id)
                | LaneLost(lane_id)
                | LaneMeasured(lane_id)
                | LaneReplaced(lane_id)
            ):
                return [self._device_of(lane_id)]
            case BudgetChanged(budget_bytes, device_id):
                view = self._views[device_id]
                self._mover.make_fit(view, budget_bytes)
                return [view]
            case TaskFinished(task_id) | TaskFailed(task_id):
                holder = self._holder(task_id)
                self._mover.bring_urgent(holder, task_id)
                return [holder]
            case DomainOpened() | DomainClosed():
                raise InvariantViolation("trust domains have lanes on a single device only")
            case JobSubmitted():
                raise InvariantViolation("jobs train beside requests on a single device only")
            case ModelUnloaded() | TenantsChanged():
                return self._views[:1]  # quarantine and tenants are those of all devices
            case SlowdownChanged() | LimitsChanged() | DrainStarted() | Tick():
                return self._views
            case TaskPrepared(task_id, found) if found is not None:
                holder = self._holder(task_id)
                record = holder.record(task_id)
                if record is None or not record.state.pending:
                    return [holder]
                return [self._mover.place(record, found.estimate.reserve_bytes, holder)]
            case _:
                return [self._holder(event.task_id)]

    def _holder(self, task_id: TaskId) -> DeviceView:
        """Return the device that the task is on; any device when it is on none."""
        for view in self._views:
            if view.record(task_id) is not None:
                return view
        return self._views[0]

    def _device_of(self, lane_id: LaneId) -> DeviceView:
        view = self._of_lane.get(lane_id)
        if view is None:
            raise InvariantViolation(f"lane {lane_id} is not one of {sorted(self._of_lane)}")
        return view

    def _fill_idle_devices(self, out: list[Command]) -> None:
        """Move tasks until no device idles while another has a queue for it."""
        for _ in range(self._totals.unanswered + 1):
            if not self._mover.steal():
                return
            self._ask_changed(out)
        raise InvariantViolation("tasks move between devices without end")

    def _ask_changed(self, out: list[Command]) -> None:
        changed = self._mover.changed
        while changed:
            out += changed.pop(0).scheduler.handle(Tick(), self._mover.now_ns)


def make_scheduler(params: SchedulerParams) -> Scheduler | Fleet:
    """Return what decides for the devices of `params`: a fleet when there are several."""
    return Fleet(params) if params.more_devices else Scheduler(params)
