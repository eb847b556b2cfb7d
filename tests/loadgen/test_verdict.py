"""What a run is judged by: conditions, the highest rate in time, and rows about requests."""

import csv
import json
import subprocess

import msgspec
import pytest

from bench.kit.waiting import PATIENCE_S
from loadgen.measure import Sample, summarise
from loadgen.rows import write_rows
from loadgen.verdict import Condition, find_limit
from serve.errors import ConfigError
from serve.workload import TraceHeader
from tests.loadgen.conftest import ROOT, command_of

HEADER = TraceHeader(workload="gcn", seed=0, rate_hz=1.0)


def summary(late=0, failed=0, count=100, scheduled=100):
    samples = [
        Sample(
            model="gcn", due_ns=1, lag_ns=0, latency_ns=3_000_000 if one < late else 1_000_000,
            status="UNAVAILABLE" if one >= count - failed else "OK", target_us=2_000,
            late_by_server=one < late // 2,
        )
        for one in range(count)
    ]  # fmt: skip
    return summarise("h:1", HEADER, samples, scheduled=scheduled, elapsed_s=1.0, cpu_s=0.1)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("late>1%", True), ("late > 2 %", True), ("late>2.5%", False),
        ("late-by-server>0.9%", True), ("late-by-server>1.1%", False),
        ("late_share > 2%", True), ("late-share>3%", False),
        ("p50>0.9ms", True), ("p50 > 1ms", False), ("max>2.9ms", True), ("p99.9/target>1", True),
        ("p50/target>0.5", False), ("p50/target>0.4", True),
        ("failed>1.9%", True), ("failed>2%", False), ("missed>3.9%", True), ("missed>4%", False),
    ],
)  # fmt: skip
def test_a_condition_holds_above_its_limit(text, holds):
    seen = summary(late=2, failed=2)
    # Two of 98 answers are late at the client, and one by the server's clock.
    assert Condition.parse(text).holds(seen) is holds


@pytest.mark.parametrize(
    "text",
    [
        "late",
        "late>1",
        "slow>1%",
        "late<1%",
        "late>101%",
        "",
        "p99>5%",
        "p42>1ms",
        "p99/goal>1",
        "late/target>1",
    ],
)
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(ConfigError, match="is not FIGURE>PERCENT%"):
        Condition.parse(text)


@pytest.mark.parametrize("edge_hz", [3.0, 37.0, 100.0, 941.0])
def test_the_limit_is_found_to_five_percent(edge_hz):
    tried = []

    def run(rate_hz):
        tried.append(rate_hz)
        return summary(late=5 if rate_hz > edge_hz else 0)

    found = find_limit(run, 100.0, [Condition("missed", 0.01)])
    assert found.rate_hz <= edge_hz < found.rate_hz * 1.05
    assert found.failed_hz > edge_hz
    assert found.sure
    # One run shows a failure; four show that a share of none is below one percent.
    passed = [step for step in found.steps if step.passed]
    assert {step.runs for step in passed} == {4}
    assert len(tried) == 4 * len(passed) + len(found.steps) - len(passed)
    assert len(found.steps) < 14


def test_a_search_ends_where_nothing_passes_or_everything():
    nothing = find_limit(lambda rate_hz: summary(failed=100), 8.0, [])
    assert (nothing.rate_hz, nothing.steps[-1].rate_hz) == (0.0, 8 / 64)
    everything = find_limit(lambda rate_hz: summary(), 8.0, [])
    assert everything.rate_hz == everything.steps[-1].rate_hz == 8 * 64


def test_what_stays_open_is_decided_by_the_mean_and_told():
    counts = [1, 2, 0, 2, 1, 0, 1, 1]

    def run(_):
        return summary(late=counts.pop(0)) if counts else summary(scheduled=200)

    found = find_limit(run, 8.0, [Condition("late", 0.01)])
    assert not counts
    assert [(step.passed, step.sure) for step in found.steps] == [(False, False), (True, False)]
    assert not found.sure


def test_a_search_that_is_stopped_keeps_what_it_knows():
    runs = [*[summary()] * 4, summary(scheduled=200)]
    found = find_limit(lambda rate_hz: runs.pop(0), 8.0, [Condition("late", 0.01)])
    assert (found.rate_hz, len(found.steps)) == (8.0, 1)


def run(command):
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_a_run_with_conditions_and_rows(fake_server, sender, tmp_path):
    path = tmp_path / "rows.csv"
    with fake_server(fail_every=4) as server:
        arguments = ["--rate", 200, "--requests", 20, "--csv", path]
        done = run(command_of(server, sender, *arguments, "--fail-if", "failed>20%"))
    assert done.returncode == 3
    assert "failed: 25.00%, more than 20%" in done.stderr
    seen = json.loads(done.stdout)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["request"]) for row in rows] == list(range(20))
    assert sum(row["status"] == "OK" for row in rows) == seen["answered"] == 15
    refused = next(row for row in rows if row["status"] != "OK")
    assert refused["message"].startswith("queue full")
    assert all(float(row["latency_ms"]) > 0 for row in rows)


def test_rows_have_no_formulas_of_servers(tmp_path):
    sample = Sample(
        model="=1+1",
        due_ns=0,
        lag_ns=-1_000_000,
        latency_ns=1,
        status="INTERNAL",
        message="@SUM(A1)",
    )
    write_rows(tmp_path / "rows.csv", [sample])
    with (tmp_path / "rows.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["model"], row["message"], row["lag_ms"]) == ("'=1+1", "'@SUM(A1)", "-1.000")


def test_the_limit_of_a_server_that_refuses_every_fourth(fake_server, sender):
    with fake_server(fail_every=4) as server:
        search = ["--find-limit", "--rate", 1000, "--requests", 8]
        failed = run(command_of(server, sender, *search, "--fail-if", "failed>1%"))
        wrong = run(command_of(server, sender, "--find-limit", "--rho", 1, "--requests", 8))
    assert failed.returncode == 1
    found = msgspec.json.decode(failed.stdout)
    assert found["rate_hz"] == 0
    assert [(step["rate_hz"], step["runs"]) for step in found["steps"][:2]] == [(1000, 1), (500, 1)]
    assert "1000/s failed: late" in failed.stderr
    assert wrong.returncode == 2
    assert "--find-limit begins with --rate" in wrong.stderr
