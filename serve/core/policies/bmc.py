"""Balanced memory consumption: CoGNN's Algorithm 1.

Takes tasks in turn from the low and from the high end of memory, so that a group holds light and
heavy ones and resources are less in conflict. CoGNN closes a group that reaches the limit exactly;
here it may be used up.
"""

from collections.abc import Sequence

from serve.core.policies.base import Policy, register_policy
from serve.core.rules.packing import in_turn, pack, urgency
from serve.core.state.ordered import Key, SortedKeys
from serve.core.types import Capacity, Group, Nanos, Task


@register_policy
class BalancedMemory(Policy):
    """Balanced memory: by priority class, then least and most memory in turn."""

    name = "bmc"

    def key(self, task: Task) -> Key:
        """Return priority class, reserved memory, id."""
        return urgency(task), task.reserve_bytes, task.task_id

    def horizon(self, pending: SortedKeys, limit: int, now_ns: Nanos) -> list[Key]:
        """Return half of the keys from either end."""
        highest = limit // 2
        return pending.head(limit - highest) + pending.tail(highest)

    def plan(self, pending: Sequence[Task], capacity: Capacity, now_ns: Nanos) -> tuple[Group, ...]:
        """Return groups, each as full as it gets, in alternating order."""
        return pack(in_turn(pending, self.key), capacity)
