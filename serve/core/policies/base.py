"""Policies: their interface and their registry."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from serve.core.named_choices import NamedChoices
from serve.core.state.ordered import Key, SortedKeys
from serve.core.types import Capacity, Group, Nanos, Task

if TYPE_CHECKING:
    from serve.core.state.record import Record, Run


class Contender(msgspec.Struct, frozen=True):
    """Competitor for a slot: a run on a lane, or a task that could be launched."""

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
        """Return the task's place among all pending ones. It ends in the id and never changes."""
        ...

    def horizon(self, pending: SortedKeys, limit: int, now_ns: Nanos) -> list[Key]:
        """Return at most `limit` keys of tasks to plan now, when there are more than `limit`."""
        return pending.head(limit)

    def rank(self, task: Task, left_ns: Nanos, now_ns: Nanos) -> Key:
        """Return how urgent the task is now, started or not; smaller first, ending in its id.

        What the preemptive discipline compares. `left_ns`: estimated run time left.
        """
        return self.key(task)

    def arrange(self, ranked: list[Contender], slots: int, now_ns: Nanos) -> Sequence[Contender]:
        """Return all contenders, given in order of rank, in the order in which they get slots.

        What the preemptive discipline goes by.
        """
        return ranked

    def plan(self, pending: Sequence[Task], capacity: Capacity, now_ns: Nanos) -> tuple[Group, ...]:
        """Return groups in launch order that hold every task of `pending` exactly once.

        No group exceeds the capacity's memory or slots. Ties are broken by task id. Raises
        ValueError when one task alone exceeds the memory: such a task is never admitted.
        """
        ...


POLICIES: NamedChoices[Policy] = NamedChoices("policy")
register_policy = POLICIES.register
