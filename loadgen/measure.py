"""Samples of a run and their summary."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Self

import msgspec

from serve.quantiles import quantiles
from serve.wilson import wilson_interval
from serve.wire.messages import ParameterValue
from serve.workload import TraceHeader, TraceItem

#: Send lag above which the generator distorts its own measurements.
LAG_LIMIT_MS = 5.0
#: Share of one core above which the generator may be the bottleneck.
CPU_LIMIT = 0.8


@dataclass(frozen=True, slots=True)
class Reply:
    """End of one request."""

    #: On the monotonic clock.
    done_ns: int
    #: `OK`, gRPC's name of the status, or MALFORMED.
    status: str
    message: str = ""
    size_bytes: int = 0
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the client measured it."""

    model: str
    #: Number of the request in its trace.
    index: int = 0
    #: Intended send time since the start of the run.
    due_ns: int
    #: Actual − intended send time.
    lag_ns: int
    #: Answer − intended send time.
    latency_ns: int
    #: `OK`, a gRPC status name, or MALFORMED for an answer that cannot be read.
    status: str
    message: str = ""
    size_bytes: int = 0
    #: QoS target of the request; None when neither trace nor server gives one.
    target_us: int | None = None
    #: True when the server reports a late answer.
    late_by_server: bool = False
    #: The server's id of the request; empty when it gives none.
    request_uid: str = ""

    @classmethod
    def of(cls, item: TraceItem, index: int, reply: Reply, *, due_ns: int, sent_ns: int) -> Self:
        """Return the sample of a request that was due and sent then, on the monotonic clock."""
        target_us = reply.parameters.get("qos_target_us", item.qos_target_us)
        return cls(
            model=item.model,
            index=index,
            due_ns=item.offset_ns,
            lag_ns=sent_ns - due_ns,
            latency_ns=reply.done_ns - due_ns,
            status=reply.status,
            message=reply.message,
            size_bytes=reply.size_bytes,
            target_us=None if target_us is None else int(target_us),
            late_by_server=bool(reply.parameters.get("qos_violated", False)),
            request_uid=str(reply.parameters.get("request_uid", "")),
        )

    @property
    def error(self) -> str:
        """Status and message of a request without a result, else empty."""
        return "" if self.answered else f"{self.status}: {self.message}"

    @property
    def answered(self) -> bool:
        """True when the request got a result."""
        return self.status == "OK"

    @property
    def over_target(self) -> float | None:
        """Latency ÷ target; None without a target."""
        return None if self.target_us is None else self.latency_ns / 1e3 / self.target_us

    @property
    def late(self) -> bool:
        """True when the answer came after the target, as the client measures it."""
        over = self.over_target
        return self.answered and over is not None and over > 1


