"""Keep the most targets: earliest due first, and the hopeless last.

While a slot is all there is and everything can be on time, no order is better than that of the due
times. On several slots what compete for them are looked at together, see ``in_time``. A task that
can no longer make its target would only take others with it, so it runs when no other wants the
slot: the shortest of them first, and the scheduler sees to it that none waits for ever. Under
overload this gives up long tasks for short ones by itself, as a long one is the first that can no
longer make it.
"""

from collections.abc import Sequence
from heapq import heapreplace
from operator import itemgetter

from serve.core.policies.base import Contender, Policy, register_policy
from serve.core.rules.most_in_time import MARGIN, SlotJob, most_in_time
from serve.core.rules.packing import DEFAULT_PRIORITY, YIELDING, pack
from serve.core.state.ordered import Key, SortedKeys
from serve.core.types import Capacity, Group, Nanos, Task


@register_policy
class Slack(Policy):
    """Least slack: by due time the tasks that can still be in time, then the others."""

    name = "slack"
    weighs_slowdown = True

    def key(self, task: Task) -> Key:
        """Return priority class, latest start of the run, id."""
        level, start_ns = task.qos.priority or DEFAULT_PRIORITY, _run_due_ns(task)
        return level, start_ns - task.estimate.run_ns, task.task_id

    def horizon(self, pending: SortedKeys, limit: int, now_ns: Nanos) -> list[Key]:
        """Return, class by class, the keys due to start soonest that still can, then late ones."""
        chosen: list[Key] = []
        levels: list[int] = []
        first = pending.first()
        while first is not None and len(chosen) < limit and len(levels) < limit:
            level = first[0]
            levels.append(level)
            found = pending.since((level, now_ns), limit - len(chosen))
            if found and found[-1][0] != level:
                found = [key for key in found if key[0] == level]
            chosen += found
            following = pending.since((level + 1,), 1)
            first = following[0] if following else None
        for level in levels:
            if len(chosen) < limit:
                found = pending.since((level,), limit - len(chosen))
                chosen += [key for key in found if key[0] == level and key[1] < now_ns]
        return chosen

    def rank(self, task: Task, left_ns: Nanos, now_ns: Nanos) -> Key:
        """Rank tasks in time before late ones, by class, then due time; late ones by time left."""
        level, due_ns = task.qos.priority or DEFAULT_PRIORITY, _run_due_ns(task)
        late = now_ns + left_ns > due_ns or level >= YIELDING
        return late, level, left_ns if late else due_ns, task.task_id

    def arrange(self, ranked: list[Contender], slots: int, now_ns: Nanos) -> Sequence[Contender]:
        """Return those that can be in time together, then the others, shortest first."""
        if len(ranked) <= slots:
            return ranked
        free_ns = [int(now_ns)] * slots
        for one in ranked:
            late, _, due_ns, _ = one.key
            if late:
                return ranked
            end_ns = free_ns[0] + one.left_ns + one.left_ns // MARGIN
            if end_ns > due_ns:
                break
            heapreplace(free_ns, end_ns)
        else:
            return ranked
        jobs = []
        for one in ranked:
            late, level, due_ns, _ = one.key
            if not late:
                jobs.append(SlotJob(level, due_ns, one.left_ns + one.left_ns // MARGIN, one))
        kept, given_up = most_in_time(jobs, slots, now_ns)
        others = given_up + ranked[len(jobs) :]
        others.sort(key=_as_late)
        return kept + others

    def plan(self, pending: Sequence[Task], capacity: Capacity, now_ns: Nanos) -> tuple[Group, ...]:
        """Return groups, each as full as it gets, in order of rank."""
        ranked = [(self.rank(task, task.estimate.run_ns, now_ns), task) for task in pending]
        ranked.sort(key=itemgetter(0))
        return pack([task for _, task in ranked], capacity)


def _run_due_ns(task: Task) -> int:
    """`Task.run_due_ns`, which is asked for every task and run in every plan, in half its time."""
    estimate = task.estimate
    return task.arrived_ns + task.qos.target_ns - (estimate.solo_ns - estimate.run_ns) // 2


def _as_late(one: Contender) -> Key:
    _, level, _, task_id = one.key
    return level, one.left_ns, task_id
