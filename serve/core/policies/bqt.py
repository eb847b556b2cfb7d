"""Balanced QoS targets: GNNSched's Algorithm 2, made memory-safe.

Takes tasks in turn from the short and from the long end, so that heavy and light ones share a
group and interfere less. Within a priority class; a more urgent class is planned before a less
urgent one. The memory limit is a hard one, as in ``sqtf``.
"""

from collections.abc import Sequence

from serve.core.policies.base import Policy, register_policy
from serve.core.rules.packing import balance_threshold, in_turn, pack, urgency
from serve.core.state.ordered import Key, SortedKeys
from serve.core.types import Capacity, Group, Nanos, Task


@register_policy
class BalancedTargets(Policy):
    """Balanced targets: by priority class, then shortest and longest QoS target in turn."""

    name = "bqt"

    def key(self, task: Task) -> Key:
        """Return priority class, QoS target, id."""
        return urgency(task), task.qos.target_ns, task.task_id

    def horizon(self, pending: SortedKeys, limit: int, now_ns: Nanos) -> list[Key]:
        """Return half of the keys from either end."""
        longest = limit // 2
        return pending.head(limit - longest) + pending.tail(longest)

    def plan(self, pending: Sequence[Task], capacity: Capacity, now_ns: Nanos) -> tuple[Group, ...]:
        """Return groups of about equal memory, in alternating order."""
        return pack(in_turn(pending, self.key), capacity, balance_threshold(pending, capacity))
