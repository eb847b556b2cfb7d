"""Metrics of the present state: queue, lanes, memory and gRPC port, read once per scrape."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of the engine at one moment."""

    #: Number of requests accepted and not yet launched, by (model, version).
    pending: dict[tuple[str, str], int]
    #: Name of the executor, by (model, version).
    executors: dict[tuple[str, str], str] = {}
    #: (model, version, state) of versions that are served, and of those that do not load.
    version_states: tuple[tuple[str, str, str], ...] = ()
    #: Percent of the requests that name no version, by (model, version), where that is set.
    version_shares: dict[tuple[str, str], float] = {}
    #: Canaries that lost their share since the start of the server, by (model, version).
    canaries_taken_back: dict[tuple[str, str], int] = {}
    #: Requests that shadows were to run, by (model, version, outcome).
    shadow_runs: dict[tuple[str, str, str], int] = {}
    #: Models in quarantine, which ended lanes again and again.
    quarantined: tuple[str, ...] = ()
    #: Lanes that can take a task.
    lanes_up: int
    #: For how long each lane has had its run; 0 for one without.
    running_ns: dict[int, int] = {}
    #: Restarts of lanes since the start of the server.
    lane_restarts: int
    #: True when the system does not keep models from all that they should not do.
    unconfined: bool = False
    #: Those restarts that were for the memory that a lane held or the requests that it had run.
    lanes_recycled: dict[str, int] = {}
    #: Changes of settings that all models share, which lanes have restored, by model.
    settings_restored: dict[str, int] = {}
    #: Private memory of each lane's process.
    lane_bytes: dict[int, int] = {}
    #: (budget, reserved by tasks), by device.
    memory_bytes: tuple[tuple[int, int], ...]
    #: Bytes of the shared pool that requests hold: their inputs and outputs.
    pool_used_bytes: int = 0
    #: Records without a row in the database since the start.
    rows_dropped: int
    #: (rows gathered, those of them from the hot set on a device), by graph; counted for every
    #: eighth request.
    gathered_rows: dict[str, tuple[int, int]] = {}
    #: Training jobs that are known, by state; and since the server started, steps done, and for how
    #: long jobs stood for requests.
    training_jobs: dict[str, int] = {}
    training_steps: int = 0
    training_paused_ns: int = 0

    @property
    def budget_bytes(self) -> int:
        """Memory that tasks may reserve, on all devices."""
        return sum(budget_bytes for budget_bytes, _ in self.memory_bytes)

    @property
    def reserved_bytes(self) -> int:
        """Memory that tasks reserve now, on all devices."""
        return sum(reserved_bytes for _, reserved_bytes in self.memory_bytes)


class RowCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a server got of graphs that others hold parts of, and gave to others."""

    #: Times that requests asked others, and got all that they needed or did not.
    got: int
    lost: int
    got_bytes: int
    #: For how long requests waited in all.
    waited_ns: int
    given_bytes: int
    #: Messages of others that were refused.
    refused: int
    #: None where each server makes its own changes.
    changes: "ChangeCounts | None" = None


class ChangeCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How a server stands with the changes that all servers of a graph make."""

    #: Changes of all graphs that were made here, and those that are known of and were not.
    made: int
    behind: int
    #: True while the server that orders changes is heard of, and this one can make them.
    in_step: bool
    #: Size of the log; 0 on those that have none.
    log_bytes: int


class PortSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of the gRPC port at one moment."""

    #: True while it answers the server's own calls.
    answers: bool
    #: Accepted requests whose answers are not sent yet.
    inside: int = 0
    #: Requests that the server has sent itself at its start, which `ways` counts too.
    own_calls: int = 0
    #: Number of calls refused before they became requests, by reason.
    refused: Mapping[str, int]
    #: Front end that owns the port.
    front: Literal["native", "python"] = "python"
    #: Calls of the native front so far, by the way that they took.
    ways: Mapping[str, int] = {}
    #: Requests that had better been elsewhere, by what came of it; None where no others are known.
    passed_on: Mapping[str, int] | None = None
    #: Requests that got features from other servers, by outcome, and what they took; None where no
    #: graph is shared out.
    rows: "RowCounts | None" = None
    #: New starts of the HTTP gateway; None for a server without it.
    rest_restarts: int | None = None
    #: Lines printed by models and processes that the log did not get.
    lines_left_out: int = 0
    #: Traced requests that were exported, and that were lost; None for a server without traces.
    traces: tuple[int, int] | None = None


class EngineState(Collector):
    """Collects the engine's state at the moment of a scrape."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[GaugeMetricFamily]:
        """Return nothing, so that registering does not ask an engine that may not exist yet."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the gauges and counters."""
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
            "1 for the executor that runs the model",
            labels=("model", "version", "executor"),
        )
        for (model, version), executor in now.executors.items():
            executors.add_metric([model, version, executor], 1)
        yield executors
        yield from _versions(now)
        yield from _training(now)
        quarantined = GaugeMetricFamily(
            "gnnserve_model_quarantined",
            "1 while the model is in quarantine, because it ended lanes again and again",
            labels=("model",),
        )
        for model in now.quarantined:
            quarantined.add_metric([model], 1)
        yield quarantined
        for name, help_text, value in (
            ("queue_depth", "Requests accepted and not yet launched", sum(now.pending.values())),
            ("lanes_up", "Lanes that can take a task", now.lanes_up),
            (
                "lanes_unconfined",
                "1 when the system does not keep models from all that they should not do",
                now.unconfined,
            ),
            ("memory_budget_bytes", "Memory that tasks may reserve", now.budget_bytes),
            ("memory_reserved_bytes", "Memory reserved by running tasks", now.reserved_bytes),
            (
                "pool_used_bytes",
                "Shared memory that inputs and outputs of requests hold",
                now.pool_used_bytes,
            ),
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
            "Private memory of the lane's process, including what the fork server passed on",
            labels=("lane",),
        )
        for lane, size_bytes in now.lane_bytes.items():
            by_lane.add_metric([str(lane)], size_bytes)
        yield by_lane
        running = GaugeMetricFamily(
            "gnnserve_lane_running_seconds",
            "Time since the launch of the lane's run; 0 for a lane without one",
            labels=("lane",),
        )
        for lane, time_ns in now.running_ns.items():
            running.add_metric([str(lane)], time_ns / 1e9)
        yield running
        gathered = CounterMetricFamily(
            "gnnserve_gathered_rows",
            "Feature rows gathered, by graph and by memory; counted for every eighth request",
            labels=("graph", "place"),
        )
        for graph, (rows, hot) in now.gathered_rows.items():
            gathered.add_metric([graph, "device"], hot)
            gathered.add_metric([graph, "host"], rows - hot)
        yield gathered
        restored = CounterMetricFamily(
            "gnnserve_settings_restored",
            "Runs and loads that changed settings which all models share; lanes restored them",
            labels=("model",),
        )
        for model, count in now.settings_restored.items():
            restored.add_metric([model], count)
        yield restored
        recycled = CounterMetricFamily(
            "gnnserve_lanes_recycled",
            "Restarts of lanes for the memory that they held, or the requests that they had run",
            labels=("reason",),
        )
        for reason, count in now.lanes_recycled.items():
            recycled.add_metric([reason], count)
        yield recycled
        for name, help_text, value in (
            ("lane_restarts", "Restarts of lanes, for any reason", now.lane_restarts),
            ("report_rows_dropped", "Records that the database could not take", now.rows_dropped),
        ):
            yield CounterMetricFamily(f"gnnserve_{name}", help_text, value=value)


def _training(now: EngineSnapshot) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """Yield what is known of training jobs."""
    jobs = GaugeMetricFamily(
        "gnnserve_training_jobs", "Training jobs, ended ones included, by state", labels=("state",)
    )
    for state, count in now.training_jobs.items():
        jobs.add_metric([state], count)
    yield jobs
    for name, help_text, value in (
        ("steps", "Training steps done", float(now.training_steps)),
        ("paused_seconds", "Time that jobs stood for requests", now.training_paused_ns / 1e9),
    ):
        yield CounterMetricFamily(f"gnnserve_training_{name}", help_text, value=value)


def _versions(now: EngineSnapshot) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """Yield what is known of the versions of models."""
    states = GaugeMetricFamily(
        "gnnserve_model_version_state",
        "1 for the state of each version that serves or does not load",
        labels=("model", "version", "state"),
    )
    for row in now.version_states:
        states.add_metric(row, 1)
    yield states
    shares = GaugeMetricFamily(
        "gnnserve_model_version_share_ratio",
        "Share of the requests that name no version, where a pin or a split sets it",
        labels=("model", "version"),
    )
    for key, percent in now.version_shares.items():
        shares.add_metric(key, percent / 100)
    yield shares
    taken_back = CounterMetricFamily(
        "gnnserve_canaries_taken_back",
        "Canaries that lost their share as they did worse than the other versions",
        labels=("model", "version"),
    )
    for key, count in now.canaries_taken_back.items():
        taken_back.add_metric(key, count)
    yield taken_back
    shadows = CounterMetricFamily(
        "gnnserve_shadow_runs",
        "Requests that a shadow was to run too, by how its answer compared",
        labels=("model", "version", "outcome"),
    )
    for labels, count in now.shadow_runs.items():
        shadows.add_metric(labels, count)
    yield shadows


