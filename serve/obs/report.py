"""The QoS report: promises kept and broken, the causes, and the cost.

A request is *answered* when its client got a result. A late answer, after the QoS target, is a
*violation*; the violation rate is the share of late answers among all answers. A request that was
refused, failed, cancelled or expired got no result. It is no violation, and `rejected` counts it by
its reason (`deadline` for an expired one). Requests that expired after their target are counted
again in `expired_late`, so that giving up early cannot flatter the server.

`Report` as JSON is an interface: fields may be added but never renamed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from serve.core.rules.cause import CAUSES
from serve.obs.read import read_runs, reading
from serve.obs.record import ServerRun
from serve.obs.selection import Selection
from serve.obs.sketch import Sketch
from serve.obs.summary import Summary
from serve.obs.totals import AnswerTotals, MemoryTotals, ModelTotals
from serve.obs.violations import Violation, violations_of
from serve.wilson import wilson_interval


class Quantiles(msgspec.Struct, frozen=True):
    """Percentiles over all answered requests; zeros when there are none.

    Exact for up to 20,000 answers, beyond that within 0.25 %.
    """

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one model over all its versions, or of one machine over all models."""

    requests: int
    answered: int
    violations: int
    violation_rate: float
    latency_over_qt: Quantiles
    latency_ms: Quantiles


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated and measured memory of runs, and their concurrent peak."""

    #: Memory budget in the newest run of the server; of several servers the largest.
    budget_bytes: int
    #: Largest sum of the reservations of concurrent requests of one server.
    peak_bytes: int
    #: Largest sum of the measured peaks of concurrent requests of one server.
    peak_measured_bytes: int
    #: Number of runs whose peak was measured.
    measured: int
    #: Number of runs whose peak exceeded their reservation.
    underestimates: int
    #: Number of runs whose peak exceeded the estimate, within the reservation or not.
    estimate_exceeded: int
    #: Median of reserved ÷ measured − 1.
    overestimate_p50: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over all requests, by model and by cause."""

    #: Rows that the database could not take, in the runs of the server that the report is about.
    rows_lost: int
    requests: int
    answered: int
    violations: int
    #: Violations ÷ answered.
    violation_rate: float
    #: 1 − violation rate.
    attainment: float
    #: 95 % Wilson score interval of the attainment.
    attainment_interval: tuple[float, float]
    #: Number of requests that expired at the client's own limit and after their target.
    expired_late: int
    latency_over_qt: Quantiles
    latency_ms: Quantiles
    jct_over_qt_mean: float
    quet_over_qt_mean: float
    #: Measured ÷ estimated time on the lane.
    run_over_estimate: Quantiles
    by_model: dict[str, ModelReport]
    #: Of the databases of several servers, by machine; empty for one.
    by_machine: dict[str, ModelReport]
    #: Violations by cause, with all of `CAUSES`.
    by_cause: dict[str, int]
    memory: MemoryReport
    #: Requests without a result, by reason.
    rejected: dict[str, int]
    #: Mean share of the latency by stage over answered requests; `STAGES` sum to 1. Also
    #: `prepare_hidden`: hidden preparation as a share of the latency (the request waited in the
    #: queue anyway), and `prepare_hidden_share`: hidden ÷ all preparation.
    overhead: dict[str, float]
    #: Arrival of the first and the last request; 0 without requests.
    first_unix_ns: int
    last_unix_ns: int
    #: The violations furthest beyond their target, worst first.
    worst: list[Violation]


def load_report(path: Path, chosen: Selection | None = None) -> Report:
    """Make the report over the chosen requests of a database, or all; raises ConfigError."""
    summary, runs = read_summary({"": path}, chosen or Selection())
    return report_of(summary, runs)


def read_summary(
    databases: Mapping[str, Path], chosen: Selection
) -> tuple[Summary, list[ServerRun]]:
    """Return what the report shows of databases by machine, and the servers' runs.

    Raises ConfigError.
    """
    with ExitStack() as stack:
        opened = {name: stack.enter_context(reading(path)) for name, path in databases.items()}
        runs = [run for db in opened.values() for run in read_runs(db, chosen)]
        return Summary(opened, chosen), runs


def report_dict(report: Report) -> dict[str, Any]:
    """Return the report as plain data for JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(report)
    return plain


def report_of(summary: Summary, runs: Sequence[ServerRun]) -> Report:
    """Make the report of what was read, and of the servers' runs."""
    total, answers, outcomes = summary.all, summary.answers, summary.outcomes
    answered, violations = total.over.count, total.violations
    rate = violations / answered if answered else 0.0
    causes = Counter(outcomes.by_cause)
    machines = summary.by_machine if len(summary.by_machine) > 1 else {}
    return Report(
        rows_lost=sum(run.rows_lost for run in runs),
        requests=total.requests,
        answered=answered,
        violations=violations,
        violation_rate=rate,
        attainment=(answered - violations) / answered if answered else 1.0,
        attainment_interval=wilson_interval(answered - violations, answered),
        expired_late=outcomes.expired_late,
        latency_over_qt=_quantiles(total.over),
        latency_ms=_quantiles(total.latency_ms),
        jct_over_qt_mean=total.over.mean,
        quet_over_qt_mean=answers.quet_over_target.mean,
        run_over_estimate=_quantiles(answers.run_over_estimate),
        by_model={name: _model_report(one) for name, one in sorted(summary.by_model.items())},
        by_machine={name: _model_report(one) for name, one in sorted(machines.items())},
        by_cause={cause: causes.pop(cause, 0) for cause in CAUSES} | dict(causes),
        memory=_memory(summary.memory, runs, several=bool(machines)),
        rejected=dict(outcomes.rejected.most_common()),
        overhead=_overhead(answers),
        first_unix_ns=summary.first_unix_ns,
        last_unix_ns=summary.last_unix_ns,
        worst=violations_of(summary.worst, summary.mates, summary.worst_machines),
    )


def _model_report(model: ModelTotals) -> ModelReport:
    answered = model.over.count
    return ModelReport(
        requests=model.requests,
        answered=answered,
        violations=model.violations,
        violation_rate=model.violations / answered if answered else 0.0,
        latency_over_qt=_quantiles(model.over),
        latency_ms=_quantiles(model.latency_ms),
    )


def _memory(totals: MemoryTotals, runs: Sequence[ServerRun], *, several: bool) -> MemoryReport:
    budgets = [(run.budget_bytes if several else run.started_unix_ns, run) for run in runs]
    _, chosen = max(budgets, key=lambda one: one[0], default=(0, None))
    over = totals.reserved_over_measured
    return MemoryReport(
        budget_bytes=chosen.budget_bytes if chosen else 0,
        peak_bytes=totals.reserved_peak,
        peak_measured_bytes=totals.measured_peak,
        measured=totals.measured,
        underestimates=totals.underestimates,
        estimate_exceeded=totals.estimate_exceeded,
        overestimate_p50=over.quantiles((0.5,))[0] - 1.0 if over.count else 0.0,
    )


def _overhead(answers: AnswerTotals) -> dict[str, float]:
    answered = answers.stages["all"]
    prepared = answers.prepare_ns
    return answered.means() | {
        "prepare_hidden": answers.hidden_share / max(answered.count, 1),
        "prepare_hidden_share": answers.hidden_ns / prepared if prepared else 0.0,
    }


def _quantiles(values: Sketch) -> Quantiles:
    return Quantiles(*values.quantiles((0.5, 0.9, 0.99)))
