"""The report's numbers, each against a case that is small enough to compute by hand."""

import msgspec
import pytest

from serve.core.rules.cause import CAUSES
from serve.obs.report import load_report, report_dict
from serve.obs.store import RecordStore
from serve.wilson import wilson_interval
from tests.obs.builders import (
    MS,
    RUN,
    START_UNIX_NS,
    build_report,
    late,
    read_database,
    record,
    traffic,
    unanswered,
)

CONTRACT = {
    "requests", "answered", "violations", "violation_rate", "attainment", "latency_over_qt",
    "jct_over_qt_mean", "quet_over_qt_mean", "by_model", "by_cause", "memory", "rejected",
    "overhead",
}  # fmt: skip


def test_the_contracts_names_are_there_and_it_is_json():
    report = msgspec.json.decode(msgspec.json.encode(report_dict(build_report(traffic(50), [RUN]))))
    assert set(report) >= CONTRACT
    assert set(report["latency_over_qt"]) == {"p50", "p90", "p99"}
    assert set(report["by_cause"]) == set(CAUSES)
    assert set(report["memory"]) >= {
        "budget_bytes", "peak_bytes", "underestimates", "overestimate_p50"
    }  # fmt: skip
    model = report["by_model"]["gcn"]
    assert set(model) >= {
        "requests", "answered", "violations", "violation_rate", "latency_over_qt"
    }  # fmt: skip


def test_nothing_recorded_is_a_report_of_zeros():
    report = build_report([], [])
    assert (report.requests, report.answered, report.violation_rate) == (0, 0, 0.0)
    assert report.attainment == 1.0
    assert report.attainment_interval == (0.0, 1.0)
    assert report.by_cause == dict.fromkeys(CAUSES, 0)
    assert report.worst == []


def test_only_late_answers_are_violations():
    rows = [
        record("kept"),
        late("late"),
        unanswered("gone", "CANCELLED", "cancelled", latency_ns=90 * MS, violated=True),
        unanswered("full", "RESOURCE_EXHAUSTED", "queue_full", latency_ns=1),
        unanswered("soon", "DEADLINE_EXCEEDED", "deadline", latency_ns=5 * MS),
        unanswered("far", "DEADLINE_EXCEEDED", "deadline", latency_ns=50 * MS),
    ]
    report = build_report(rows, [RUN])
    assert (report.requests, report.answered, report.violations) == (6, 2, 1)
    assert (report.violation_rate, report.attainment) == (0.5, 0.5)
    assert report.rejected == {"deadline": 2, "cancelled": 1, "queue_full": 1}
    assert report.expired_late == 1
    assert report.by_cause["queue"] == 1


def test_latencies_are_relative_to_the_target():
    rows = [record("a", latency_ns=10 * MS), record("b", latency_ns=30 * MS, quet_ns=22 * MS)]
    report = build_report(rows, [RUN])
    assert report.latency_over_qt.p50 == pytest.approx(1.0)
    assert report.latency_over_qt.p90 == pytest.approx(1.4)
    assert report.jct_over_qt_mean == pytest.approx(1.0)
    assert report.quet_over_qt_mean == pytest.approx((0.1 + 1.1) / 2)


def test_models_are_counted_apart_and_versions_together():
    rows = [record("a"), late("b", version="2"), record("c", model="gat")]
    models = build_report(rows, [RUN]).by_model
    assert {name: (m.requests, m.violations) for name, m in models.items()} == {
        "gcn": (2, 1),
        "gat": (1, 0),
    }


def test_peak_memory_is_the_largest_sum_of_what_ran_together():
    def run(uid, start_ms, length_ms, reserve, **fields):
        times = {"quet_ns": start_ms * MS, "latency_ns": (start_ms + length_ms) * MS}
        sizes = {"reserve_bytes": reserve, "pmc_measured_bytes": reserve - 1}
        return record(uid, answer_ns=0, **times, **sizes, **fields)

    rows = [
        run("a", 0, 10, 100),
        run("b", 5, 10, 20),
        run("c", 10, 10, 50),  # takes over exactly when a ends
        run("d", 12, 1, 7),
        run("failed", 5, 2, 1, status="INTERNAL", reason="model_error"),
        unanswered("never ran", "CANCELLED", "cancelled", reserve_bytes=10**6),
    ]
    memory = build_report(rows, [RUN]).memory
    assert memory.peak_bytes == 121
    assert memory.peak_measured_bytes == 118
    assert memory.budget_bytes == RUN.budget_bytes


def test_underestimates_are_what_the_reservation_did_not_hold():
    sizes = {"pmc_estimate_bytes": 100, "reserve_bytes": 120}
    rows = [record(str(m), pmc_measured_bytes=m, **sizes) for m in (80, 100, 110, 121)]
    rows.append(record("unknown", pmc_measured_bytes=None, **sizes))
    memory = build_report(rows, [RUN]).memory
    assert (memory.measured, memory.estimate_exceeded, memory.underestimates) == (4, 2, 1)
    assert memory.overestimate_p50 == pytest.approx((120 / 100 + 120 / 110) / 2 - 1)


def test_the_budget_is_the_newest_runs():
    newer = msgspec.structs.replace(RUN, started_unix_ns=RUN.started_unix_ns + 1, budget_bytes=7)
    assert build_report([], [newer, RUN]).memory.budget_bytes == 7


def test_shares_of_the_stages_sum_to_one():
    row = record(
        "a", queue_ns=25 * MS, prepare_ns=10 * MS, prepare_exposed_ns=5 * MS, quet_ns=30 * MS,
        run_ns=50 * MS, suspended_ns=5 * MS, answer_ns=10 * MS, latency_ns=100 * MS,
    )  # fmt: skip
    overhead = build_report([row], [RUN]).overhead
    assert overhead == pytest.approx(
        {
            "queue": 0.25, "prepare_exposed": 0.05, "run": 0.5, "handover": 0.05, "suspended": 0.05,
            "answer": 0.1, "prepare_hidden": 0.05, "prepare_hidden_share": 0.5,
        }
    )  # fmt: skip


def test_the_worst_come_first_with_their_group_mates():
    rows = [
        record("mate", group_id=5),
        late("bad", group_id=5),
        late("worse", latency_ns=80 * MS, cause="overload"),
        late("alone", group_id=9, latency_ns=41 * MS),
    ]
    worst = build_report(rows, [RUN]).worst
    assert [violation.request_uid for violation in worst] == ["worse", "alone", "bad"]
    assert worst[2].group_mates == ["mate"]
    assert worst[1].group_mates == []
    assert sum(worst[0].stages_ms.values()) == pytest.approx(worst[0].latency_ms)
    assert worst[0].latency_over_qt == pytest.approx(4.0)


def test_groups_of_different_runs_are_not_mates(tmp_path):
    for uid in ("first", "second"):
        store = RecordStore(tmp_path / "r.db", RUN)
        store.insert(late(uid, group_id=1))
        store.close()
    worst = load_report(tmp_path / "r.db").worst
    assert [violation.group_mates for violation in worst] == [[], []]


def test_a_database_gives_the_same_report_as_its_records(tmp_path):
    rows = traffic(300)
    store = RecordStore(tmp_path / "r.db", RUN)
    for row in rows:
        store.insert(row)
    store.close()
    ordered = sorted(rows, key=lambda row: row.arrived_unix_ns)
    assert load_report(tmp_path / "r.db") == build_report(ordered, [RUN])
    assert read_database(tmp_path / "r.db")[0]["arrived_unix_ns"][0] >= START_UNIX_NS


def test_wilson_interval_of_known_cases():
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson_interval(10, 10)[1] == 1.0
