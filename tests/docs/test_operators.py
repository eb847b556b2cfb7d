"""docs/operators.md: its commands work and its table of metrics is complete."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.core.types import Expired, Failed, FailReason, Rejected, RejectReason, Withdrawn
from serve.errors import Mismatch, NotPermitted, NotReady, TooBig, UnknownName, Unsupported
from serve.obs.http import HttpPort, listening_socket
from serve.obs.lost_calls import STATUS_BY_REASON
from serve.obs.metrics import Metrics
from serve.obs.report import load_report, report_dict
from serve.obs.scraped import EngineSnapshot, PortSnapshot
from serve.rest.counts import Counts
from serve.server.outcomes import error_of, reason_of, refusal_reason
from tests.docs.pages import PAGES, texts
from tests.obs.builders import RUN, late, record, unanswered
from tests.sim.test_engine import mixed
from tests.sim.test_replay import lines_of

ROOT = Path(__file__).parents[2]
PAGE = PAGES["docs/operators.md"]


def blocks(language, mark=""):
    return texts("docs/operators.md", language, mark)


def example_metrics():
    snapshot = EngineSnapshot(
        pending={("gcn", "1"): 1}, lanes_up=4, lane_restarts=0, memory_bytes=((1, 0),),
        rows_dropped=0, quarantined=("gcn",), executors={("gcn", "1"): "csr"},
        gathered_rows={"cora": (2, 1)}, lane_bytes={0: 1}, running_ns={0: 1},
        settings_restored={"gcn": 1}, training_jobs={"running": 1},
        version_states=(("gcn", "1", "READY"),), version_shares={("gcn", "1"): 100.0},
        canaries_taken_back={("gcn", "2"): 1}, shadow_runs={("gcn", "3", "same"): 1},
    )  # fmt: skip
    metrics = Metrics(RUN, lambda: snapshot)
    port = PortSnapshot(answers=True, refused={"no_thread": 1}, ways={"plain": 1}, rest_restarts=0)
    metrics.show_port(lambda: port)
    for row in (record("a"), late("b"), unanswered("c", "CANCELLED", "cancelled")):
        metrics.observe(row)
    return metrics


def run(script, folder):
    """Run a block as a reader would, in a folder that holds the database."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    gnnserve = commands / "gnnserve"
    gnnserve.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m serve "$@"\n')
    gnnserve.chmod(0o755)
    path = f"{commands}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_commands_on_a_journal_work_and_a_changed_one_is_told(tmp_path):
    (script,) = blocks("sh", "journal")
    lines = lines_of(mixed(0.5, 200, 2, seed=1))
    (tmp_path / "journal.jsonl").write_bytes(b"".join(lines))
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("every command is the same as recorded") == 2
    assert "slack/preemptive" in done.stdout
    assert "bqt/barrier" in done.stdout
    changed = b"".join(lines).replace(
        b'["PrepareTask",{"task_id":7}]', b'["PrepareTask",{"task_id":8}]'
    )
    (tmp_path / "journal.jsonl").write_bytes(changed)
    done = run("gnnserve simulate --journal journal.jsonl", tmp_path)
    assert done.returncode == 1
    assert "the commands differ" in done.stderr


