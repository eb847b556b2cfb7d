"""Prometheus metrics of requests: Triton's ``nv_inference_…`` and gnnserve's own.

Finished requests come from the thread of ``sink`` and are counted many at a time, as arrays, which
takes a quarter of the time. The present state (queue, lanes, memory) is read once per scrape, see
``scraped``.
"""

import threading
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    ProcessCollector,
)

from serve.obs import host_usage
from serve.obs.exposition import PLAIN, exposed
from serve.obs.frame import Column, codes_of, ratio
from serve.obs.histograms import Histograms
from serve.obs.record import RequestRecord, ServerRun
from serve.obs.scraped import EngineSnapshot, EngineState, PortSnapshot, PortState
from serve.obs.triton_metrics import TritonMetrics

_SLACK_S = (-1.0, -0.25, -0.1, -0.05, -0.025, -0.01, -0.005, -0.0025, -0.001, 0.0,
            0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)  # fmt: skip
_OVER_TARGET = (0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_AROUND_ONE = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0)
_SHARE = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
_DURATION_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
               10.0, 30.0, 60.0)  # fmt: skip
#: Most tenants with a series of their own, as clients may name any number.
_MOST_TENANTS = 32
_GROUP = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
#: Most records held before they are counted.
_MOST_UNCOUNTED = 512
#: Fields of a record that are counted as numbers.
_NUMBERS = ("latency_ns", "qos_target_ns", "queue_ns", "prepare_ns", "prepare_exposed_ns",
            "run_ns", "answer_ns", "run_estimate_ns", "group_size", "lane", "pmc_estimate_bytes",
            "reserve_bytes")  # fmt: skip
#: Stages of a request by their label.
_STAGES = {"queue": "queue_ns", "prepare": "prepare_exposed_ns", "run": "run_ns",
           "answer": "answer_ns"}  # fmt: skip
_NO_RESULT = "no_result"
#: Model, version and outcome.
_Kind = tuple[str, str, str]


