"""How the flows between machines share the machines' networks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from serve.core.placement.job import JobMachine


@dataclass(slots=True)
class ActiveFlow:
    """What one task is sending to another on another machine."""

    link: int
    iteration: int
    source: int
    target: int
    #: The task that waits for it, with its iteration.
    waits: tuple[int, int]
    left_bytes: float
    #: When its source had it ready, and in which order of all flows.
    ready: tuple[float, int]
    #: When it began to be sent: one flow of a pair of tasks at a time is.
    began_s: float
    #: Until when `left_bytes` counts what was sent.
    counted_s: float
    rate: float = 0.0
    #: Of the agenda, when it ends at this rate.
    entry: int = 0
    #: When what waits for it should be answered.
    due_s: float = float("inf")

    def count(self, now_s: float) -> None:
        """Bring what is left up to now."""
        self.left_bytes = max(0.0, self.left_bytes - self.rate * (now_s - self.counted_s))
        self.counted_s = now_s


#: A machine, and "out" or "in".
Interface = tuple[int, str]
#: Returns the rate of each flow in bytes/s.
Sharing = Callable[[Sequence[ActiveFlow], Sequence[JobMachine]], list[float]]


def _ends(flow: ActiveFlow) -> tuple[Interface, Interface]:
    """Return the two interfaces that a flow passes."""
    return (flow.source, "out"), (flow.target, "in")


def _bytes_s(machines: Sequence[JobMachine], end: Interface) -> float:
    machine = machines[end[0]]
    return machine.out_bytes_s if end[1] == "out" else machine.in_bytes_s


def equal_parts(rates: Iterable[float], counts: Iterable[int]) -> list[float]:
    """Return what each flow at an interface gets, by the interface's rate and flows."""
    return [rate / count if count else rate for rate, count in zip(rates, counts, strict=True)]


def _counted(flows: Sequence[ActiveFlow]) -> tuple[dict[int, int], dict[int, int]]:
    going_out: dict[int, int] = {}
    coming_in: dict[int, int] = {}
    for flow in flows:
        going_out[flow.source] = going_out.get(flow.source, 0) + 1
        coming_in[flow.target] = coming_in.get(flow.target, 0) + 1
    return going_out, coming_in


def equal(flows: Sequence[ActiveFlow], machines: Sequence[JobMachine]) -> list[float]:
    """Give each flow its part of both interfaces as if all took the same (the paper's OES)."""
    going_out, coming_in = _counted(flows)
    return [
        min(
            machines[flow.source].out_bytes_s / going_out[flow.source],
            machines[flow.target].in_bytes_s / coming_in[flow.target],
        )
        for flow in flows
    ]


def max_min(flows: Sequence[ActiveFlow], machines: Sequence[JobMachine]) -> list[float]:
    """Share fairly, and give what one cannot use to others: never less than ``equal``."""
    rates = [0.0] * len(flows)
    through: dict[Interface, set[int]] = {}
    for number, flow in enumerate(flows):
        for end in _ends(flow):
            through.setdefault(end, set()).add(number)
    left = {end: _bytes_s(machines, end) for end in through}
    while through:
        end = min(through, key=lambda one: left[one] / len(through[one]))
        rate = left[end] / len(through[end])
        for number in tuple(through[end]):
            rates[number] = rate
            for other in _ends(flows[number]):
                left[other] = max(0.0, left[other] - rate)
                through[other].discard(number)
        through = {one: numbers for one, numbers in through.items() if numbers}
    return rates


def fifo(flows: Sequence[ActiveFlow], machines: Sequence[JobMachine]) -> list[float]:
    """Send one flow at a time from each machine, the one that was ready first.

    Those that come to one machine share it fairly.
    """
    heads: dict[int, int] = {}
    for number, flow in enumerate(flows):
        head = heads.setdefault(flow.source, number)
        if flow.ready < flows[head].ready:
            heads[flow.source] = number
    rates = [0.0] * len(flows)
    numbers = list(heads.values())
    for number, rate in zip(numbers, max_min([flows[n] for n in numbers], machines), strict=True):
        rates[number] = rate
    return rates


def least_left(flows: Sequence[ActiveFlow], machines: Sequence[JobMachine]) -> list[float]:
    """Give all to the flow that would end first, then to the next what is left (MRTF)."""

    def alone_s(number: int) -> tuple[Any, ...]:
        flow = flows[number]
        return flow.left_bytes / min(_bytes_s(machines, end) for end in _ends(flow)), flow.ready

    left = {end: _bytes_s(machines, end) for flow in flows for end in _ends(flow)}
    rates = [0.0] * len(flows)
    for number in sorted(range(len(flows)), key=alone_s):
        rates[number] = min(left[end] for end in _ends(flows[number]))
        for end in _ends(flows[number]):
            left[end] -= rates[number]
    return rates


def due_first(flows: Sequence[ActiveFlow], machines: Sequence[JobMachine]) -> list[float]:
    """Give each flow what ``equal`` gives it, and what is left to that which is due first.

    Then to the next: no flow could get more unless another got less.
    """
    rates = equal(flows, machines)
    left = {end: _bytes_s(machines, end) for flow in flows for end in _ends(flow)}
    for flow, rate in zip(flows, rates, strict=True):
        for end in _ends(flow):
            left[end] -= rate
    for number in sorted(range(len(flows)), key=lambda one: (flows[one].due_s, flows[one].ready)):
        more = max(0.0, min(left[end] for end in _ends(flows[number])))
        rates[number] += more
        for end in _ends(flows[number]):
            left[end] -= more
    return rates


def coflow(flows: Sequence[ActiveFlow], machines: Sequence[JobMachine]) -> list[float]:
    """Share each interface by weights: the inverse of the time of a flow if its coflow were alone.

    The flows to one run of a task are a coflow (OMCoflow, as far as the paper tells what it does).
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for number, flow in enumerate(flows):
        groups.setdefault(flow.waits, []).append(number)
    weights = [0.0] * len(flows)
    for numbers in groups.values():
        alone = equal([flows[number] for number in numbers], machines)
        for number, rate in zip(numbers, alone, strict=True):
            weights[number] = rate / max(flows[number].left_bytes, 1.0)
    totals: dict[Interface, float] = {}
    for flow, weight in zip(flows, weights, strict=True):
        for end in _ends(flow):
            totals[end] = totals.get(end, 0.0) + weight
    return [
        min(_bytes_s(machines, end) * weight / totals[end] for end in _ends(flow))
        for flow, weight in zip(flows, weights, strict=True)
    ]


SHARINGS: dict[str, Sharing] = {
    "equal": equal,
    "max_min": max_min,
    "fifo": fifo,
    "least_left": least_left,
    "coflow": coflow,
    "due_first": due_first,
}
