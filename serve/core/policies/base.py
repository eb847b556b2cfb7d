"""What a policy is, and the registry of all of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from serve.core.named_choices import NamedChoices
from serve.core.state.ordered import Key, SortedKeys
from serve.core.types import Capacity, Group, Nanos, Task

if TYPE_CHECKING:
    from serve.core.state.record import Record, Run


class Contender(msgspec.Struct, frozen=True):
    """Who competes for a slot: a run on a lane, or a task that could be launched."""

    #: Its rank.
    key: Key
    #: Estimated run time it still needs.
    left_ns: Nanos
    holder: "Run | Record"


class Policy(Protocol):
    """Decides who runs with whom and in which order. Stateless and deterministic.

    The scheduler keeps all pending tasks sorted by `key`. When it plans it takes what `horizon`
    picks from them, a bounded number, and hands those tasks to `plan`.
    """

    name: str
    #: Targets come before order: what is better not launched beside others now is passed by.
    weighs_slowdown: bool = False

    def key(self, task: Task) -> Key:
        """Where the task stands among all pending ones; ends in its id, never changes."""
        ...

    def horizon(self, pending: SortedKeys, limit: int, now_ns: Nanos) -> list[Key]:
        """At most `limit` keys of tasks worth planning now; there are more than `limit`."""
        return pending.head(limit)

    def rank(self, task: Task, left_ns: Nanos, now_ns: Nanos) -> Key:
        """How urgent the task is now, started or not, smaller first; ends in its id.

        What the preemptive discipline compares. `left_ns`: estimated run time left.
        """
        return self.key(task)

    def arrange(self, ranked: list[Contender], slots: int, now_ns: Nanos) -> Sequence[Contender]:
        """All of them, given in order of rank, in the order in which they get slots.

        What the preemptive discipline goes by.
        """
        return ranked

    def plan(self, pending: Sequence[Task], capacity: Capacity, now_ns: Nanos) -> tuple[Group, ...]:
        """Groups in launch order; every task of `pending` exactly once, in any input order.

        No group exceeds the capacity's memory or slots. Ties are broken by task id. Raises
        ValueError when one task alone exceeds the memory: such a task is never admitted.
        """
        ...


POLICIES: NamedChoices[Policy] = NamedChoices("policy")
register_policy = POLICIES.register
