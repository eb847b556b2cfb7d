"""How many requests will be late on a placement, foreseen without running one.

Requests go by the way that takes least: each class is spread in slices, one after the other, over
samplers and lanes, and what is busy takes longer. A network interface that is busy for a share ρ
of the time sends 1 ÷ (1 − ρ) times as slowly; before samplers and lanes requests queue.
"""

from dataclasses import dataclass
from math import exp, sqrt

from serve.core.placement.job import Assignment
from serve.core.placement.serving import RequestClass, Serving, ServingLayout, TaskPool

#: In how many slices each class is spread.
_SLICES = 16
#: From here on what is busier takes longer in proportion, so that overloads can be compared.
_MOST_BUSY = 0.98


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a placement makes of requests."""

    #: Share of late requests.
    late: float
    #: Shares of the time for which something is busy: machines' interfaces, pools.
    out_busy: tuple[float, ...]
    in_busy: tuple[float, ...]
    sampler_busy: tuple[float, ...]
    lane_busy: tuple[float, ...]

    @property
    def cost(self) -> float:
        """The share of late requests, and more where something has more work than time."""
        busy = (*self.out_busy, *self.in_busy, *self.sampler_busy, *self.lane_busy)
        return self.late * (1 + sum(max(0.0, one - 1) for one in busy))


def foreseen(
    problem: Serving, assignment: Assignment, load: float = 1.0, *, paired: bool = False
) -> Foreseen:
    """Return what becomes of `load` times the described requests.

    With `paired` machines prepare for their own lanes alone.
    """
    return _Spread(problem, problem.layout(assignment, paired=paired)).spread(load)


@dataclass(slots=True)
class _Way:
    """How a slice of a class goes."""

    of: RequestClass
    rate_s: float
    sampler: int
    lane: int
    #: The machine that each part comes from.
    sources: tuple[int, ...]


class _Spread:
    """Requests that are spread over a layout."""

    def __init__(self, problem: Serving, layout: ServingLayout) -> None:
        self._problem, self._layout = problem, layout
        self._out = [0.0] * len(layout.machines)
        self._in = [0.0] * len(layout.machines)
        self._samplers = [0.0] * len(layout.samplers)
        self._lanes = [0.0] * len(layout.lanes)

    def spread(self, load: float) -> Foreseen:
        """Spread all classes, then count what is late."""
        classes = self._problem.classes
        rate_s = sum(one.rate_s for one in classes)
        ways: list[_Way] = []
        for _ in range(_SLICES):
            for one in classes:
                way = self._fastest(one, one.rate_s * load / _SLICES)
                if way is None:  # no samplers beside lanes
                    busy = (tuple(self._out), tuple(self._in))
                    return Foreseen(1.0, *busy, tuple(self._samplers), tuple(self._lanes))
                self._take(way)
                ways.append(way)
        late = sum(way.rate_s * self._late(way) for way in ways) / (rate_s * load)
        return Foreseen(
            late, tuple(self._out), tuple(self._in), tuple(self._samplers), tuple(self._lanes)
        )

    def _fastest(self, of: RequestClass, rate_s: float) -> _Way | None:
        best: tuple[float, _Way] | None = None
        for sampler, lanes in enumerate(self._layout.lanes_of):
            sources = tuple(
                min(holders, key=lambda one: (self._out[one], one))
                for holders in self._layout.asked[sampler]
            )
            way = _Way(of, rate_s, sampler, 0, sources)
            prepared_s = self._fetch_s(way) + self._prepare_s(way, rate_s)
            for lane in lanes:
                way.lane = lane
                took_s = prepared_s + self._send_s(way) + self._run_s(way, rate_s)
                if best is None or took_s < best[0]:
                    best = took_s, _Way(of, rate_s, sampler, lane, sources)
        return best and best[1]

    def _take(self, way: _Way) -> None:
        """Count what a way keeps busy."""
        sampler = self._layout.samplers[way.sampler]
        lane = self._layout.lanes[way.lane]
        of, rate_s = way.of, way.rate_s
        part_bytes = of.rows_bytes / len(self._layout.holders)
        for source in way.sources:
            self._send(rate_s * part_bytes, source, sampler.machine)
        if lane.machine != sampler.machine:
            self._send(rate_s * of.batch_bytes, sampler.machine, lane.machine)
        self._samplers[way.sampler] += rate_s * of.prepare_s * sampler.pace / sampler.size
        self._lanes[way.lane] += rate_s * of.run_s * lane.pace / lane.size

    def _send(self, bytes_s: float, source: int, target: int) -> None:
        self._out[source] += bytes_s / self._layout.machines[source].out_bytes_s
        self._in[target] += bytes_s / self._layout.machines[target].in_bytes_s

    def _late(self, way: _Way) -> float:
        """Return the share that is late: what they wait for is about exponential."""
        alone = _Spread(self._problem, self._layout)
        alone_s = alone._took_s(way)
        wait_s = self._took_s(way) - alone_s
        slack_s = way.of.target_s - alone_s
        if slack_s <= 0:
            return 1.0
        return exp(-slack_s / wait_s) if wait_s > 0 else 0.0

    def _took_s(self, way: _Way) -> float:
        return (
            self._fetch_s(way) + self._prepare_s(way, 0) + self._send_s(way) + self._run_s(way, 0)
        )

    def _fetch_s(self, way: _Way) -> float:
        """Return how long the rows take: all come at once, the last one counts."""
        if not way.sources:
            return 0.0
        machine = self._layout.samplers[way.sampler].machine
        part_bytes = way.of.rows_bytes / len(self._layout.holders)
        each_s = max(self._flow_s(part_bytes, source, machine) for source in way.sources)
        come_s = (
            part_bytes * len(way.sources) / self._layout.machines[machine].in_bytes_s
            * _stretch(self._in[machine])
        )  # fmt: skip
        return self._problem.round_s + max(each_s, come_s)

    def _send_s(self, way: _Way) -> float:
        source = self._layout.samplers[way.sampler].machine
        target = self._layout.lanes[way.lane].machine
        if source == target:
            return 0.0
        # One way of a round.
        return self._problem.round_s / 2 + self._flow_s(way.of.batch_bytes, source, target)

    def _flow_s(self, sent: float, source: int, target: int) -> float:
        machines = self._layout.machines
        return sent * max(
            _stretch(self._out[source]) / machines[source].out_bytes_s,
            _stretch(self._in[target]) / machines[target].in_bytes_s,
        )

    def _prepare_s(self, way: _Way, more_s: float) -> float:
        """Return how long preparing takes when so many more in a second go this way."""
        pool, alone_s = self._layout.samplers[way.sampler], way.of.prepare_s
        return _queued_s(alone_s, pool, self._samplers[way.sampler], more_s)

    def _run_s(self, way: _Way, more_s: float) -> float:
        pool = self._layout.lanes[way.lane]
        return _queued_s(way.of.run_s, pool, self._lanes[way.lane], more_s)


def _stretch(busy: float) -> float:
    """Return how many times as long something takes on what is busy for this share of the time."""
    if busy <= _MOST_BUSY:
        return 1 / (1 - busy)
    return (1 + (busy - _MOST_BUSY) / (1 - _MOST_BUSY)) / (1 - _MOST_BUSY)


def _queued_s(alone_s: float, pool: TaskPool, busy: float, more_s: float) -> float:
    """Return the time of a request with what it waits for, on average (Sakasegawa).

    `busy` is how busy the pool is before `more_s` further requests in a second.
    """
    busy += more_s * alone_s * pool.pace / pool.size
    waiting: float = busy ** (sqrt(2 * (pool.size + 1)) - 1) * _stretch(busy) / pool.size
    return alone_s * pool.pace * (1 + waiting)
