"""Capacity arithmetic shared by policies: from an order of tasks to groups that fit."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from serve.core.types import Bytes, Capacity, Group, Task

#: Where priority 0, the default, stands: priority 1 is more urgent, 3 and above less.
DEFAULT_PRIORITY = 2
#: Priorities from here on are of tasks that yield to all others, late ones too; see ``shares``.
YIELDING = 1 << 32
#: And from here on of tenants that ask for more than their limits allow; see ``tenants``.
BEYOND_LIMITS = 1 << 33


def urgency(task: Task) -> int:
    """The task's priority class, smaller first: 1 is most urgent, the default counts as 2."""
    return task.qos.priority or DEFAULT_PRIORITY


def less_urgent(task: Task) -> Task:
    """The task one priority class later."""
    return replace(task, qos=replace(task.qos, priority=urgency(task) + 1))


def behind_others(task: Task) -> Task:
    """The task in a class that runs after all that clients can ask for."""
    return replace(task, qos=replace(task.qos, priority=YIELDING + urgency(task)))


def beyond_limits(task: Task) -> Task:
    """The task in a class after those behind all others, which leaves them the last idle lane."""
    return replace(task, qos=replace(task.qos, priority=BEYOND_LIMITS + urgency(task)))


def in_turn(tasks: Iterable[Task], key: Callable[[Task], Any]) -> list[Task]:
    """The tasks of each priority class in turn from the low and the high end of `key`.

    A more urgent class comes before a less urgent one; `key` sorts by class first.
    """
    ordered: list[Task] = []
    for _, members in groupby(sorted(tasks, key=key), key=urgency):
        rising = list(members)
        alternating = rising.copy()
        half = (len(rising) + 1) // 2
        alternating[::2] = rising[:half]
        alternating[1::2] = rising[half:][::-1]
        ordered += alternating
    return ordered


def balance_threshold(tasks: Iterable[Task], capacity: Capacity) -> Bytes:
    """Return GNNSched's gTH = ceil(SP / ceil(SP / MA)), the memory of groups of equal size.

    SP is the sum of the tasks' reservations, MA the capacity's memory. A hint for balance only;
    the capacity stays the limit.
    """
    total_bytes = sum(task.reserve_bytes for task in tasks)
    if total_bytes == 0:
        return capacity.memory_bytes
    groups = -(-total_bytes // max(1, capacity.memory_bytes))
    return Bytes(-(-total_bytes // groups))


def pack(
    tasks: Sequence[Task], capacity: Capacity, threshold_bytes: Bytes | None = None
) -> tuple[Group, ...]:
    """Cut `tasks` into groups, keeping their order.

    A group closes when the next task would not fit beside it, when its slots are used, or when
    it has passed `threshold_bytes`. Raises ValueError for a task that fits nowhere.
    """
    limit_bytes, slots = capacity.memory_bytes, capacity.slots
    if threshold_bytes is None:
        threshold_bytes = limit_bytes
    groups: list[Group] = []
    members: list[Task] = []
    used_bytes = 0
    for task in tasks:
        need_bytes = task.estimate.reserve_bytes
        if members and (
            used_bytes > threshold_bytes
            or used_bytes + need_bytes > limit_bytes
            or len(members) == slots
        ):
            groups.append(Group(tuple(members)))
            members = []
            used_bytes = 0
        if need_bytes > limit_bytes:
            raise ValueError(f"task {task.task_id}: {need_bytes} bytes, capacity {limit_bytes}")
        members.append(task)
        used_bytes += need_bytes
    if members:
        groups.append(Group(tuple(members)))
    return tuple(groups)
