"""`make gpu-check` itself: stages are told apart, end in time, and leave the others alone."""

import os

import pytest

from bench.gpu import check
from bench.gpu.check import Stage, attempt, stages
from tests.outside import is_running, wait_for


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "BUILD", tmp_path)
    monkeypatch.setattr(check, "SUMMARY", tmp_path / "summary.json")


def test_every_bench_is_there_to_be_run():
    for stage in stages(quick=False, dry=False):
        for word in stage.command.split():
            if word.startswith("bench.gpu."):
                assert (check.ROOT / (word.replace(".", "/") + ".py")).is_file()


def test_a_stage_that_passes_and_one_that_fails():
    assert attempt(Stage("good", "echo fine", 5), dict(os.environ), 5)["state"] == "ok"
    row = attempt(Stage("bad", "echo 'FAIL this: 1'; exit 3", 5), dict(os.environ), 5)
    assert (row["state"], row["failures"]) == ("FAILED", ["FAIL this: 1"])
    assert row["why"] == "exit code 3; 1 checks failed: FAIL this: 1"


def test_a_stage_that_hangs_is_ended_with_all_it_started(tmp_path):
    told = tmp_path / "pid"
    command = f"sleep 1000 & echo $! > {told}; wait"
    row = attempt(Stage("hangs", command, 1), dict(os.environ), 0.5)
    assert (row["state"], row["why"]) == ("FAILED", "over its time limit")
    pid = int(told.read_text())
    wait_for(lambda: not is_running(pid), "the end of what it started")


def test_the_summary_keeps_what_other_calls_found():
    check.keep({"one": {"state": "ok"}}, dry=False)
    check.keep({"two": {"state": "ok"}}, dry=False)
    assert set(check.json.loads(check.SUMMARY.read_text())) == {"one", "two"}
