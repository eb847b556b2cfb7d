"""Grouping by contention: which runs that slow one another go side by side, and which in turn.

After TurboMGNN (Wu et al. 2023), whose tasks are grouped by what they have in common and by what
they contend for. A *run* here is a group of fused tasks (``fusing.grouped``), or any other. Runs of
one set start together, and slow one another as ``serve.core.slowdown`` says; the next set starts
when the last of them has ended.

The server fuses no operators of several tasks. It decides for each run as it comes whether that
joins others (``co_running``); this decides for runs that are all there.
"""

from collections.abc import Sequence

from serve.core.slowdown import check_slowdown, ends_ns


def set_after_set(times: Sequence[float], slowdown: Sequence[float]) -> list[tuple[int, ...]]:
    """Return the runs in sets, in order, such that their mean end is the earliest.

    `times` are those that each run takes alone. Shorter runs are never in a later set than longer
    ones; among such orders none has an earlier mean end. Raises ValueError for a `slowdown` that
    ``check_slowdown`` refuses.
    """
    check_slowdown(slowdown)
    order = sorted(range(len(times)), key=lambda run: (times[run], run))
    # By how many runs are left: the least sum of ends from now on, and the size of the first set.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for left in range(1, len(order) + 1):
        first = len(order) - left
        choices = []
        for size in range(1, left + 1):
            ends = ends_ns([times[run] for run in order[first : first + size]], slowdown)
            # Those behind wait for the last of them.
            waiting = (left - size) * ends[-1]
            choices.append((sum(ends) + waiting + best[left - size][0], size))
        best.append(min(choices))
    sets, at = [], 0
    while at < len(order):
        size = best[len(order) - at][1]
        sets.append(tuple(sorted(order[at : at + size])))
        at += size
    return sets


def ends_of(
    sets: Sequence[tuple[int, ...]], times: Sequence[float], slowdown: Sequence[float]
) -> list[float]:
    """Return when each run ends; every one is in just one set."""
    ends, began = [0.0] * len(times), 0.0
    for members in sets:
        order = sorted(members, key=lambda run: times[run])
        for run, end in zip(order, ends_ns([times[run] for run in order], slowdown), strict=True):
            ends[run] = began + end
        began = max(ends[run] for run in members)
    return ends
