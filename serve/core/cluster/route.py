"""Which machine a request goes to: where it fits, by the rule's order, ties by the request's id."""

from collections.abc import Callable, Collection, Iterable, Sequence
from math import log
from typing import Any

from serve.core.cluster.views import MachineView, RoutedRequest

#: What a rule compares machines by; the smallest is chosen.
Rank = Any
Rule = Callable[[RoutedRequest, MachineView, int], Rank]

#: Odd constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
#: Draws for each choice before all machines are looked at: most may not hold the request.
_DRAWS = 4


def mixed(value: int) -> int:
    """Return 64 bits that look random and follow from `value` alone."""
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def by_count(request: RoutedRequest, view: MachineView, now_ns: int) -> Rank:
    """Rank by how many requests are there."""
    return view.count


def by_load(request: RoutedRequest, view: MachineView, now_ns: int) -> Rank:
    """Rank by how many requests there would be for each unit of weight."""
    return (view.count + 1) / view.weight


def by_work(request: RoutedRequest, view: MachineView, now_ns: int) -> Rank:
    """Rank by the run times there, for each unit of weight."""
    return view.work_ns / view.weight


def by_end(request: RoutedRequest, view: MachineView, now_ns: int) -> Rank:
    """Rank by when it is expected to end."""
    return view.ends_ns(request, now_ns)


def in_time(request: RoutedRequest, view: MachineView, now_ns: int) -> Rank:
    """Rank those where it is expected to end in time before the others, then by load."""
    return not view.is_in_time(request, now_ns), (view.count + 1) / view.weight


def at_random(request: RoutedRequest, view: MachineView, now_ns: int) -> Rank:
    """Rank at random, so that each is first as often as its share of the weights."""
    draw = (mixed(request.request_id << 32 ^ view.mark) + 1) / (_MASK + 2)
    return -log(draw) / view.weight


RULES: dict[str, Rule] = {
    "in_time": in_time,
    "load": by_load,
    "count": by_count,
    "work": by_work,
    "end": by_end,
    "random": at_random,
}


def choose(
    request: RoutedRequest,
    views: Sequence[MachineView],
    now_ns: int,
    rule: Rule = in_time,
    *,
    choices: int | None = None,
    seed: int = 0,
    avoid: Collection[MachineView] = (),
) -> MachineView | None:
    """Return the machine for a request among `views`; None when none of them can hold it.

    Args:
        request: What is known of it.
        views: Machines that take new requests.
        now_ns: When the request would be there.
        rule: One of ``RULES``.
        choices: How many machines, drawn at random, are compared; None for all.
        seed: With the request's id decides what is drawn and which of equals is taken.
        avoid: Machines that it must not go to.
    """
    count = len(views)
    if not count:
        return None
    start = mixed(request.request_id ^ (seed << 32))
    if choices is not None and choices < count:
        best = _best(request, _drawn(request, views, choices, start, avoid), now_ns, rule)
        if best is not None:
            return best
    first = start % count
    able = (
        view
        for view in (*views[first:], *views[:first])
        if view.facts.can_hold(request) and view not in avoid
    )
    return _best(request, able, now_ns, rule)


def _drawn(
    request: RoutedRequest,
    views: Sequence[MachineView],
    choices: int,
    start: int,
    avoid: Collection[MachineView],
) -> list[MachineView]:
    """Return `choices` different machines that can hold the request, or fewer."""
    found: list[MachineView] = []
    for draw in range(_DRAWS * choices):
        view = views[mixed(start + draw) % len(views)]
        if view in found or not view.facts.can_hold(request) or view in avoid:
            continue
        found.append(view)
        if len(found) == choices:
            break
    return found


def _best(
    request: RoutedRequest, able: Iterable[MachineView], now_ns: int, rule: Rule
) -> MachineView | None:
    """Return the machine of the smallest rank, the first of equals."""
    return min(able, key=lambda view: rule(request, view, now_ns), default=None)