class Distribution(msgspec.Struct, frozen=True):
    """Mean, percentiles and maximum of a set of values; all 0 when it is empty."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    max: float = 0.0


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one model."""

    requests: int
    answered: int
    #: Late answers, as the client measures them.
    violations: int
    latency_ms: Distribution
    latency_over_qt: Distribution


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a run; latencies count from the intended send time to the answer at the client."""

    target: str
    trace: TraceHeader
    #: Time from the first intended send to the last answer.
    elapsed_s: float
    #: Number of requests in the plan, and of those that ended.
    scheduled: int
    requests: int
    answered: int
    #: Late answers, as the client and as the server counts them.
    violations: int
    violations_by_server: int
    #: `violations` ÷ `answered`, and the 95 % interval of that if answers were independent.
    violation_rate: float
    violation_interval: tuple[float, float]
    #: Share of `requests` without an answer in time: late, refused, failed or timed out.
    missed_rate: float
    offered_hz: float
    answered_hz: float
    latency_ms: Distribution
    latency_over_qt: Distribution
    send_lag_ms: Distribution
    #: CPU time of the generator ÷ elapsed time, of the busiest of its processes; 1.0 is one core.
    generator_cpu: float
    #: Number of processes that sent.
    processes: int = 1
    by_model: dict[str, ModelSummary]
    by_status: dict[str, int]
    #: First message by status other than OK.
    messages: dict[str, str]
    #: Reasons to doubt these numbers.
    warnings: list[str]


def summarise(
    target: str,
    trace: TraceHeader,
    samples: Sequence[Sample],
    *,
    scheduled: int,
    elapsed_s: float,
    cpu_s: float,
    processes: int = 1,
) -> LoadSummary:
    """Summarize the samples of a run.

    Args:
        target: Address of the server.
        trace: Header of the trace that was sent.
        samples: Requests that ended.
        scheduled: Number of requests in the plan.
        elapsed_s: Time from the first intended send to now.
        cpu_s: CPU time of the generator, of the busiest of its processes.
        processes: Number of these processes.
    """
    answered = [sample for sample in samples if sample.answered]
    late = sum(sample.late for sample in answered)
    lag = distribution(sample.lag_ns / 1e6 for sample in samples)
    messages: dict[str, str] = {}
    for sample in samples:
        if not sample.answered:
            messages.setdefault(sample.status, sample.message)
    span_s = max((sample.due_ns for sample in samples), default=0) / 1e9
    return LoadSummary(
        target=target,
        trace=trace,
        elapsed_s=elapsed_s,
        scheduled=scheduled,
        requests=len(samples),
        answered=len(answered),
        violations=late,
        violations_by_server=sum(sample.late_by_server for sample in answered),
        violation_rate=_share(late, len(answered)),
        violation_interval=wilson_interval(late, len(answered)),
        missed_rate=_share(len(samples) - len(answered) + late, len(samples)),
        offered_hz=len(samples) / span_s if span_s else 0.0,
        answered_hz=len(answered) / elapsed_s if elapsed_s else 0.0,
        latency_ms=_latency_ms(answered),
        latency_over_qt=_over_qt(answered),
        send_lag_ms=lag,
        generator_cpu=_share(cpu_s, elapsed_s),
        processes=processes,
        by_model={
            model: _of_model([sample for sample in samples if sample.model == model])
            for model in sorted({sample.model for sample in samples})
        },
        by_status=dict(Counter(sample.status for sample in samples).most_common()),
        messages=messages,
        warnings=_warnings(lag, _share(cpu_s, elapsed_s), scheduled - len(samples)),
    )


def distribution(values: Iterable[float]) -> Distribution:
    """Return mean, percentiles and maximum of `values`."""
    given = list(values)
    if not given:
        return Distribution()
    return Distribution(fmean(given), *quantiles(given, (0.5, 0.9, 0.99, 0.999, 1.0)))


def _of_model(samples: list[Sample]) -> ModelSummary:
    answered = [sample for sample in samples if sample.answered]
    return ModelSummary(
        requests=len(samples),
        answered=len(answered),
        violations=sum(sample.late for sample in answered),
        latency_ms=_latency_ms(answered),
        latency_over_qt=_over_qt(answered),
    )


def _latency_ms(answered: list[Sample]) -> Distribution:
    return distribution(sample.latency_ns / 1e6 for sample in answered)


def _over_qt(answered: list[Sample]) -> Distribution:
    return distribution(over for sample in answered if (over := sample.over_target) is not None)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _warnings(lag: Distribution, cpu: float, unfinished: int) -> list[str]:
    warnings = []
    if lag.p99 > LAG_LIMIT_MS:
        warnings.append(
            f"requests were sent up to {lag.p99:.1f} ms late (p99): latencies include the "
            "generator's own delay"
        )
    if cpu > CPU_LIMIT:
        warnings.append(f"the generator used {cpu:.0%} of a core: it may be the bottleneck")
    if unfinished:
        warnings.append(
            f"stopped early: {unfinished} requests of the trace were not sent or did not end"
        )
    return warnings
