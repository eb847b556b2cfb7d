"""Late answers over the time of a run: a point a second, each about the ten seconds before it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import msgspec

from loadgen.measure import Sample
from serve.quantiles import quantiles

#: Seconds that a point covers, and points that are kept.
WINDOW_S = 10
KEPT_POINTS = 3600
#: Answers of one second whose latency ÷ target is kept.
_MOST_A_SECOND = 1000


class LatePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of the seconds before a moment; shares in percent, None without an answer."""

    #: Seconds since the run began.
    at_s: int
    answered: int
    late: float | None = None
    late_by_server: float | None = None
    #: Latency as a multiple of the target; None without a target.
    over_p50: float | None = None
    over_p99: float | None = None


@dataclass(slots=True)
class _Second:
    answered: int = 0
    late: int = 0
    late_by_server: int = 0
    over: list[float] = field(default_factory=list)


class LateSeries:
    """Points of one run, added as time goes by; bounded in memory."""

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._now_s = now_s
        self.clear()

    def clear(self) -> None:
        """Begin another run."""
        self._begun_s: float | None = None
        self._number = 0
        self._seconds: deque[_Second] = deque([_Second()], maxlen=WINDOW_S)
        self._points: deque[LatePoint] = deque(maxlen=KEPT_POINTS)

    def add(self, sample: Sample) -> None:
        """Count a request that ended now."""
        if self._begun_s is None:
            self._begun_s = self._now_s()
        self._advance()
        if not sample.answered:
            return
        second = self._seconds[-1]
        second.answered += 1
        second.late += sample.late
        second.late_by_server += sample.late_by_server
        if (over := sample.over_target) is not None and len(second.over) < _MOST_A_SECOND:
            second.over.append(over)

    def points(self) -> list[LatePoint]:
        """Return the points until now, at most `KEPT_POINTS`."""
        self._advance()
        return list(self._points)

    def end(self) -> None:
        """Add no more points; the run is over."""
        self._advance()
        self._begun_s = None

    def _advance(self) -> None:
        if self._begun_s is None:
            return
        number = int(self._now_s() - self._begun_s)
        # What nobody asked for over hours has no answers in it.
        self._number = max(self._number, number - KEPT_POINTS)
        while self._number < number:
            self._number += 1
            self._points.append(_point(self._number, self._seconds))
            self._seconds.append(_Second())


def _point(at_s: int, seconds: deque[_Second]) -> LatePoint:
    answered = sum(one.answered for one in seconds)
    if not answered:
        return LatePoint(at_s=at_s, answered=0)
    over = [value for one in seconds for value in one.over]
    p50, p99 = (round(value, 3) for value in quantiles(over, (0.5, 0.99))) if over else (None, None)
    return LatePoint(
        at_s=at_s,
        answered=answered,
        late=round(100 * sum(one.late for one in seconds) / answered, 2),
        late_by_server=round(100 * sum(one.late_by_server for one in seconds) / answered, 2),
        over_p50=p50,
        over_p99=p99,
    )
