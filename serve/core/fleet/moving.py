"""Moves tasks between devices, and says on which device a new one starts first."""

from collections.abc import Iterator, Sequence
from typing import Any

from serve.core.device_view import DeviceView
from serve.core.lifecycle import State
from serve.core.state.record import Record
from serve.core.types import ZERO_NS, TaskId


class TaskMover:
    """Keeps every task on a device that can hold it, and no device idle while others queue."""

    __slots__ = ("_devices", "changed", "now_ns")

    def __init__(self, devices: Sequence[DeviceView]) -> None:
        self._devices = tuple(devices)
        #: The time of the event that is being handled.
        self.now_ns = ZERO_NS
        #: Devices that gave or got tasks and whose schedulers have not been asked since.
        self.changed: list[DeviceView] = []

    def soonest(self, need_bytes: int) -> DeviceView:
        """Return the device where a task of that size is expected to start first.

        Returns the largest when none can hold it, whose scheduler then rejects the task.
        """
        fitting = [d for d in self._devices if d.budget_bytes >= need_bytes]
        if not fitting:
            return max(self._devices, key=lambda d: d.budget_bytes)
        working = [d for d in fitting if d.lanes_up]
        return min(working or fitting, key=lambda d: d.wait_ns(need_bytes, self.now_ns))

    def make_fit(self, device: DeviceView, budget_bytes: int) -> None:
        """Move what the device can no longer hold when its budget becomes `budget_bytes`."""
        if budget_bytes < device.budget_bytes and device.queued_count:
            for record in device.pending():
                if record.task.reserve_bytes > budget_bytes:
                    self.place(record, record.task.reserve_bytes, device, budget_bytes)

    def place(
        self, record: Record, need_bytes: int, holder: DeviceView, budget_bytes: int | None = None
    ) -> DeviceView:
        """Return the record's device, or one it moves to when its own budget is too small."""
        if need_bytes <= (holder.budget_bytes if budget_bytes is None else budget_bytes):
            return holder
        others = [d for d in self._devices if d is not holder and d.budget_bytes >= need_bytes]
        if not others:
            return holder
        other = min(others, key=lambda d: (not d.lanes_up, d.wait_ns(need_bytes, self.now_ns)))
        self._move([record], holder, other)
        return other

    def leave_lost_devices(self) -> None:
        """Move what waits for a device without lanes, where another can hold it."""
        working = [d for d in self._devices if d.lanes_up]
        for lost in self._devices:
            if lost.lanes_up or not lost.queued_count or not working:
                continue
            for record in lost.pending():
                need_bytes: int = record.task.reserve_bytes
                if any(d.budget_bytes >= need_bytes for d in working):
                    self._move([record], lost, self.soonest(need_bytes))

    def bring_urgent(self, target: DeviceView, task_id: TaskId) -> None:
        """Move the most urgent task of all devices to the one where the task's lane comes free.

        Considers tasks that are prepared and wait for a slot. Does nothing where groups are held
        or plans never change.
        """
        record = target.record(task_id)
        if record is None or record.run is None or not target.ranks:
            return
        free_bytes = target.available_bytes + record.run.reserve_bytes
        best: tuple[Any, Record, DeviceView] | None = None
        for source in self._devices:
            if source.free_slots and source is not target:
                continue
            first = next((r for r in source.movable() if r.state is State.READY), None)
            if first is not None and not first.alone and first.task.reserve_bytes <= free_bytes:
                rank = target.rank(first, self.now_ns)
                if best is None or rank < best[0]:
                    best = rank, first, source
        if best is not None and best[2] is not target:
            self._move([best[1]], best[2], target)

    def steal(self) -> bool:
        """Move tasks to one device that could start them at once; return True if there are any."""
        found = next(self.steals(), None)
        if found is not None:
            self._move(*found)
        return found is not None

    def steals(self) -> Iterator[tuple[list[Record], DeviceView, DeviceView]]:
        """Yield tasks that wait while another device could start them, with source and target."""
        waiting = [d for d in self._devices if d.queued_count]
        if not waiting:
            return
        rooms = [(d, *d.room()) for d in self._devices]
        targets = [(d, slots, size) for d, slots, size in rooms if slots > 0]
        if not targets:
            return
        waiting.sort(key=lambda d: -d.queued_count)
        queues: dict[bool, list[tuple[DeviceView, list[Record]]]] = {}
        for target, slots, free_bytes in targets:
            idle = target.is_idle
            if idle not in queues:
                stuck_there = [(d, list(d.stuck(to_idle=idle))) for d in waiting]
                queues[idle] = [(d, records) for d, records in stuck_there if records]
            for source, records in queues[idle]:
                found = _fitting(records, slots, free_bytes, target.budget_bytes)
                if source is not target and found:
                    yield found, source, target

    def _move(self, records: list[Record], source: DeviceView, target: DeviceView) -> None:
        """Move pending records from one device to another."""
        self.changed += target, source
        planned = records[0].group is not None
        source.take_out(records, self.now_ns)
        target.put_in(records, self.now_ns, planned=planned)


def _fitting(records: list[Record], slots: int, free_bytes: int, budget_bytes: int) -> list[Record]:
    """Return those of the records, in order, for which a device with this room has a place.

    A task that runs alone takes `budget_bytes`, all the memory the device has.
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
