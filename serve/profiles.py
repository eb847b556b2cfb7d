"""How a load's rate changes over time: a multiple of the mean rate at each moment. Pure.

    ramp:0-2            from 0 × to 2 × the rate over the run
    steps:0.5,1,2       these multiples, for equal parts of the run
    spikes:5,2,30       5 × the rate for 2 s, then 1 ×, every 30 s
    diurnal:0.2-1.8,60  a wave between these multiples every 60 s, from its lowest point

A wave and spikes without a period take the whole run. Arrivals are drawn at the mean rate first,
and their times are then stretched where the multiple is small: so any arrival process keeps its
character, and a Poisson process of varying rate is exact.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice

from serve.errors import ConfigError

#: Straight pieces that stand for one wave.
_WAVE_PIECES = 48
#: Pieces of a profile at most, however long the run is.
_MOST_PIECES = 100_000
#: How each kind is written.
_FORMS = {
    "ramp": "ramp:FROM-TO",
    "steps": "steps:MULTIPLE,MULTIPLE,…",
    "spikes": "spikes:MULTIPLE,SECONDS[,PERIOD]",
    "diurnal": "diurnal:LOW-HIGH[,PERIOD]",
}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A time in which the multiple changes evenly from one value to another."""

    length_s: float
    first: float
    last: float

    @property
    def work_s(self) -> float:
        """Time at the mean rate that brings as many arrivals."""
        return self.length_s * (self.first + self.last) / 2

    def worked_s(self, at_s: float) -> float:
        """Return the work of the piece's first `at_s`."""
        slope = (self.last - self.first) / self.length_s
        return at_s * (self.first + slope * at_s / 2)

    def at_s(self, worked_s: float) -> float:
        """Return when so much of the piece's work is done."""
        slope = (self.last - self.first) / self.length_s
        root = math.sqrt(max(0.0, self.first * self.first + 2 * slope * worked_s))
        # This form of the quadratic's root has no difference of nearly equal numbers.
        return min(self.length_s, 2 * worked_s / (self.first + root)) if worked_s > 0 else 0.0


class Profile:
    """Multiples of a rate over time; after the last piece its last multiple goes on."""

    def __init__(self, pieces: tuple[_Piece, ...]) -> None:
        self._pieces = pieces
        self._starts_s = tuple(accumulate((one.length_s for one in pieces), initial=0.0))
        self._worked_s = tuple(accumulate((one.work_s for one in pieces), initial=0.0))

    def worked_s(self, at_s: float) -> float:
        """Return the time at the mean rate that brings as many arrivals as the first `at_s`."""
        if not self._pieces:
            return at_s
        number = bisect_right(self._starts_s, at_s) - 1
        if number >= len(self._pieces):
            return self._worked_s[-1] + (at_s - self._starts_s[-1]) * self._pieces[-1].last
        return self._worked_s[number] + self._pieces[number].worked_s(at_s - self._starts_s[number])

    def at_s(self, worked_s: float) -> float:
        """Return when `worked_s` are reached, the inverse of that function."""
        if not self._pieces:
            return worked_s
        number = bisect_right(self._worked_s, worked_s) - 1
        if number >= len(self._pieces):
            beyond_s = worked_s - self._worked_s[-1]
            last = self._pieces[-1].last
            return self._starts_s[-1] + (beyond_s / last if last > 0 else 0.0)
        return self._starts_s[number] + self._pieces[number].at_s(worked_s - self._worked_s[number])


def parse_profile(text: str, duration_s: float | None) -> Profile:
    """Return the profile that `text` describes, for a run of that length.

    Raises ConfigError for another text, and where it needs a duration that is not given.
    """
    if not text:
        return Profile(())
    kind, _, given = text.partition(":")
    if kind not in _FORMS:
        raise ConfigError(f"profile '{text}' is not one of {', '.join(_FORMS.values())}")
    if duration_s is None:
        raise ConfigError(f"profile '{text}': give a duration too")
    try:
        pieces = tuple(islice(_PIECES[kind](given, duration_s), _MOST_PIECES + 1))
    except ValueError:
        raise ConfigError(
            f"profile '{text}' is not {_FORMS[kind]} with multiples from 0 and seconds above 0"
        ) from None
    if len(pieces) > _MOST_PIECES:
        raise ConfigError(f"profile '{text}': its period is too short for {duration_s:g} s")
    if not sum(one.work_s for one in pieces) > 0:
        raise ConfigError(f"profile '{text}' has no time with a rate above 0")
    return Profile(pieces)


def _ramp(given: str, duration_s: float) -> Iterator[_Piece]:
    low, high = _multiples(given, "-", 2)
    yield _Piece(duration_s, low, high)


def _steps(given: str, duration_s: float) -> Iterator[_Piece]:
    found = _multiples(given, ",")
    for multiple in found:
        yield _Piece(duration_s / len(found), multiple, multiple)


def _spikes(given: str, duration_s: float) -> Iterator[_Piece]:
    parts = given.split(",")
    (multiple,) = _multiples(parts[0], ",", 1)
    seconds = [_seconds(part) for part in parts[1:]]
    if len(seconds) == 1:
        seconds.append(duration_s)
    length_s, period_s = seconds
    if length_s >= period_s:
        raise ValueError
    for _ in range(math.ceil(duration_s / period_s)):
        yield _Piece(length_s, multiple, multiple)
        yield _Piece(period_s - length_s, 1.0, 1.0)


def _diurnal(given: str, duration_s: float) -> Iterator[_Piece]:
    span, mark, period = given.partition(",")
    low, high = _multiples(span, "-", 2)
    period_s = _seconds(period) if mark else duration_s
    middle, swing = (low + high) / 2, (high - low) / 2

    def multiple(number: int) -> float:
        return max(0.0, middle - swing * math.cos(2 * math.pi * number / _WAVE_PIECES))

    for number in range(math.ceil(duration_s / period_s * _WAVE_PIECES)):
        yield _Piece(period_s / _WAVE_PIECES, multiple(number), multiple(number + 1))


_PIECES = {"ramp": _ramp, "steps": _steps, "spikes": _spikes, "diurnal": _diurnal}


def _multiples(text: str, mark: str, count: int | None = None) -> list[float]:
    found = [float(part) for part in text.split(mark)]
    if not all(0 <= one < math.inf for one in found) or len(found) != (count or len(found)):
        raise ValueError
    return found


def _seconds(text: str) -> float:
    found = float(text)
    if not 0 < found < math.inf:
        raise ValueError
    return found
