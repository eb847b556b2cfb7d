"""Scrapes after a handful of requests, read by Prometheus' own parser."""

import re

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from serve.obs.exposition import OPEN
from serve.obs.host_usage import HostUsage
from serve.obs.metrics import Metrics
from serve.obs.scraped import EngineSnapshot, PortSnapshot
from tests.obs.builders import MS, RUN, late, record, unanswered

SNAPSHOT = EngineSnapshot(
    pending={("gcn", "1"): 3, ("gat", "2"): 4},
    lanes_up=2,
    executors={("gin", "1"): "csr"},
    lane_restarts=5,
    memory_bytes=((400, 100), (600, 500)),
    pool_used_bytes=9,
    rows_dropped=8,
    quarantined=("gin",),
    gathered_rows={"cora": (50, 40)},
    settings_restored={"gat": 6},
)


def scrape(*records):
    metrics = Metrics(RUN, lambda: SNAPSHOT)
    metrics.show_port(
        lambda: PortSnapshot(
            answers=False, inside=2, own_calls=90, refused={"no_thread": 7, "no_message": 0}
        )
    )
    for row in records:
        metrics.observe(row)
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_openmetrics_says_the_same():
    metrics = Metrics(RUN, lambda: SNAPSHOT)
    metrics.observe(record("a"))
    metrics.observe(late("b"))
    text = metrics.text(OPEN).decode()
    assert text.endswith("# EOF\n")
    # The client library's parser refuses a count without a sum, which the library itself writes
    # where bounds are negative, and which Prometheus reads.
    text = re.sub(r"^gnnserve_qos_slack_seconds_count.*\n", "", text, flags=re.M)
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in open_families(text)
        for sample in family.samples
    }
    plain = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name != "gnnserve_qos_slack_seconds_count"
    }
    assert found.keys() == plain.keys()
    of_requests = [key for key in plain if not key[0].startswith(("process_", "nv_cpu_"))]
    assert {key: found[key] for key in of_requests} == {key: plain[key] for key in of_requests}


def test_tritons_names_count_and_add_up():
    seen = scrape(record("a", prepare_exposed_ns=3 * MS), record("b"), record("c", model="gat"))
    assert seen["nv_inference_request_success", "gcn", "1"] == 2
    assert seen["nv_inference_count", "gcn", "1"] == 2
    assert seen["nv_inference_exec_count", "gat", "1"] == 1
    assert seen["nv_inference_request_duration_us", "gcn", "1"] == 20_000
    assert seen["nv_inference_queue_duration_us", "gcn", "1"] == 4_000
    assert seen["nv_inference_compute_input_duration_us", "gcn", "1"] == 3_000
    assert seen["nv_inference_compute_infer_duration_us", "gcn", "1"] == 14_000
    assert seen["nv_inference_compute_output_duration_us", "gcn", "1"] == 2_000
    assert seen["nv_inference_pending_request_count", "gcn", "1"] == 3


def test_the_port_and_what_it_refused_are_shown():
    seen = scrape()
    assert seen["gnnserve_grpc_port_answers",] == 0
    assert seen["gnnserve_requests_inside",] == 2
    assert seen["gnnserve_own_calls_total",] == 90
    assert seen["gnnserve_transport_refused_total", "no_thread"] == 7
    assert seen["gnnserve_transport_refused_total", "no_message"] == 0


@pytest.mark.parametrize(
    ("status", "reason", "nv_reason"),
    [
        ("RESOURCE_EXHAUSTED", "queue_full", "REJECTED"),
        ("DEADLINE_EXCEEDED", "deadline", "REJECTED"),
        ("CANCELLED", "cancelled", "CANCELED"),
        ("INTERNAL", "model_error", "BACKEND"),
        ("INVALID_ARGUMENT", "invalid_input", "OTHER"),
    ],
)
def test_requests_without_a_result_are_counted_by_reason(status, reason, nv_reason):
    seen = scrape(unanswered("a", status, reason))
    assert seen["nv_inference_request_failure", "gcn", nv_reason, "1"] == 1
    assert seen["gnnserve_rejections_total", "gcn", reason] == 1
    assert ("nv_inference_request_success", "gcn", "1") not in seen


def test_names_of_unknown_models_do_not_become_labels():
    seen = scrape(unanswered("a", "NOT_FOUND", "not_found", model="made up"))
    assert seen["gnnserve_rejections_total", "", "not_found"] == 1
    assert not any("made up" in key for key in seen)


def test_promises():
    seen = scrape(record("a"), late("b", cause="overload"))
    assert seen["gnnserve_qos_violations_total", "overload", "gcn", "slack"] == 1
    assert seen["gnnserve_qos_slack_seconds_count", "gcn"] == 2
    assert seen["gnnserve_qos_slack_seconds_bucket", "-0.025", "gcn"] == 0
    assert seen["gnnserve_qos_slack_seconds_bucket", "0.0", "gcn"] == 1
    assert seen["gnnserve_latency_over_target_bucket", "0.5", "gcn"] == 1
    assert seen["gnnserve_latency_over_target_sum", "gcn"] == 2.5


def test_durations_and_stages_are_in_seconds():
    seen = scrape(
        record("a"),
        late("b", version="2"),
        unanswered("c", "RESOURCE_EXHAUSTED", "queue_full", latency_ns=1000, left_out=4),
    )
    name = "gnnserve_request_duration_seconds"
    assert seen[f"{name}_sum", "gcn", "in_time", "1"] == pytest.approx(0.010)
    assert seen[f"{name}_count", "gcn", "late", "2"] == 1
    assert seen[f"{name}_bucket", "0.0005", "gcn", "no_result", "1"] == 1
    assert seen[f"{name}_bucket", "0.025", "gcn", "late", "2"] == 0
    stages = "gnnserve_stage_duration_seconds"
    assert seen[f"{stages}_sum", "gcn", "queue"] == pytest.approx(0.034)
    assert seen[f"{stages}_count", "gcn", "run"] == 2
    assert seen["gnnserve_rejections_total", "gcn", "queue_full"] == 5