class Metrics:
    """All metrics that `/metrics` shows, in a registry of their own."""

    def __init__(self, facts: ServerRun, snapshot: Callable[[], EngineSnapshot]) -> None:
        """Register all metrics; each scrape calls `snapshot` once, on the scrape's thread."""
        # Series with creation times would double the output, and nobody needs them.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self.registry = CollectorRegistry()
        self._triton = TritonMetrics()
        registry.register(self._triton)
        registry.register(EngineState(snapshot))
        registry.register(host_usage.HostUsage())
        # Time, memory and open files of the main process.
        ProcessCollector(registry=registry)
        info = Info("gnnserve_server", "Version and settings of this server", registry=registry)
        info.info(
            {
                "version": facts.version,
                "device": facts.device,
                "lanes": str(facts.lanes_started or facts.lanes),
                "policy": facts.policy,
                "discipline": facts.discipline,
                "window": facts.window,
            }
        )

        lanes = Gauge("gnnserve_lanes", "Lanes that the server was started with", registry=registry)
        lanes.set(facts.lanes_started or facts.lanes)
        slots = Gauge("gnnserve_slots", "Requests that execute at once", registry=registry)
        slots.set(facts.lanes)

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"gnnserve_{name}", help_text, labels, registry=registry)

        def histogram(
            name: str, help_text: str, bounds: tuple[float, ...], *labels: str
        ) -> Histograms:
            made = Histograms(f"gnnserve_{name}", help_text, bounds, *labels)
            registry.register(made)
            return made

        self._violations = counter(
            "qos_violations", "Answers after their QoS target", "model", "policy", "cause"
        )
        self._rejections = counter("rejections", "Requests without a result", "model", "reason")
        self._underestimates = counter(
            "memory_underestimates", "Runs that used more memory than was reserved", "model"
        )
        self._nonfinite = counter(
            "nonfinite_answers", "Answers with values that are NaN or infinite", "model"
        )
        self._lane_busy = counter(
            "lane_busy_seconds", "Time spent running; its rate is the lane's utilization", "lane"
        )
        #: Tenants with a series of their own.
        self._tenants: set[str] = set()
        self._by_tenant = counter(
            "tenant_requests",
            f"Requests by tenant and outcome; `others` after {_MOST_TENANTS} tenants",
            "tenant",
            "outcome",
        )
        self._duration = histogram(
            "request_duration_seconds",
            "Time from arrival to the end, with the answer handed to the transport",
            _DURATION_S,
            "model",
            "version",
            "outcome",
        )
        self._stages = histogram(
            "stage_duration_seconds",
            "Time of answered requests by stage; prepare counts what no other work hid",
            _DURATION_S,
            "model",
            "stage",
        )
        self._slack = histogram(
            "qos_slack_seconds", "QoS target - latency; negative when late", _SLACK_S, "model"
        )
        self._over_target = histogram(
            "latency_over_target", "Latency / QoS target", _OVER_TARGET, "model"
        )
        self._memory_ratio = histogram(
            "memory_estimate_ratio", "Measured / estimated peak memory", _AROUND_ONE, "model"
        )
        self._time_ratio = histogram(
            "time_estimate_ratio", "Measured / estimated run time", _AROUND_ONE, "model"
        )
        self._exposed = histogram(
            "prepare_exposed_ratio", "Share of the preparation that no other work hid", _SHARE
        )
        self._group_size = histogram(
            "group_size", "Size of the group that a task was planned in", _GROUP
        )

        self._lock = threading.Lock()
        #: Records not counted yet; they are when there are many, or when somebody asks.
        self._uncounted: deque[RequestRecord] = deque()

    def observe(self, record: RequestRecord) -> None:
        """Take a finished request, which the next scrape shows."""
        self._uncounted.append(record)
        if len(self._uncounted) >= _MOST_UNCOUNTED:
            self.count()

    def count(self) -> None:
        """Count the records held, as every scrape does. Thread-safe."""
        with self._lock:
            records = [self._uncounted.popleft() for _ in range(len(self._uncounted))]
            if records:
                self._add(records)

    def _add(self, records: list[RequestRecord]) -> None:
        kinds, names = codes_of([_kind_of(record) for record in records])
        numbers = {
            name: np.fromiter(map(attrgetter(name), records), np.float64, len(records))
            for name in _NUMBERS
        }
        numbers["measured_bytes"] = np.array(
            [-1 if one.pmc_measured_bytes is None else one.pmc_measured_bytes for one in records]
        )
        answered = np.array([outcome != _NO_RESULT for _, _, outcome in names])[kinds]
        self._duration.observe(numbers["latency_ns"] / 1e9, kinds, names)
        self._add_answers({name: of[answered] for name, of in numbers.items()}, kinds[answered],
                          names)  # fmt: skip
        ran = numbers["lane"] >= 0
        self._add_runs({name: of[ran] for name, of in numbers.items()}, kinds[ran], answered[ran],
                       names)  # fmt: skip
        self._add_tenants(records, [names[kind][2] for kind in kinds.tolist()])
        for record in records:
            if record.status != "OK" or record.violated or record.nonfinite_values:
                self._add_unusual(record)

    def _add_answers(
        self, answers: dict[str, Column], kinds: Column, names: Sequence[_Kind]
    ) -> None:
        """Add numbers of answered requests."""
        latency, target = answers["latency_ns"], answers["qos_target_ns"]
        models = [(model,) for model, _, _ in names]
        for stage, name in _STAGES.items():
            of = [(model, stage) for (model,) in models]
            self._stages.observe(answers[name] / 1e9, kinds, of)
        promised = target > 0
        slack, over = (target - latency)[promised] / 1e9, ratio(latency, target)[promised]
        self._slack.observe(slack, kinds[promised], models)
        self._over_target.observe(over, kinds[promised], models)
        sums = [
            np.bincount(kinds, answers[name], len(names)).tolist()
            for name in ("latency_ns", *_STAGES.values())
        ]
        counts = np.bincount(kinds, minlength=len(names)).tolist()
        for (model, version, _), count, *times_ns in zip(names, counts, *sums, strict=True):
            if count:
                self._triton.answered(model, version, count, [int(time) for time in times_ns])

    def _add_runs(
        self, runs: dict[str, Column], kinds: Column, answered: Column, names: Sequence[_Kind]
    ) -> None:
        """Add numbers of requests that reached a lane."""
        models = [(model,) for model, _, _ in names]
        everything = [()] * len(names)
        lanes, numbers = codes_of(runs["lane"].tolist())
        busy_s = np.bincount(lanes, runs["run_ns"]) / 1e9
        for number, seconds in zip(numbers, busy_s.tolist(), strict=True):
            self._lane_busy.labels(str(int(number))).inc(seconds)
        self._group_size.observe(runs["group_size"], kinds, everything)
        prepared = runs["prepare_ns"] > 0
        exposed = ratio(runs["prepare_exposed_ns"], runs["prepare_ns"])
        self._exposed.observe(exposed[prepared], kinds[prepared], everything)
        timed = answered & (runs["run_estimate_ns"] > 0)
        time_ratio = ratio(runs["run_ns"], runs["run_estimate_ns"])
        self._time_ratio.observe(time_ratio[timed], kinds[timed], models)
        measured, estimate = runs["measured_bytes"], runs["pmc_estimate_bytes"]
        known = (measured >= 0) & (estimate > 0)
        self._memory_ratio.observe(ratio(measured, estimate)[known], kinds[known], models)
        for kind in kinds[known & (measured > runs["reserve_bytes"])].tolist():
            self._underestimates.labels(*models[kind]).inc()

    def _add_tenants(self, records: Sequence[RequestRecord], outcomes: Sequence[str]) -> None:
        tenants = [record.tenant for record in records]
        for (tenant, outcome), count in Counts(zip(tenants, outcomes, strict=True)).items():
            name = tenant
            if tenant not in self._tenants:
                if len(self._tenants) >= _MOST_TENANTS:
                    name = "others"
                self._tenants.add(name)
            self._by_tenant.labels(name, outcome).inc(count)

    def _add_unusual(self, record: RequestRecord) -> None:
        """Count a late answer, one with values that are no numbers, or a request without any."""
        model, _, _ = _kind_of(record)
        if record.nonfinite_values:
            self._nonfinite.labels(record.model).inc()
        if record.status != "OK":
            count = 1 + record.left_out
            self._rejections.labels(model, record.reason or record.status.lower()).inc(count)
            if record.status != "NOT_FOUND":
                self._triton.failed(model, record.version, record.reason)
        elif record.violated and record.qos_target_ns > 0:
            self._violations.labels(model, record.policy, record.cause).inc()

    def show_port(self, snapshot: Callable[[], PortSnapshot]) -> None:
        """Show the gRPC port too; each scrape calls `snapshot` once."""
        self.registry.register(PortState(snapshot))

    def text(self, content_type: str = PLAIN) -> bytes:
        """Return the metrics in the form of a content type of ``exposition``."""
        self.count()
        return exposed(self.registry, content_type)


def _kind_of(record: RequestRecord) -> _Kind:
    """Return model, version and outcome; clients can make up names of models that are unknown."""
    if record.status == "OK":
        return record.model, record.version, "late" if record.violated else "in_time"
    if record.status == "NOT_FOUND":
        return "", "", _NO_RESULT
    return record.model, record.version, _NO_RESULT