def test_the_check_before_a_start_works(tmp_path):
    configuration, check = blocks("sh", "check")
    (tmp_path / "models").mkdir()
    (tmp_path / "gnnserve.toml").write_text("")
    done = run(configuration, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r'server\.host +"::1" +--set', done.stdout)
    assert (
        "grpc_port"
        in json.loads((tmp_path / "gnnserve.schema.json").read_text())["$defs"]["ServerConfig"][
            "properties"
        ]
    )
    done = run(check, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gnnserve.toml: ok\n"


def test_commands_on_a_database_work(database, tmp_path):
    scripts = blocks("sh", "database")
    assert len(scripts) >= 3
    for script in scripts:
        shutil.copy(database, tmp_path / "gnnserve.db")
        # Fifteen minutes are too few for a database made of a fixed past.
        done = run(script.replace("--since 15m", "--since 9999d"), tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), script
        assert done.stdout
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert len((tmp_path / "requests.csv").read_text().splitlines()) == 2001


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_commands_on_a_server_work(database, tmp_path):
    listener = listening_socket("127.0.0.1", 0)
    http = HttpPort(
        listener, live=lambda: True, ready=lambda: True, database=database,
        metrics=example_metrics().text,
    )  # fmt: skip
    http.start()
    try:
        for script in blocks("sh", "server"):
            assert "localhost:8002" in script
            script = script.replace("localhost:8002", f"127.0.0.1:{listener.getsockname()[1]}")
            done = run(script.replace("curl -s ", "curl -sS --fail "), tmp_path)
            assert done.returncode == 0, done.stderr
            assert done.stdout
    finally:
        http.stop()


def test_the_table_of_metrics_is_what_a_scrape_shows():
    shown = set()
    gateway = Counts()
    gateway.answered(200)
    text = (example_metrics().text() + gateway.text()).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            histogram = family.type == "histogram"
            name = re.sub(r"_(bucket|count|sum)$", "", sample.name) if histogram else sample.name
            shown.add(name)
    table = PAGE[PAGE.index("| metric |") : PAGE.index("```promql")]
    told = set(re.findall(r"`((?:nv|gnnserve|process)_\w+)`", table))
    # Appear with the first run that took more than was reserved, or answered no finite number,
    # or after which a lane was recycled, and where traces are sent or other servers are known.
    assert told - shown == {
        "gnnserve_passed_on_total",
        "gnnserve_rows_requests_total",
        "gnnserve_rows_bytes_total",
        "gnnserve_rows_wait_seconds_total",
        "gnnserve_rows_refused_total",
        "gnnserve_rows_changes",
        "gnnserve_rows_changes_behind",
        "gnnserve_rows_changes_in_step",
        "gnnserve_rows_log_bytes",
        "gnnserve_lanes_recycled_total",
        "gnnserve_memory_underestimates_total",
        "gnnserve_nonfinite_answers_total",
        "gnnserve_traces_total",
    }
    assert shown - told == set()


@pytest.mark.parametrize("page", PAGES)
def test_metrics_that_pages_name_are_in_the_table(page):
    named = set(re.findall(r"\b(?:nv|gnnserve)_[a-z]+_[a-z_]+\b", PAGES[page]))
    named = {re.sub(r"_seconds_(bucket|count|sum)$", "_seconds", name) for name in named}
    assert [name for name in named if f"`{name}`" not in PAGE] == []


def test_reasons_have_the_status_that_clients_get():
    outcomes = [
        # No client hears of tasks of best effort.
        *(Rejected(reason, "") for reason in RejectReason if reason is not RejectReason.BUSY),
        *(Failed(reason, "") for reason in FailReason if reason is not FailReason.STOPPED),
        Expired("queued"),
        Withdrawn("queued"),
    ]
    statuses = {reason_of(one): error_of(one).code.status for one in outcomes}
    for kind in (NotReady, UnknownName, Mismatch, NotPermitted, Unsupported, TooBig):
        statuses[refusal_reason(kind(""))] = kind.code.status
    statuses |= STATUS_BY_REASON | {"unread": "CANCELLED, DEADLINE_EXCEEDED"}
    table = PAGE[PAGE.index("| reason | meaning |") :].split("\n\n")[0]
    told = dict(re.findall(r"^\| `(\w+)` \|.*\| ([A-Z_, ]+) \|$", table, re.M))
    assert told == statuses


def test_the_json_names_told_exist(database):
    report = report_dict(load_report(database))
    assert {"attainment_interval", "expired_late", "rejected"} <= set(report)
    assert {"underestimates", "estimate_exceeded"} <= set(report["memory"])
