"""What a run is judged by: conditions such as `late>1%`, and the highest rate that meets them."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from loadgen.measure import LoadSummary
from serve.errors import ConfigError

#: Figures that conditions name; shares from 0 to 1.
FIGURES: dict[str, Callable[[LoadSummary], float]] = {
    "late": lambda summary: summary.violation_rate,
    "late-by-server": lambda summary: summary.violations_by_server / max(1, summary.answered),
    "missed": lambda summary: summary.missed_rate,
    "failed": lambda summary: (summary.requests - summary.answered) / max(1, summary.requests),
}
#: The search ends when the highest rate that passed and the lowest that failed are this close.
_CLOSE = 1.05
#: The search tries rates from the first one ÷ this to the first one × this.
_SPAN = 64


@dataclass(frozen=True, slots=True)
class Condition:
    """A figure above a limit, which a run must not have."""

    figure: str
    #: From 0 to 1.
    limit: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `FIGURE>PERCENT%`; raises ConfigError."""
        match = re.fullmatch(r"\s*([a-z-]+)\s*>\s*(\d+(?:\.\d+)?)\s*%\s*", text)
        if match is None or match[1] not in FIGURES or float(match[2]) > 100:
            raise ConfigError(
                f"condition '{text}' is not FIGURE>PERCENT%, as 'late>1%'; figures: "
                + ", ".join(FIGURES)
            )
        return cls(match[1], float(match[2]) / 100)

    def holds(self, summary: LoadSummary) -> bool:
        """Return True when the figure of the run is above the limit."""
        return FIGURES[self.figure](summary) > self.limit

    def told(self, summary: LoadSummary) -> str:
        """Return the figure of the run and the limit, as a sentence."""
        return f"{self.figure}: {FIGURES[self.figure](summary):.2%}, more than {self.limit:.3g}"


class TriedRate(msgspec.Struct, frozen=True, kw_only=True):
    """A rate that was tried."""

    rate_hz: float
    passed: bool
    late: float
    missed: float


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate that passed, 0 when none did, and all rates that were tried."""

    rate_hz: float
    steps: list[TriedRate]


def find_limit(
    run: Callable[[float], LoadSummary],
    first_hz: float,
    conditions: Sequence[Condition],
    on_step: Callable[[TriedRate], None] = lambda _: None,
) -> Limit:
    """Return the highest rate at which no condition holds, to 5 %.

    The rate is doubled or halved until the verdict changes, at most to 64 times the first one or a
    64th of it; then the span's logarithm is halved. A run that was stopped early ends the search.

    Args:
        run: Sends a load at a rate.
        first_hz: The rate to begin with.
        conditions: A rate fails when one of them holds, or when nothing is answered.
        on_step: Called after each rate.
    """
    low_hz, high_hz, rate_hz = 0.0, math.inf, first_hz
    steps: list[TriedRate] = []
    while first_hz / _SPAN <= rate_hz <= first_hz * _SPAN and high_hz > low_hz * _CLOSE:
        summary = run(rate_hz)
        if summary.requests < summary.scheduled:
            break
        passed = summary.answered > 0 and not any(one.holds(summary) for one in conditions)
        steps.append(
            TriedRate(rate_hz=rate_hz, passed=passed, late=summary.violation_rate,
                 missed=summary.missed_rate)
        )  # fmt: skip
        on_step(steps[-1])
        if passed:
            low_hz = rate_hz
        else:
            high_hz = rate_hz
        if math.isinf(high_hz):
            rate_hz = 2 * low_hz
        elif low_hz == 0.0:
            rate_hz = high_hz / 2
        else:
            rate_hz = math.sqrt(low_hz * high_hz)
    return Limit(rate_hz=low_hz, steps=steps)
