"""Prometheus metrics: what Triton calls ``nv_inference_…``, and our promises.

Records come in after the fact, on the thread of ``sink``; what is true at this moment (queue,
lanes, memory) is asked for once per scrape through a function given at construction.
"""

from collections.abc import Callable, Iterator, Mapping
from threading import Lock

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.registry import Collector

from serve.obs import host
from serve.obs.record import RequestRecord, ServerRun

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SLACK_S = (-1.0, -0.25, -0.1, -0.05, -0.025, -0.01, -0.005, -0.0025, -0.001, 0.0,
            0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)  # fmt: skip
_OVER_TARGET = (0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_AROUND_ONE = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0)
_SHARE = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
_GROUP = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)

_NV_REASON = {
    "too_big": "REJECTED",
    "queue_full": "REJECTED",
    "draining": "REJECTED",
    "deadline": "REJECTED",
    "cancelled": "CANCELED",
    "model_error": "BACKEND",
    "out_of_memory": "BACKEND",
    "lane_lost": "BACKEND",
    "time_limit": "BACKEND",
    "quarantined": "BACKEND",
}

_NV_SUMS = {
    "request_success": "Successful requests",
    "count": "Inferences performed",
    "exec_count": "Model executions",
    "request_duration_us": "Cumulative time in the server",
    "queue_duration_us": "Cumulative time queued",
    "compute_input_duration_us": "Cumulative time preparing that nothing hid",
    "compute_infer_duration_us": "Cumulative time running",
    "compute_output_duration_us": "Cumulative time answering",
}


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine at one moment."""

    #: Accepted and not yet launched, by (model, version).
    pending: dict[tuple[str, str], int]
    #: What runs each model, by (model, version).
    executors: dict[tuple[str, str], str] = {}
    #: Models that are not run for a while, as they ended lanes again and again.
    quarantined: tuple[str, ...] = ()
    lanes_up: int
    #: Since the start.
    lane_restarts: int
    #: Those of them that held more memory than they may.
    lanes_recycled: int = 0
    #: Private memory of the process of each lane.
    lane_bytes: dict[int, int] = {}
    #: (what tasks may reserve, what they do), by device.
    memory_bytes: tuple[tuple[int, int], ...]
    #: Records without a row in the database, since the start.
    rows_dropped: int
    #: (rows gathered for every eighth request, those of them that a device had), by graph.
    gathered_rows: dict[str, tuple[int, int]] = {}

    @property
    def budget_bytes(self) -> int:
        """What tasks may reserve, on all devices."""
        return sum(budget_bytes for budget_bytes, _ in self.memory_bytes)

    @property
    def reserved_bytes(self) -> int:
        """What they do."""
        return sum(reserved_bytes for _, reserved_bytes in self.memory_bytes)


class PortSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The gRPC port at one moment."""

    #: It answered the server's own question of late.
    answers: bool
    #: Calls refused before they were requests, by reason.
    refused: Mapping[str, int]


