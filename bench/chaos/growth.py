"""Whether what a server under chaos holds grows with the calls: the slope, and how exact it is."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bench.chaos.record import Record

#: Fewer calls than this in one life of the server say nothing about leaks; and in a lane's life,
#: of which the median of at least so many counts.
ENOUGH_CALLS, ENOUGH_OF_LANE, ENOUGH_LANES = 20_000, 8_000, 2
#: Least share of a life that is left out, and parts of the rest. The least that was held in each
#: part counts, of descriptors the median, as what is held for a moment is no leak.
WARM_UP, STRETCHES = 0.2, 8
#: The same of a lane, whose life is short, and which meets its models and sizes first.
WARM_UP_OF_LANE = 0.4
#: The growth that was measured and so many standard errors more or less hold the true growth with
#: 95 %, by Student's t of as many parts; and the least number of parts.
ERRORS, ENOUGH_STRETCHES = {4: 4.3, 5: 3.2, 6: 2.8, 7: 2.6, 8: 2.45}, 4
#: Most growth per 10,000 calls.
GROWTH = {
    "rss_bytes": 2**19,
    "fds": 1.0,
    "threads": 1.0,
    "gateway_rss_bytes": 2**19,
    "gateway_fds": 1.0,
    "gateway_threads": 1.0,
    "lane_private_bytes": 2**20,
    "lane_fds": 1.0,
    "lane_threads": 1.0,
    "lane_temporary_files": 0.5,
    "shared_files": 0.5,
    "temporary_files": 0.5,
    # A row for each call, of less than a KiB with its indices.
    "database_bytes": 10_000 * 2**10,
}


class _Sample(NamedTuple):
    """What something held at a moment, after so many calls."""

    at: int
    calls: float
    value: float


class Growth(NamedTuple):
    """Growth per 10,000 calls, and the error of the measurement."""

    figure: float
    error: float

    @property
    def least(self) -> float:
        """The least that it can be."""
        return self.figure - self.error


def growths(record: Record, name: str) -> Iterator[Growth]:
    """Yield the growth after the warm-up of each life that is long enough."""
    lives: dict[object, list[_Sample]] = defaultdict(list)
    is_lane, is_gateway = name.startswith("lane_"), name.startswith("gateway_")
    what = name.removeprefix("lane_").removeprefix("gateway_")
    enough = ENOUGH_OF_LANE if is_lane else ENOUGH_CALLS
    for one in _alike(record) if name == "fds" else record.samples:
        if one.get("calls") is None:
            continue
        holders = one["lanes"] if is_lane else one["gateways"] if is_gateway else {"": one}
        for pid, holds in holders.items():
            if what in holds:
                life = lives[one["pid"], pid]
                life.append(_Sample(one["at"], one["calls"], holds[what]))
    for points in lives.values():
        first, last = points[0].calls, points[-1].calls
        warm = first + (WARM_UP_OF_LANE if is_lane else WARM_UP) * (last - first)
        if not is_lane:
            warm = max(warm, _calls_of_first_round(record, points))
        if last - warm < enough:
            continue
        parts: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for _, calls, value in points:
            if calls >= warm:
                at = int((calls - warm) / (last - warm) * STRETCHES)
                parts[min(at, STRETCHES - 1)].append((calls, value))
        if len(parts) >= ENOUGH_STRETCHES:
            # Descriptors come and go with connections.
            told = median if what == "fds" else min
            begins = [part[0][0] for part in parts.values()]
            yield _growth(begins, [told(value for _, value in part) for part in parts.values()])


def _alike(record: Record) -> Iterator[dict[str, Any]]:
    """Yield samples with all lanes up, and with as many processes as their life mostly had.

    The main process has descriptors for each lane, and for each process that calibrates.
    """
    samples = [
        one for one in record.samples if (one.get("gnnserve_lanes_up") or 0) >= record.end["lanes"]
    ]
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for one in samples:
        counts[one["pid"]][one["processes"]] += 1
    for one in samples:
        if one["processes"] == counts[one["pid"]].most_common(1)[0][0]:
            yield one


def _growth(calls: list[float], values: list[float]) -> Growth:
    """Fit a line; returns its rise per 10,000 calls, and the error of that."""
    x, y = np.array(calls), np.array(values)
    slope, at_zero = np.polyfit(x, y, 1)
    variance = np.square(y - at_zero - slope * x).sum() / (len(x) - 2)
    error = ERRORS[len(x)] * np.sqrt(variance / np.square(x - x.mean()).sum())
    return Growth(float(slope * 10_000), float(error * 10_000))


def _calls_of_first_round(record: Record, points: list[_Sample]) -> float:
    """Return the calls of a life by when each fault has been done once.

    What a fault makes the server take for the first time is no leak.
    """
    begin, end = points[0].at, points[-1].at
    first: dict[str, int] = {}
    for fault in record.faults:
        if begin <= fault["at"] <= end:
            first.setdefault(fault["name"], fault["end"])
    over = max(first.values(), default=begin)
    return min((one.calls for one in points if one.at >= over), default=points[-1].calls)
