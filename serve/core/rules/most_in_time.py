"""Order in which most of what competes for slots ends in time, and what is given up.

On one slot the order of due times is best. On several it is not: short runs that are due early take
all slots in turn, while a long one that needs a slot for most of the time it has is late in the
end. So what would be late in its place is moved forward, no further than it must be, if all others
stay in time; this sees coming what EDZL waits for (earliest due first, until one has no slack left:
Lee, "On-line multiprocessor scheduling algorithms for real-time tasks", 1994). If they do not, the
longest is given up, as in Moore's rule ("An n job, one machine sequencing algorithm for minimizing
the number of late jobs", 1968).

Only what is there is looked at; arrivals to come are not foreseen.
"""

from collections.abc import Sequence
from heapq import heapreplace
from operator import attrgetter
from typing import Generic, TypeVar

import msgspec

from serve.core.types import Nanos

#: What is left of a run is taken for longer by one part in so many: run times are not exact.
MARGIN = 10
#: At most so many are moved or given up in one go, which bounds the work; the others that would be
#: late are given up.
_MOST_MOVED = 4

HolderT = TypeVar("HolderT")


class SlotJob(msgspec.Struct, Generic[HolderT], frozen=True):
    """Competitor for a slot."""

    #: Its class of priority: for one less urgent it is not given up.
    level: int
    #: When it must have ended.
    due_ns: int
    #: Estimated run time it still needs, with the margin.
    need_ns: int
    holder: HolderT


_need_ns = attrgetter("need_ns")


def most_in_time(
    jobs: Sequence[SlotJob[HolderT]], slots: int, now_ns: Nanos
) -> tuple[list[HolderT], list[HolderT]]:
    """Return `jobs` in an order in which they end in time, and those that are given up."""
    order: list[SlotJob[HolderT]] = []
    given_up: list[HolderT] = []
    free_ns = [int(now_ns)] * slots
    moved = 0
    for job in jobs:
        end_ns = free_ns[0] + job.need_ns
        if end_ns <= job.due_ns:
            heapreplace(free_ns, end_ns)
            order.append(job)
            continue
        moved += 1
        found = _moved(order, job, slots, now_ns) if moved <= _MOST_MOVED else None
        if found is None:
            given_up.append(job.holder)
            continue
        order, longest = found
        if longest is not None:
            given_up.append(longest.holder)
        free_ns = [int(now_ns)] * slots
        for other in order:
            heapreplace(free_ns, free_ns[0] + other.need_ns)
    return [job.holder for job in order], given_up


def _moved(
    order: list[SlotJob[HolderT]], job: SlotJob[HolderT], slots: int, now_ns: Nanos
) -> tuple[list[SlotJob[HolderT]], SlotJob[HolderT] | None] | None:
    """Return the order with the job, and those it displaced; None when it is displaced itself."""
    found = _inserted(order, job, slots, now_ns)
    if found is not None:
        return found, None
    peers = [other for other in order if other.level == job.level]
    longest = max(peers, key=_need_ns, default=job)
    if longest.need_ns <= job.need_ns:
        return None
    found = _inserted([other for other in order if other is not longest], job, slots, now_ns)
    return None if found is None else (found, longest)


def _inserted(
    order: list[SlotJob[HolderT]], job: SlotJob[HolderT], slots: int, now_ns: Nanos
) -> list[SlotJob[HolderT]] | None:
    """Return the order with the job at its latest place where all are in time, if there is one."""
    latest_ns = job.due_ns - job.need_ns
    free_ns = [int(now_ns)] * slots
    at = 0
    for other in order:
        heapreplace(free_ns, free_ns[0] + other.need_ns)
        if free_ns[0] > latest_ns:
            break
        at += 1
    found = [*order[:at], job, *order[at:]]
    free_ns = [int(now_ns)] * slots
    for other in found:
        end_ns = free_ns[0] + other.need_ns
        if end_ns > other.due_ns:
            return None
        heapreplace(free_ns, end_ns)
    return found