class PortState(Collector):
    """Collects the gRPC port's state at the moment of a scrape."""

    def __init__(self, snapshot: Callable[[], PortSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges and counters."""
        now = self._snapshot()
        front = InfoMetricFamily("gnnserve_front", "Front end of the gRPC port")
        front.add_metric([], {"kind": now.front})
        yield front
        ways = CounterMetricFamily(
            "gnnserve_front_calls", "Calls of the native front, by way", labels=("way",)
        )
        for way, count in now.ways.items():
            ways.add_metric([way], count)
        yield ways
        if now.passed_on is not None:
            passed_on = CounterMetricFamily(
                "gnnserve_passed_on",
                "Requests that another server could answer better, by what came of it",
                labels=("outcome",),
            )
            for outcome, count in now.passed_on.items():
                passed_on.add_metric([outcome], count)
            yield passed_on
        if now.rows is not None:
            yield from _rows(now.rows)
        yield CounterMetricFamily(
            "gnnserve_own_calls",
            "Requests that the server has sent itself at its start, in no report",
            value=now.own_calls,
        )
        yield GaugeMetricFamily(
            "gnnserve_requests_inside",
            "Accepted requests whose answers are not sent yet",
            now.inside,
        )
        yield GaugeMetricFamily(
            "gnnserve_grpc_port_answers",
            "1 while the gRPC port answers the server's own calls",
            now.answers,
        )
        refused = CounterMetricFamily(
            "gnnserve_transport_refused",
            "Calls refused before they became requests",
            labels=("reason",),
        )
        for reason, count in now.refused.items():
            refused.add_metric([reason], count)
        yield refused
        yield CounterMetricFamily(
            "gnnserve_log_lines_left_out",
            "Lines printed by models that the log did not get",
            value=now.lines_left_out,
        )
        if now.traces is not None:
            traced = CounterMetricFamily(
                "gnnserve_traces", "Traced requests, by what became of them", labels=("outcome",)
            )
            for outcome, count in zip(("exported", "lost"), now.traces, strict=True):
                traced.add_metric([outcome], count)
            yield traced
        if now.rest_restarts is not None:
            yield CounterMetricFamily(
                "gnnserve_rest_restarts", "New starts of the HTTP gateway", value=now.rest_restarts
            )


def _rows(rows: RowCounts) -> Iterator[Metric]:
    """Yield what was exchanged with other servers of graphs that are shared out."""
    requests = CounterMetricFamily(
        "gnnserve_rows_requests",
        "Times that requests needed features or edges that other servers hold, by outcome",
        labels=("outcome",),
    )
    for outcome, count in (("got", rows.got), ("lost", rows.lost)):
        requests.add_metric([outcome], count)
    yield requests
    sent = CounterMetricFamily(
        "gnnserve_rows_bytes",
        "Bytes of features and edges of other servers, by way",
        labels=("way",),
    )
    for way, count in (("got", rows.got_bytes), ("given", rows.given_bytes)):
        sent.add_metric([way], count)
    yield sent
    yield CounterMetricFamily(
        "gnnserve_rows_wait_seconds",
        "Time for which requests waited for features and edges of other servers",
        value=rows.waited_ns / 1e9,
    )
    yield CounterMetricFamily(
        "gnnserve_rows_refused", "Messages of other servers that were refused", value=rows.refused
    )
    if rows.changes is not None:
        yield from _changes(rows.changes)


def _changes(changes: ChangeCounts) -> Iterator[Metric]:
    """Yield how the server stands with changes of graphs that are shared out."""
    yield GaugeMetricFamily(
        "gnnserve_rows_changes",
        "Changes of shared graphs, since their files, that this server made",
        value=changes.made,
    )
    yield GaugeMetricFamily(
        "gnnserve_rows_changes_behind",
        "Changes of shared graphs that this server knows of and has not made",
        value=changes.behind,
    )
    yield GaugeMetricFamily(
        "gnnserve_rows_changes_in_step",
        "1 while the server hears of the sequencer of changes and makes what comes",
        value=changes.in_step,
    )
    if changes.log_bytes:
        yield GaugeMetricFamily(
            "gnnserve_rows_log_bytes", "Size of the log of changes", value=changes.log_bytes
        )