class Metrics:
    """Everything `/metrics` shows, in a registry of its own."""

    def __init__(self, facts: ServerRun, snapshot: Callable[[], EngineSnapshot]) -> None:
        """`snapshot` is called once per scrape, from the thread that serves it."""
        # Creation times as extra series double the output and help nobody here.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self.registry = CollectorRegistry()
        self._nv = _NvInference()
        registry.register(self._nv)
        registry.register(_Now(snapshot))
        registry.register(host.HostUsage())
        info = Info("gnnserve_server", "This server", registry=registry)
        info.info(
            {
                "version": facts.version,
                "device": facts.device,
                "lanes": str(facts.lanes),
                "policy": facts.policy,
                "discipline": facts.discipline,
                "window": facts.window,
            }
        )

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"gnnserve_{name}", help_text, labels, registry=registry)

        def histogram(
            name: str, help_text: str, buckets: tuple[float, ...], *labels: str
        ) -> Histogram:
            return Histogram(
                f"gnnserve_{name}", help_text, labels, buckets=buckets, registry=registry
            )

        self._violations = counter(
            "qos_violations", "Answers later than their target", "model", "policy", "cause"
        )
        self._rejections = counter("rejections", "Requests without a result", "reason")
        self._underestimates = counter(
            "memory_underestimates", "Runs that took more memory than was reserved", "model"
        )
        self._lane_busy = counter(
            "lane_busy_seconds", "Time spent running; its rate is the lane's busy ratio", "lane"
        )
        self._slack = histogram(
            "qos_slack_seconds", "Target - latency; negative: late", _SLACK_S, "model"
        )
        self._over_target = histogram(
            "latency_over_target", "Latency / target", _OVER_TARGET, "model"
        )
        self._memory_ratio = histogram(
            "memory_estimate_ratio", "Measured / estimated peak memory", _AROUND_ONE, "model"
        )
        self._time_ratio = histogram(
            "time_estimate_ratio", "Measured / estimated run time", _AROUND_ONE, "model"
        )
        self._exposed = histogram(
            "prepare_exposed_ratio", "Share of preparing no other work hid", _SHARE
        )
        self._group_size = histogram("group_size", "Tasks planned together, by task", _GROUP)

    def observe(self, record: RequestRecord) -> None:
        """Count one answered request."""
        # Names of models that do not exist come from clients: as labels they could be endless.
        if record.status != "NOT_FOUND":
            self._nv.observe(record)
        if record.status != "OK":
            self._rejections.labels(record.reason or record.status.lower()).inc()
        if record.lane >= 0:
            self._observe_run(record)
        if record.status == "OK" and record.qos_target_ns > 0:
            slack_ns = record.qos_target_ns - record.latency_ns
            self._slack.labels(record.model).observe(slack_ns / 1e9)
            self._over_target.labels(record.model).observe(record.latency_ns / record.qos_target_ns)
            if record.violated:
                self._violations.labels(record.model, record.policy, record.cause).inc()

    def _observe_run(self, record: RequestRecord) -> None:
        model, measured = record.model, record.pmc_measured_bytes
        self._lane_busy.labels(str(record.lane)).inc(record.run_ns / 1e9)
        self._group_size.observe(record.group_size)
        if record.prepare_ns > 0:
            self._exposed.observe(record.prepare_exposed_ns / record.prepare_ns)
        if record.status == "OK" and record.run_estimate_ns > 0:
            self._time_ratio.labels(model).observe(record.run_ns / record.run_estimate_ns)
        if measured is not None and record.pmc_estimate_bytes > 0:
            self._memory_ratio.labels(model).observe(measured / record.pmc_estimate_bytes)
            if measured > record.reserve_bytes:
                self._underestimates.labels(model).inc()

    def show_port(self, snapshot: Callable[[], PortSnapshot]) -> None:
        """Show the gRPC port too; `snapshot` is called once per scrape."""
        self.registry.register(_Port(snapshot))

    def text(self) -> bytes:
        """The exposition; serve it as `CONTENT_TYPE`."""
        return generate_latest(self.registry)