def test_many_requests_are_counted_as_one_after_the_other():
    rows = [
        one
        for number in range(400)
        for one in (
            record(f"a{number}", tenant=f"t{number % 3}", lane=number % 5, prepare_exposed_ns=9),
            late(f"b{number}", model="gat", version=str(number % 2), nonfinite_values=number % 2),
            record(f"c{number}", pmc_measured_bytes=number * 2**20, qos_target_ns=number % 2),
            unanswered(f"d{number}", "CANCELLED", "cancelled", left_out=number % 4),
        )
    ]
    together, apart = Metrics(RUN, lambda: SNAPSHOT), Metrics(RUN, lambda: SNAPSHOT)
    for row in rows:
        together.observe(row)
        apart.observe(row)
        apart.count()
    found, expected = (
        {
            (sample.name, *sample.labels.items()): sample.value
            for family in text_string_to_metric_families(metrics.text().decode())
            for sample in family.samples
            if not sample.name.startswith(("process_", "nv_cpu_"))
        }
        for metrics in (together, apart)
    )
    assert found == pytest.approx(expected)
    of = ("model", "gcn"), ("outcome", "in_time"), ("version", "1")
    assert found["gnnserve_request_duration_seconds_count", *of] == 800


def test_tenants_are_bounded():
    seen = scrape(*(record(str(i), tenant=f"t{i}") for i in range(100)))
    counts = {key[2]: n for key, n in seen.items() if key[0] == "gnnserve_tenant_requests_total"}
    assert counts["t0"] == 1
    assert counts["others"] == 68
    assert len(counts) == 33


def test_the_process_is_shown():
    assert scrape()["process_resident_memory_bytes",] > 0


def test_estimates_against_what_was_measured():
    sizes = {"pmc_estimate_bytes": 100, "reserve_bytes": 110}
    seen = scrape(
        record("a", pmc_measured_bytes=90, **sizes),
        record("b", pmc_measured_bytes=120, run_ns=14 * MS, **sizes),
        record("c", pmc_measured_bytes=None),
    )
    assert seen["gnnserve_memory_estimate_ratio_sum", "gcn"] == pytest.approx(0.9 + 1.2)
    assert seen["gnnserve_memory_underestimates_total", "gcn"] == 1
    assert seen["gnnserve_time_estimate_ratio_sum", "gcn"] == pytest.approx(4.0)
    assert seen["gnnserve_lane_busy_seconds_total", "0"] == pytest.approx(0.028)
    assert seen[("gnnserve_prepare_exposed_ratio_count",)] == 3


def test_lanes_and_what_runs_at_once_are_told_apart():
    """A lane of a suspended task is beyond those that run at once, and its loss is a loss too."""
    assert RUN.lanes_told == "4 lanes"
    run = msgspec.structs.replace(RUN, lanes=2, lanes_started=8)
    assert run.lanes_told == "8 lanes, 2 at once"
    text = Metrics(run, lambda: SNAPSHOT).text().decode()
    assert "gnnserve_lanes 8.0" in text
    assert "gnnserve_slots 2.0" in text


def test_the_engine_is_asked_at_the_scrape_only():
    asked = []

    def snapshot():
        asked.append(1)
        return SNAPSHOT

    metrics = Metrics(RUN, snapshot)
    assert asked == []
    metrics.text()
    assert asked == [1]
    seen = scrape()
    assert seen[("gnnserve_queue_depth",)] == 7
    assert seen[("gnnserve_lanes_up",)] == 2
    assert seen[("gnnserve_memory_budget_bytes",)] == 1000
    assert seen[("gnnserve_memory_reserved_bytes",)] == 600
    assert seen[("gnnserve_pool_used_bytes",)] == 9
    assert seen["gnnserve_device_memory_reserved_ratio", "1"] == 500 / 600
    assert seen[("gnnserve_lane_restarts_total",)] == 5
    assert seen["gnnserve_model_quarantined", "gin"] == 1
    assert seen["gnnserve_model_executor", "csr", "gin", "1"] == 1
    assert seen[("gnnserve_report_rows_dropped_total",)] == 8
    assert seen["gnnserve_gathered_rows_total", "cora", "device"] == 40
    assert seen["gnnserve_gathered_rows_total", "cora", "host"] == 10
    assert seen["gnnserve_settings_restored_total", "gat"] == 6


def test_use_of_the_host_since_the_last_scrape(tmp_path):
    meminfo = (
        "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    400 kB\nHugePages_Total: 0\n"
    )
    (tmp_path / "meminfo").write_text(meminfo)
    (tmp_path / "stat").write_text("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3\n")
    usage = HostUsage(tmp_path)
    (tmp_path / "stat").write_text("cpu  160 0 100 720 120 0 0 0 0 0\ncpu0 1 2 3\n")
    seen = {family.name: family.samples[0].value for family in usage.collect()}
    assert seen == {
        "nv_cpu_utilization": 0.6,
        "nv_cpu_memory_total_bytes": 1024_000,
        "nv_cpu_memory_used_bytes": 600 * 1024,
    }


def test_a_machine_without_proc_shows_nothing_of_the_host(tmp_path):
    assert list(HostUsage(tmp_path / "none").collect()) == []
