"""`make gpu-check` itself: stages are told apart, end in time, and leave the others alone."""

import os

import pytest

from bench.gpu import check
from bench.gpu.aims import AIMS, aim_row
from bench.gpu.check import Stage, attempt, stages
from tests.outside import is_running, wait_for


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "BUILD", tmp_path)


def test_every_bench_is_there_to_be_run():
    for stage in stages():
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


def test_one_stage_can_be_quick_by_itself():
    quick = {stage.name for stage in stages(["gather"]) if "--quick" in stage.command}
    assert quick == {"gather"}
    benches = {stage.name for stage in stages() if "bench.gpu" in stage.command}
    assert {stage.name for stage in stages(["all"]) if "--quick" in stage.command} == benches


def found(stage, state, *aims):
    row = {"state": state}
    return {"stages": {stage: row}, "results": {stage: {"aims": list(aims)}}}


def test_what_several_calls_found_becomes_one_file_and_a_line_for_each_aim(
    tmp_path, monkeypatch, capsys
):
    files = []
    for number, one in enumerate(
        (
            found("gather", "FAILED", aim_row(11, False, 0.5)),
            found("pmc", "ok", aim_row(4, True, 0.01), aim_row(4, False, 0.03)),
            found("gather", "ok", aim_row(11, True, 0.95)),
        )
    ):
        files.append(tmp_path / f"{number}.json")
        check.write(one, files[-1])
    out = tmp_path / "all.json"
    monkeypatch.setattr("sys.argv", ["check", "--out", str(out), "--merge", *map(str, files)])
    assert check.main() == 0
    merged = check.json.loads(out.read_text())
    assert {name: row["state"] for name, row in merged["stages"].items()} == {
        "gather": "ok",
        "pmc": "ok",
    }
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("AIM")]
    assert len(lines) == len(AIMS)
    by_number = dict(zip(AIMS, lines, strict=True))
    assert by_number[11].startswith("AIM 11 PASS [0.95]: features gathered in place")
    assert by_number[4].startswith("AIM  4 MISS 1 of 2 [0.03]: PMC within")
    assert by_number[1].startswith("AIM  1 not measured: answers")


def test_a_result_that_was_cut_off_is_left_out(tmp_path):
    (tmp_path / "good.json").write_text('{"checks": []}')
    (tmp_path / "cut.json").write_text('{"checks": [')
    assert set(check.read(tmp_path)) == {"good"}


def test_the_page_tells_every_aim():
    page = (check.ROOT / "docs" / "cuda.md").read_text()
    for number, what in AIMS.items():
        assert f"| {number} | {what} | `" in page
