"""Prometheus metrics of requests: Triton's ``nv_inference_…`` and gnnserve's own.

Finished requests are counted on the thread of ``sink``. The present state (queue, lanes, memory) is
read once per scrape, see ``scraped``.
"""

from collections.abc import Callable

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
        #: The counter of each lane.
        self._lanes: dict[int, Counter] = {}
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

    def observe(self, record: RequestRecord) -> None:
        """Count one finished request; always the same thread."""
        # Clients can make up any number of unknown model names, which must not become labels.
        if record.status != "NOT_FOUND":
            self._triton.observe(record)
        if record.status != "OK":
            model = "" if record.status == "NOT_FOUND" else record.model
            count = 1 + record.left_out
            self._rejections.labels(model, record.reason or record.status.lower()).inc(count)
        if record.lane >= 0:
            self._observe_run(record)
        if record.nonfinite_values:
            self._nonfinite.labels(record.model).inc()
        self._observe_duration(record)
        if record.status == "OK" and record.qos_target_ns > 0:
            slack_ns = record.qos_target_ns - record.latency_ns
            self._slack.observe(slack_ns / 1e9, record.model)
            self._over_target.observe(record.latency_ns / record.qos_target_ns, record.model)
            if record.violated:
                self._violations.labels(record.model, record.policy, record.cause).inc()

    def _observe_duration(self, record: RequestRecord) -> None:
        answered = record.status == "OK"
        outcome = ("late" if record.violated else "in_time") if answered else "no_result"
        known = record.status != "NOT_FOUND"
        model, version = (record.model, record.version) if known else ("", "")
        self._duration.observe(record.latency_ns / 1e9, model, version, outcome)
        if answered:
            for stage, time_ns in (
                ("queue", record.queue_ns),
                ("prepare", record.prepare_exposed_ns),
                ("run", record.run_ns),
                ("answer", record.answer_ns),
            ):
                self._stages.observe(time_ns / 1e9, model, stage)
        tenant = record.tenant
        if tenant not in self._tenants:
            if len(self._tenants) >= _MOST_TENANTS:
                tenant = "others"
            self._tenants.add(tenant)
        self._by_tenant.labels(tenant, outcome).inc()

    def _observe_run(self, record: RequestRecord) -> None:
        model, measured = record.model, record.pmc_measured_bytes
        lane = self._lanes.get(record.lane)
        if lane is None:
            lane = self._lanes[record.lane] = self._lane_busy.labels(str(record.lane))
        lane.inc(record.run_ns / 1e9)
        self._group_size.observe(record.group_size)
        if record.prepare_ns > 0:
            self._exposed.observe(record.prepare_exposed_ns / record.prepare_ns)
        if record.status == "OK" and record.run_estimate_ns > 0:
            self._time_ratio.observe(record.run_ns / record.run_estimate_ns, model)
        if measured is not None and record.pmc_estimate_bytes > 0:
            self._memory_ratio.observe(measured / record.pmc_estimate_bytes, model)
            if measured > record.reserve_bytes:
                self._underestimates.labels(model).inc()

    def show_port(self, snapshot: Callable[[], PortSnapshot]) -> None:
        """Show the gRPC port too; each scrape calls `snapshot` once."""
        self.registry.register(PortState(snapshot))

    def text(self, content_type: str = PLAIN) -> bytes:
        """Return the metrics in the form of a content type of ``exposition``."""
        return exposed(self.registry, content_type)
