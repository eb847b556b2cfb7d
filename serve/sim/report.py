"""Report of a simulation: the live report's figures, from the same quantities."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from serve.core.cluster.commands import NoAnswer
from serve.core.rules.cause import CAUSES
from serve.core.types import Completed, Nanos, Outcome, Rejected, Task
from serve.quantiles import quantile


class Answered(msgspec.Struct, frozen=True):
    """Request at its end."""

    task: Task
    outcome: Outcome
    answered_ns: Nanos
    #: Why it was late; None for in time, or for no result at all.
    cause: str | None


@dataclass(frozen=True, slots=True)
class SimReport:
    """Rates over completed requests, times as multiples of each request's target (QT)."""

    requests: int
    completed: int
    violations: int
    violation_rate: float
    #: JCT / QT at quantiles 0.5, 0.9 and 0.99.
    latency_over_qt_p50: float
    latency_over_qt_p90: float
    latency_over_qt_p99: float
    jct_over_qt_mean: float
    quet_over_qt_mean: float
    jct_mean_ns: float
    quet_mean_ns: float
    #: From the first arrival to the last answer.
    makespan_ns: int
    by_cause: dict[str, int]
    #: Requests without a result by kind, rejected ones by reason.
    without_result: dict[str, int]


class Ended(Protocol):
    """Request of a simulation at its end, wherever it was served."""

    @property
    def task(self) -> Task:
        """What was asked for."""

    @property
    def outcome(self) -> Outcome | NoAnswer:
        """How it ended; the cluster's word when no machine said."""

    @property
    def answered_ns(self) -> int:
        """When."""

    @property
    def cause(self) -> str | None:
        """Why it was late; None for in time, or for no result at all."""


def summarize(answered: Sequence[Ended]) -> SimReport:
    """Return the figures of one simulation."""
    over_qt: list[float] = []
    jct_ns: list[int] = []
    quet_ns: list[int] = []
    quet_over_qt = 0.0
    causes = Counter(dict.fromkeys(CAUSES, 0))
    without: Counter[str] = Counter()
    for row in answered:
        task, outcome = row.task, row.outcome
        if not isinstance(outcome, Completed):
            without[_kind(outcome)] += 1
            continue
        latency_ns = row.answered_ns - task.arrived_ns
        waited_ns = outcome.timeline.launched_ns - task.arrived_ns
        over_qt.append(latency_ns / task.qos.target_ns)
        jct_ns.append(latency_ns)
        quet_ns.append(waited_ns)
        quet_over_qt += waited_ns / task.qos.target_ns
        if row.cause is not None:
            causes[row.cause] += 1
    over_qt.sort()
    completed = len(over_qt)
    share = 1 / completed if completed else 0.0
    violations = sum(causes.values())
    first_ns = min((row.task.arrived_ns for row in answered), default=0)
    last_ns = max((row.answered_ns for row in answered), default=0)
    return SimReport(
        requests=len(answered),
        completed=completed,
        violations=violations,
        violation_rate=violations * share,
        latency_over_qt_p50=quantile(over_qt, 0.5),
        latency_over_qt_p90=quantile(over_qt, 0.9),
        latency_over_qt_p99=quantile(over_qt, 0.99),
        jct_over_qt_mean=sum(over_qt) * share,
        quet_over_qt_mean=quet_over_qt * share,
        jct_mean_ns=sum(jct_ns) * share,
        quet_mean_ns=sum(quet_ns) * share,
        makespan_ns=last_ns - first_ns,
        by_cause=dict(causes),
        without_result=dict(without),
    )


def _kind(outcome: Outcome | NoAnswer) -> str:
    """Return the name of an end without a result."""
    if isinstance(outcome, NoAnswer):
        return outcome.value
    if isinstance(outcome, Rejected):
        return outcome.reason.value
    return type(outcome).__name__.lower()
