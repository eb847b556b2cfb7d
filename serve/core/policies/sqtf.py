"""Shortest QoS target first: GNNSched's Algorithm 1, made memory-safe.

The published code tests the group threshold before it adds a task, so a group can pass the
memory limit by one task, and it breaks when the sum of all needs is a multiple of the limit.
Here the threshold only balances the groups; the limit is tested with the new task included.
"""

from collections.abc import Sequence

from serve.core.policies.base import Policy, register_policy
from serve.core.rules.packing import balance_threshold, pack, urgency
from serve.core.state.ordered import Key
from serve.core.types import Capacity, Group, Nanos, Task


@register_policy
class ShortestTargetFirst(Policy):
    """Shortest QoS target first: by priority class, then target."""

    name = "sqtf"

    def key(self, task: Task) -> Key:
        """Return priority class, QoS target, id."""
        return urgency(task), task.qos.target_ns, task.task_id

    def plan(self, pending: Sequence[Task], capacity: Capacity, now_ns: Nanos) -> tuple[Group, ...]:
        """Return groups of about equal memory in order of target."""
        threshold_bytes = balance_threshold(pending, capacity)
        return pack(sorted(pending, key=self.key), capacity, threshold_bytes)