class _NvInference(Collector):
    """Cumulative counts and times under Triton's names.

    NOTE: these names lack the `_total` that the client library gives every counter, so they go
    out untyped; scraping and `rate()` do not care.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._sums: dict[tuple[str, str], list[int]] = {}
        self._failures: dict[tuple[str, str, str], int] = {}

    def observe(self, record: RequestRecord) -> None:
        key = record.model, record.version
        with self._lock:
            if record.status != "OK":
                reason = _NV_REASON.get(record.reason, "OTHER")
                self._failures[*key, reason] = self._failures.get((*key, reason), 0) + 1
                return
            sums = self._sums.setdefault(key, [0] * len(_NV_SUMS))
            stages = record.queue_ns, record.prepare_exposed_ns, record.run_ns, record.answer_ns
            for i, value in enumerate((1, 1, 1, record.latency_ns, *stages)):
                sums[i] += value

    def collect(self) -> Iterator[UnknownMetricFamily]:
        with self._lock:
            sums = {key: list(values) for key, values in self._sums.items()}
            failures = dict(self._failures)
        for i, (name, help_text) in enumerate(_NV_SUMS.items()):
            family = UnknownMetricFamily(
                f"nv_inference_{name}", help_text, labels=("model", "version")
            )
            scale = 1000 if name.endswith("_us") else 1
            for key, values in sums.items():
                family.add_metric(key, values[i] // scale)
            yield family
        family = UnknownMetricFamily(
            "nv_inference_request_failure",
            "Requests without a result",
            labels=("model", "version", "reason"),
        )
        for labels, count in failures.items():
            family.add_metric(labels, count)
        yield family


class _Now(Collector):
    """What the engine says at the moment of the scrape."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: registering must not ask an engine that may not stand yet."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        now = self._snapshot()
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count",
            "Requests accepted and not yet launched",
            labels=("model", "version"),
        )
        for key, count in now.pending.items():
            pending.add_metric(key, count)
        yield pending
        executors = GaugeMetricFamily(
            "gnnserve_model_executor",
            "1: what runs the model now",
            labels=("model", "version", "executor"),
        )
        for (model, version), executor in now.executors.items():
            executors.add_metric([model, version, executor], 1)
        yield executors
        quarantined = GaugeMetricFamily(
            "gnnserve_model_quarantined",
            "1: the model is not run for a while, as it ended lanes again and again",
            labels=("model",),
        )
        for model in now.quarantined:
            quarantined.add_metric([model], 1)
        yield quarantined
        for name, help_text, value in (
            ("queue_depth", "Requests accepted and not yet launched", sum(now.pending.values())),
            ("lanes_up", "Lanes that can take a task", now.lanes_up),
            ("memory_budget_bytes", "Memory that tasks may reserve", now.budget_bytes),
            ("memory_reserved_bytes", "Memory reserved by running tasks", now.reserved_bytes),
        ):
            yield GaugeMetricFamily(f"gnnserve_{name}", help_text, value=value)
        by_device = GaugeMetricFamily(
            "gnnserve_device_memory_reserved_ratio",
            "Memory reserved by running tasks / memory that tasks may reserve, by device",
            labels=("device",),
        )
        for number, (budget_bytes, reserved_bytes) in enumerate(now.memory_bytes):
            by_device.add_metric([str(number)], reserved_bytes / max(1, budget_bytes))
        yield by_device
        by_lane = GaugeMetricFamily(
            "gnnserve_lane_memory_bytes",
            "Private memory of the lane's process, with what it has from the fork server",
            labels=("lane",),
        )
        for lane, size_bytes in now.lane_bytes.items():
            by_lane.add_metric([str(lane)], size_bytes)
        yield by_lane
        gathered = CounterMetricFamily(
            "gnnserve_gathered_rows",
            "Features gathered for every eighth request, by graph and by where they lay",
            labels=("graph", "place"),
        )
        for graph, (rows, hot) in now.gathered_rows.items():
            gathered.add_metric([graph, "device"], hot)
            gathered.add_metric([graph, "host"], rows - hot)
        yield gathered
        for name, help_text, value in (
            ("lane_restarts", "Lanes started again after they died", now.lane_restarts),
            ("lanes_recycled", "Lanes started again as they held too much", now.lanes_recycled),
            ("report_rows_dropped", "Records the database could not take", now.rows_dropped),
        ):
            yield CounterMetricFamily(f"gnnserve_{name}", help_text, value=value)


class _Port(Collector):
    """What is to be said of the gRPC port at the moment of the scrape."""

    def __init__(self, snapshot: Callable[[], PortSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        now = self._snapshot()
        yield GaugeMetricFamily(
            "gnnserve_grpc_port_answers", "1: the gRPC port answers the server itself", now.answers
        )
        refused = CounterMetricFamily(
            "gnnserve_transport_refused",
            "Calls refused before they were requests",
            labels=("reason",),
        )
        for reason, count in now.refused.items():
            refused.add_metric([reason], count)
        yield refused
