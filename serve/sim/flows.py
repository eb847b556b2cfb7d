"""Requests on placed stores, samplers and lanes, with the network between machines simulated.

A request is sent where it would end first, by what is to be done there already. Its sampler's
machine gets the rows of each part from a machine that holds it, prepares the request, and sends it
to its lane. Everything is done by due time: what waits for a sampler or a lane, which flow between
two machines is sent next, and what flows get beside their floor (``sharing.due_first``).
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from serve.core.placement.job import Assignment
from serve.core.placement.serving import RequestClass, Serving, ServingLayout, TaskPool
from serve.core.placement.sharing import ActiveFlow, Sharing, due_first

#: Bytes that rounding may leave of a flow.
_ROUNDING_BYTES = 1e-6
#: What happens.
_FLOW, _SENT, _FREE_SAMPLER, _FREE_LANE = range(4)


class Arrival(NamedTuple):
    """A request that comes."""

    at_s: float
    of: RequestClass


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """What became of requests."""

    count: int
    #: How many were late, up to when the run was given up.
    late: int
    #: From arrival to answer, of each that was answered, in order of the answers.
    took_s: tuple[float, ...]
    #: Whether all were answered; else too many were late before that.
    whole: bool

    @property
    def late_share(self) -> float:
        """Share of requests that were late."""
        return self.late / self.count if self.count else 0.0


def arrivals(problem: Serving, load: float, count: int, seed: int) -> Iterator[Arrival]:
    """Yield `count` requests of `load` times the rates, at random times.

    With the same seed, another load has the same requests in the same order.
    """
    rng = Random(seed)
    rate_s = sum(one.rate_s for one in problem.classes)
    weights = [one.rate_s for one in problem.classes]
    at_s = 0.0
    for _ in range(count):
        at_s += rng.expovariate(1.0) / (rate_s * load)
        yield Arrival(at_s, rng.choices(problem.classes, weights)[0])


def served(
    problem: Serving,
    assignment: Assignment,
    load: float,
    count: int,
    *,
    seed: int = 0,
    paired: bool = False,
    sharing: Sharing = due_first,
    most_late: float = 1.0,
) -> ServedRequests:
    """Answer `count` requests of `load` times the rates; the same for the same seed.

    Args:
        problem: What was placed, and what arrives.
        assignment: Where.
        load: By what the described rates are multiplied.
        count: How many requests arrive.
        seed: Of the arrivals.
        paired: Whether machines prepare for their own lanes alone.
        sharing: How flows share the network.
        most_late: The run is given up when a larger share of all is late.
    """
    player = _Server(problem.layout(assignment, paired=paired), problem.round_s, sharing)
    if not any(player.layout.lanes_of):
        return ServedRequests(count, count, (), whole=False)
    return player.run(arrivals(problem, load, count, seed), count, most_late)


@dataclass(eq=False, slots=True)
class _Request:
    """A request on its way."""

    of: RequestClass
    arrived_s: float
    due_s: float
    number: int
    sampler: int
    lane: int
    #: Flows that have to come before it is prepared.
    missing: int = 0

    def __lt__(self, other: "_Request") -> bool:
        return (self.due_s, self.number) < (other.due_s, other.number)


@dataclass(slots=True)
class _Station:
    """Samplers or lanes on one machine, and what waits for them."""

    pool: TaskPool
    free: int
    #: Of all requests that were sent there and have not passed it.
    work_s: float = 0.0
    waiting: list[_Request] = field(default_factory=list)


class _Server:
    """The state of one run."""

    def __init__(self, layout: ServingLayout, round_s: float, sharing: Sharing) -> None:
        self.layout, self._round_s, self._sharing = layout, round_s, sharing
        self._samplers = [_Station(pool, pool.size) for pool in layout.samplers]
        self._lanes = [_Station(pool, pool.size) for pool in layout.lanes]
        #: (time, order of entry, what happens, to what).
        self._due: list[tuple[float, int, int, Any]] = []
        self._entries = 0
        #: By source and target, what is sent and what is next by due time.
        self._active: dict[tuple[int, int], ActiveFlow] = {}
        self._behind: dict[tuple[int, int], list[tuple[float, int, float, _Request]]] = {}
        self._requests: dict[int, _Request] = {}
        #: By machine, bytes that wait to be sent out and to come in.
        self._out = [0.0] * len(layout.machines)
        self._in = [0.0] * len(layout.machines)
        self._changed = False
        self._took_s: list[float] = []
        self._late = 0

    def run(self, coming: Iterator[Arrival], count: int, most_late: float) -> ServedRequests:
        """Let everything happen until all is answered, or too much is late."""
        following = next(coming, None)
        number = 0
        while following is not None or self._due:
            if following is not None and (not self._due or following.at_s <= self._due[0][0]):
                now_s = following.at_s
                self._arrive(following, number)
                number += 1
                following = next(coming, None)
            else:
                now_s = self._due[0][0]
                self._happen(now_s)
            if self._changed:
                self._share(now_s)
            if self._late > most_late * count:
                return ServedRequests(count, self._late, tuple(self._took_s), whole=False)
        return ServedRequests(count, self._late, tuple(self._took_s), whole=True)

    def _put(self, at_s: float, kind: int, what: object) -> int:
        self._entries += 1
        heapq.heappush(self._due, (at_s, self._entries, kind, what))
        return self._entries

    def _happen(self, now_s: float) -> None:
        _, entry, kind, what = heapq.heappop(self._due)
        if kind == _FLOW:
            if what.entry == entry:  # else its rate has changed since
                self._flow_ended(what, now_s)
        elif kind == _SENT:
            self._came(what, now_s)
        elif kind == _FREE_SAMPLER:
            self._prepared(what, now_s)
        else:
            self._answered(what, now_s)

    def _arrive(self, arrival: Arrival, number: int) -> None:
        of, now_s = arrival.of, arrival.at_s
        sampler, lane, sources = self._ends_first(of)
        request = _Request(of, now_s, now_s + of.target_s, number, sampler, lane, len(sources))
        self._requests[number] = request
        here, there = self._samplers[sampler], self._lanes[lane]
        here.work_s += of.prepare_s * here.pool.pace
        there.work_s += of.run_s * there.pool.pace
        part_bytes = of.rows_bytes / len(self.layout.holders)
        for source in sources:
            self._send(request, source, here.pool.machine, part_bytes, now_s)
        if here.pool.machine != there.pool.machine:
            self._out[here.pool.machine] += of.batch_bytes
            self._in[there.pool.machine] += of.batch_bytes
        if not sources:
            self._wait(here, request, _FREE_SAMPLER, now_s)

    def _ends_first(self, of: RequestClass) -> tuple[int, int, list[int]]:
        """Return samplers, lanes and the sources of rows by which a request would end first."""
        machines, parts = self.layout.machines, len(self.layout.holders)
        part_bytes = of.rows_bytes / parts
        best: tuple[float, int, int, list[int]] | None = None
        for number, station in enumerate(self._samplers):
            here = station.pool.machine
            sources = [
                min(holders, key=lambda one: (self._out[one] / machines[one].out_bytes_s, one))
                for holders in self.layout.asked[number]
            ]
            ready_s = station.work_s / station.pool.size + of.prepare_s * station.pool.pace
            if sources:
                come_s = (self._in[here] + part_bytes * len(sources)) / machines[here].in_bytes_s
                go_s = max(
                    (self._out[one] + part_bytes) / machines[one].out_bytes_s for one in sources
                )
                ready_s += self._round_s + max(come_s, go_s)
            for lane in self.layout.lanes_of[number]:
                pool = self._lanes[lane].pool
                at_s = ready_s
                if pool.machine != here:
                    at_s += self._round_s / 2 + max(
                        (self._out[here] + of.batch_bytes) / machines[here].out_bytes_s,
                        (self._in[pool.machine] + of.batch_bytes)
                        / machines[pool.machine].in_bytes_s,
                    )
                end_s = max(at_s, self._lanes[lane].work_s / pool.size) + of.run_s * pool.pace
                if best is None or end_s < best[0]:
                    best = end_s, number, lane, sources
        assert best is not None  # there are samplers beside lanes
        return best[1:]

    def _send(self, request: _Request, source: int, target: int, sent: float, now_s: float) -> None:
        """Count rows that are to be sent, and queue them."""
        self._out[source] += sent
        self._in[target] += sent
        self._queue(request, source, target, sent, now_s)

    def _queue(
        self, request: _Request, source: int, target: int, sent: float, now_s: float
    ) -> None:
        self._entries += 1
        behind = self._behind.setdefault((source, target), [])
        heapq.heappush(behind, (request.due_s, self._entries, sent, request))
        if (source, target) not in self._active:
            self._begin(source, target, now_s)

    def _begin(self, source: int, target: int, now_s: float) -> None:
        """Begin with the flow between two machines that is due first: one at a time is sent."""
        due_s, entry, sent, request = heapq.heappop(self._behind[source, target])
        self._active[source, target] = ActiveFlow(
            0, request.number, source, target, (request.number, 0), sent, (now_s, entry), now_s,
            now_s, due_s=due_s,
        )  # fmt: skip
        self._out[source] -= sent
        self._in[target] -= sent
        self._changed = True

    def _share(self, now_s: float) -> None:
        """Share the network anew after flows began or ended."""
        self._changed = False
        flows = list(self._active.values())
        for flow in flows:
            flow.count(now_s)
        for flow, rate in zip(flows, self._sharing(flows, self.layout.machines), strict=True):
            if rate == flow.rate and flow.left_bytes > _ROUNDING_BYTES:
                continue
            flow.rate = rate
            left_s = flow.left_bytes / rate if flow.left_bytes > _ROUNDING_BYTES else 0.0
            flow.entry = self._put(now_s + left_s, _FLOW, flow)

    def _flow_ended(self, flow: ActiveFlow, now_s: float) -> None:
        pair = flow.source, flow.target
        del self._active[pair]
        self._changed = True
        request = self._requests[flow.iteration]
        # Rows are asked for, a batch is just sent.
        after_s = self._round_s if request.missing else self._round_s / 2
        self._put(now_s + after_s, _SENT, request)
        if self._behind[pair]:
            self._begin(*pair, now_s)

    def _came(self, request: _Request, now_s: float) -> None:
        if not request.missing:
            self._wait(self._lanes[request.lane], request, _FREE_LANE, now_s)
            return
        request.missing -= 1
        if not request.missing:
            self._wait(self._samplers[request.sampler], request, _FREE_SAMPLER, now_s)

    def _wait(self, station: _Station, request: _Request, kind: int, now_s: float) -> None:
        heapq.heappush(station.waiting, request)
        self._start(station, kind, now_s)

    def _start(self, station: _Station, kind: int, now_s: float) -> None:
        """Have a free sampler or lane take the request that is due first."""
        if station.free and station.waiting:
            station.free -= 1
            request = heapq.heappop(station.waiting)
            alone_s = request.of.prepare_s if kind == _FREE_SAMPLER else request.of.run_s
            self._put(now_s + alone_s * station.pool.pace, kind, request)

    def _prepared(self, request: _Request, now_s: float) -> None:
        station = self._samplers[request.sampler]
        station.free += 1
        station.work_s -= request.of.prepare_s * station.pool.pace
        self._start(station, _FREE_SAMPLER, now_s)
        source, target = station.pool.machine, self._lanes[request.lane].pool.machine
        if source == target:
            self._wait(self._lanes[request.lane], request, _FREE_LANE, now_s)
        else:
            self._queue(request, source, target, request.of.batch_bytes, now_s)

    def _answered(self, request: _Request, now_s: float) -> None:
        station = self._lanes[request.lane]
        station.free += 1
        station.work_s -= request.of.run_s * station.pool.pace
        self._start(station, _FREE_LANE, now_s)
        del self._requests[request.number]
        self._took_s.append(now_s - request.arrived_s)
        self._late += now_s > request.due_s
