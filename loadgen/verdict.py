"""What a run is judged by: conditions such as `late>1%`, and the highest rate that meets them."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

import msgspec

from loadgen.measure import LoadSummary
from serve.errors import ConfigError
from serve.wilson import wilson_interval

#: Shares from 0 to 1 that conditions name: how many of how many.
SHARES: dict[str, Callable[[LoadSummary], tuple[int, int]]] = {
    "late": lambda summary: (summary.violations, summary.answered),
    "late-by-server": lambda summary: (summary.violations_by_server, summary.answered),
    "missed": lambda summary: (
        summary.requests - summary.answered + summary.violations,
        summary.requests,
    ),
    "failed": lambda summary: (summary.requests - summary.answered, summary.requests),
}
_QUANTILES = {"p50": "p50", "p90": "p90", "p99": "p99", "p99.9": "p999", "max": "max"}
#: Figures that conditions name, with their units.
FIGURES = (*SHARES, *_QUANTILES, "PERCENTILE/target")
_FORMS = "FIGURE>PERCENT%, PERCENTILE>MILLISECONDSms or PERCENTILE/target>MULTIPLE"
#: The search ends when the highest rate that passed and the lowest that failed are this close.
_CLOSE = 1.05
#: The search tries rates from the first one ÷ this to the first one × this.
_SPAN = 64
#: A rate is sent at most so many times until the interval of its share is clear of the limit.
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Condition:
    """A figure above a limit, which a run must not have."""

    figure: str
    #: A share from 0 to 1, milliseconds, or a multiple of the target.
    limit: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a condition; raises ConfigError.

        `late > 1%`, `late_share>1%`, `p99 > 50ms` and `p99.9/target > 2` are some.
        """
        match = re.fullmatch(r"\s*([a-z0-9./_-]+)\s*>\s*(\d+(?:\.\d+)?)\s*(%|ms|)\s*", text)
        if match is not None:
            name = match[1].replace("_", "-").removesuffix("-share")
            limit, unit = float(match[2]), match[3]
            if name in SHARES and unit == "%" and limit <= 100:
                return cls(name, limit / 100)
            quantile, mark, of = name.partition("/")
            if quantile in _QUANTILES and (mark + of, unit) in (("", "ms"), ("/target", "")):
                return cls(name, limit)
        raise ConfigError(
            f"condition '{text}' is not {_FORMS}, as 'late>1%'; figures: {', '.join(FIGURES)}"
        )

    def value(self, summary: LoadSummary) -> float:
        """Return the figure of a run."""
        if self.figure in SHARES:
            part, whole = SHARES[self.figure](summary)
            return part / max(1, whole)
        quantile, _, of_target = self.figure.partition("/")
        values = summary.latency_over_qt if of_target else summary.latency_ms
        found: float = getattr(values, _QUANTILES[quantile])
        return found

    def holds(self, summary: LoadSummary) -> bool:
        """Return True when the figure of the run is above the limit."""
        return self.value(summary) > self.limit

    def told(self, summary: LoadSummary) -> str:
        """Return the figure of the run and the limit, as a sentence."""
        value = self.value(summary)
        if self.figure in SHARES:
            return f"{self.figure}: {value:.2%}, more than {100 * self.limit:.4g}%"
        unit = " × the target" if "/" in self.figure else " ms"
        return f"{self.figure}: {value:.4g}{unit}, more than {self.limit:.4g}"

    def surely(self, runs: Sequence[LoadSummary]) -> bool | None:
        """Return whether it holds at the rate of `runs`; None when they do not show it clearly.

        A share is clear when its 95 % interval over all runs does not contain the limit. Other
        figures have no interval: the last run decides.
        """
        if self.figure not in SHARES:
            return self.holds(runs[-1])
        counts = [SHARES[self.figure](run) for run in runs]
        low, high = wilson_interval(sum(one[0] for one in counts), sum(one[1] for one in counts))
        if low <= self.limit <= high:
            return None
        return low > self.limit


class TriedRate(msgspec.Struct, frozen=True, kw_only=True):
    """A rate that was tried, over all of its runs."""

    rate_hz: float
    passed: bool
    #: True when the intervals of all shares were clear of their limits.
    sure: bool
    runs: int
    late: float
    missed: float


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate that passed, 0 when none did, and all rates that were tried."""

    rate_hz: float
    #: The lowest rate that failed; None when none did.
    failed_hz: float | None
    #: True when the verdicts on these two rates are sure.
    sure: bool
    steps: list[TriedRate]


def find_limit(
    run: Callable[[float], LoadSummary],
    first_hz: float,
    conditions: Sequence[Condition],
    on_step: Callable[[TriedRate], None] = lambda _: None,
) -> Limit:
    """Return the highest rate at which no condition holds, to 5 %.

    The rate is doubled or halved until the verdict changes, at most to 64 times the first one or a
    64th of it; then the span's logarithm is halved. A rate whose runs leave the verdict open is
    sent again, four times at most; then its figures decide. A run that was stopped early ends the
    search.

    Args:
        run: Sends a load at a rate.
        first_hz: The rate to begin with.
        conditions: A rate fails when one of them holds, or when nothing is answered.
        on_step: Called after each rate.
    """
    low_hz, high_hz, rate_hz = 0.0, math.inf, first_hz
    steps: list[TriedRate] = []
    while first_hz / _SPAN <= rate_hz <= first_hz * _SPAN and high_hz > low_hz * _CLOSE:
        runs: list[LoadSummary] = []
        verdicts: list[bool | None] = [None]
        while len(runs) < _TRIES and None in verdicts and True not in verdicts:
            summary = run(rate_hz)
            if summary.requests < summary.scheduled:
                return _found(steps)
            runs.append(summary)
            verdicts = [one.surely(runs) for one in conditions] if summary.answered else [True]
        steps.append(_tried(rate_hz, runs, verdicts, conditions))
        on_step(steps[-1])
        if steps[-1].passed:
            low_hz = rate_hz
        else:
            high_hz = rate_hz
        if math.isinf(high_hz):
            rate_hz = 2 * low_hz
        elif low_hz == 0.0:
            rate_hz = high_hz / 2
        else:
            rate_hz = math.sqrt(low_hz * high_hz)
    return _found(steps)


def _tried(
    rate_hz: float,
    runs: Sequence[LoadSummary],
    verdicts: Sequence[bool | None],
    conditions: Sequence[Condition],
) -> TriedRate:
    """Return the verdict on a rate; where its runs leave it open, that of their mean figures."""
    open_ones = (one for one, sure in zip(conditions, verdicts, strict=False) if sure is None)
    failed = True in verdicts or any(
        fmean(one.value(run) for run in runs) > one.limit for one in open_ones
    )
    return TriedRate(
        rate_hz=rate_hz,
        passed=not failed,
        sure=True in verdicts or None not in verdicts,
        runs=len(runs),
        late=fmean(run.violation_rate for run in runs),
        missed=fmean(run.missed_rate for run in runs),
    )


def _found(steps: list[TriedRate]) -> Limit:
    passed = max((one for one in steps if one.passed), key=lambda one: one.rate_hz, default=None)
    failed = min(
        (one for one in steps if not one.passed), key=lambda one: one.rate_hz, default=None
    )
    return Limit(
        rate_hz=passed.rate_hz if passed else 0.0,
        failed_hz=failed.rate_hz if failed else None,
        sure=all(one.sure for one in (passed, failed) if one is not None),
        steps=steps,
    )
