"""First in, first out: groups as many in order of arrival as fit.

A client that sets a priority asks to be served before others, so its class comes first here too;
without priorities this is arrival order. CoGNN's Base policy is the same, so it is registered under
that name too.
"""

from collections.abc import Sequence

from serve.core.policies.base import Policy, register_policy
from serve.core.rules.packing import pack, urgency
from serve.core.state.ordered import Key
from serve.core.types import Capacity, Group, Nanos, Task


@register_policy
class Fifo(Policy):
    """First in, first out: by priority class, then arrival."""

    name = "fifo"

    def key(self, task: Task) -> Key:
        """Return priority class, arrival, id."""
        return urgency(task), task.arrived_ns, task.task_id

    def plan(self, pending: Sequence[Task], capacity: Capacity, now_ns: Nanos) -> tuple[Group, ...]:
        """Fill each group up to the capacity before opening the next."""
        return pack(sorted(pending, key=self.key), capacity)


@register_policy
class Base(Fifo):
    """CoGNN's name for it."""

    name = "base"
