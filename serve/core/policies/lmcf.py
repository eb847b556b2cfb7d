"""Lowest memory consumption first: CoGNN's out-of-order policy.

Memory stands in for run time, which needs no time estimates. It was made for training tasks; here
small requests overtake large ones as under ``sqtf``, as far as memory grows with time.
"""

from collections.abc import Sequence

from serve.core.policies.base import Policy, register_policy
from serve.core.rules.packing import pack, urgency
from serve.core.state.ordered import Key
from serve.core.types import Capacity, Group, Nanos, Task


@register_policy
class LowestMemoryFirst(Policy):
    """Lowest memory first: by priority class, then memory."""

    name = "lmcf"

    def key(self, task: Task) -> Key:
        """Return priority class, reserved memory, id."""
        return urgency(task), task.reserve_bytes, task.task_id

    def plan(self, pending: Sequence[Task], capacity: Capacity, now_ns: Nanos) -> tuple[Group, ...]:
        """Return groups, each as full as it gets, in rising order of memory."""
        return pack(sorted(pending, key=self.key), capacity)
