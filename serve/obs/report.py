"""The QoS report: promises kept and broken, the causes, and the cost.

A request is *answered* when its client got a result. A late answer, after the QoS target, is a
*violation*; the violation rate is the share of late answers among all answers. A request that was
refused, failed, cancelled or expired got no result. It is no violation, and `rejected` counts it by
its reason (`deadline` for an expired one). Requests that expired after their target are counted
again in `expired_late`, so that giving up early cannot flatter the server.

`Report` as JSON is an interface: fields may be added but never renamed.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from serve.core.rules.cause import CAUSES
from serve.obs.frame import Column, Frame, ratio
from serve.obs.read import read_database
from serve.obs.record import RequestRecord, ServerRun
from serve.obs.violations import Violation, worst_violations
from serve.quantiles import quantiles

#: Number of violations described one by one.
WORST = 10
#: Shortest overlap for which two runs count as concurrent. Times of records come from the wall
#: clock at arrival, which cannot distinguish "right after" from "at the same time".
_OVERLAP_NS = 50_000


class Quantiles(msgspec.Struct, frozen=True):
    """Percentiles over all answered requests; zeros when there are none."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one model over all its versions."""

    requests: int
    answered: int
    violations: int
    violation_rate: float
    latency_over_qt: Quantiles
    latency_ms: Quantiles


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated and measured memory of runs, and their concurrent peak."""

    #: Memory budget in the newest run of the server.
    budget_bytes: int
    #: Largest sum of the reservations of concurrent requests.
    peak_bytes: int
    #: Largest sum of the measured peaks of concurrent requests.
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


def build_report(records: Iterable[RequestRecord], runs: Sequence[ServerRun]) -> Report:
    """Make the report over records of one run of the server."""
    return report_of(Frame.of_records(records), runs)


def load_report(path: Path, since_s: float | None = None) -> Report:
    """Make the report over a database or its last `since_s` seconds; raises ConfigError."""
    return report_of(*read_database(path, since_s))


def report_dict(report: Report) -> dict[str, Any]:
    """Return the report as plain data for JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(report)
    return plain


def report_of(frame: Frame, runs: Sequence[ServerRun]) -> Report:
    """Make the report over a frame; the budget is that of the newest of `runs`."""
    answered = frame.where(frame.answered)
    violations = int(np.count_nonzero(answered["violated"]))
    kept = len(answered) - violations
    rate = violations / len(answered) if len(answered) else 0.0
    causes = Counter[str](answered["cause"][answered["violated"]].tolist())
    unanswered = frame.where(~frame.answered)
    arrivals = frame["arrived_unix_ns"]
    return Report(
        requests=frame.requests,
        answered=len(answered),
        violations=violations,
        violation_rate=rate,
        attainment=kept / len(answered) if len(answered) else 1.0,
        attainment_interval=wilson_interval(kept, len(answered)),
        expired_late=_expired_late(unanswered),
        latency_over_qt=_quantiles(answered.over_target),
        latency_ms=_quantiles(answered["latency_ns"] / 1e6),
        jct_over_qt_mean=_mean(answered.over_target),
        quet_over_qt_mean=_mean(ratio(answered["quet_ns"], answered["qos_target_ns"])),
        run_over_estimate=_quantiles(ratio(answered["run_ns"], answered["run_estimate_ns"])),
        by_model=_by_model(frame),
        by_cause={cause: causes.pop(cause, 0) for cause in CAUSES} | dict(causes),
        memory=_memory(frame.where(frame.launched), runs),
        rejected=_rejected(unanswered),
        overhead=_overhead(answered),
        first_unix_ns=int(arrivals.min()) if len(frame) else 0,
        last_unix_ns=int(arrivals.max()) if len(frame) else 0,
        worst=worst_violations(frame, WORST),
    )


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return the score interval of a binomial proportion (Wilson 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * ((share * (1 - share) + z * z / (4 * trials)) / trials) ** 0.5
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def peak_concurrent(start_ns: Column, end_ns: Column, weight: Column) -> int:
    """Return the largest sum of `weight` over intervals that overlap."""
    if not len(weight):
        return 0
    end_ns = np.maximum(end_ns - _OVERLAP_NS, start_ns)
    times = np.concatenate([end_ns, start_ns])
    # Ends come first and the sort is stable, so at equal times memory is freed before it is taken.
    order = np.argsort(times, kind="stable")
    held = np.cumsum(np.concatenate([-weight, weight])[order])
    return max(0, int(held.max()))


def _by_model(frame: Frame) -> dict[str, ModelReport]:
    return {
        model: _model_report(frame.where(frame["model"] == model))
        for model in sorted(set(frame["model"].tolist()))
    }


def _model_report(frame: Frame) -> ModelReport:
    answered = frame.where(frame.answered)
    violations = int(np.count_nonzero(answered["violated"]))
    return ModelReport(
        requests=frame.requests,
        answered=len(answered),
        violations=violations,
        violation_rate=violations / len(answered) if len(answered) else 0.0,
        latency_over_qt=_quantiles(answered.over_target),
        latency_ms=_quantiles(answered["latency_ns"] / 1e6),
    )


def _memory(launched: Frame, runs: Sequence[ServerRun]) -> MemoryReport:
    measured = launched.where(~np.isnan(launched["pmc_measured_bytes"]))
    took = measured["pmc_measured_bytes"]
    reserved = measured["reserve_bytes"]
    newest = max(runs, key=lambda run: run.started_unix_ns, default=None)
    over = ratio(reserved, took)[took > 0] - 1.0
    return MemoryReport(
        budget_bytes=newest.budget_bytes if newest else 0,
        peak_bytes=_peak(launched, "reserve_bytes"),
        peak_measured_bytes=_peak(measured, "pmc_measured_bytes"),
        measured=len(measured),
        underestimates=int(np.count_nonzero(took > reserved)),
        estimate_exceeded=int(np.count_nonzero(took > measured["pmc_estimate_bytes"])),
        overestimate_p50=float(np.median(over)) if len(over) else 0.0,
    )


def _peak(launched: Frame, column: str) -> int:
    return peak_concurrent(
        launched.launched_unix_ns, launched.finished_unix_ns, launched[column].astype(np.int64)
    )


def _rejected(unanswered: Frame) -> dict[str, int]:
    columns = (unanswered[name].tolist() for name in ("reason", "status", "left_out"))
    counted = Counter[str]()
    for reason, status, left_out in zip(*columns, strict=True):
        counted[reason or status.lower()] += 1 + left_out
    return dict(counted.most_common())


def _expired_late(unanswered: Frame) -> int:
    late = unanswered["latency_ns"] > unanswered["qos_target_ns"]
    promised = unanswered["qos_target_ns"] > 0
    return unanswered.where((unanswered["reason"] == "deadline") & promised & late).requests


def _overhead(answered: Frame) -> dict[str, float]:
    latency = answered["latency_ns"]
    shares = {stage: _mean(ratio(time, latency)) for stage, time in answered.stage_ns().items()}
    hidden = answered["prepare_ns"] - answered["prepare_exposed_ns"]
    shares["prepare_hidden"] = _mean(ratio(hidden, latency))
    prepared = int(answered["prepare_ns"].sum())
    shares["prepare_hidden_share"] = int(hidden.sum()) / prepared if prepared else 0.0
    return shares


def _quantiles(values: Column) -> Quantiles:
    return Quantiles(*quantiles(values.tolist(), (0.5, 0.9, 0.99)))


def _mean(values: Column) -> float:
    return float(values.mean()) if len(values) else 0.0
