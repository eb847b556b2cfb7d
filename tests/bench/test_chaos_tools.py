"""What a chaos run measures and disturbs with: what processes hold, clocks, sums of parts."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.chaos import __main__ as chaos
from bench.chaos import checker, total
from bench.chaos.faults import ENDING, FAULTS
from bench.chaos.outside import held_by
from bench.chaos.record import Record
from bench.chaos.stepped_clock import SteppedClock

#: A server that leaks at each call what it is told to, and answers with a line.
LEAKING = """
import os, sys
kept, what = [], sys.argv[1]
for line in sys.stdin:
    if what == "rss_bytes":
        kept.append(os.urandom(20_000))
    if what == "fds":
        kept.append(os.dup(0))
    print(flush=True)
"""
DAY_S = 86_400


@pytest.mark.parametrize("leak", ["rss_bytes", "fds", "nothing"])
def test_a_process_that_leaks_is_found(tmp_path, leak):
    process = subprocess.Popen(
        [sys.executable, "-c", LEAKING, leak],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process, (tmp_path / "samples.jsonl").open("w") as file:
        for number in range(300):
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()
            one = {
                "at": number,
                "pid": process.pid,
                "calls": 100.0 * number,
                "processes": 1,
                "lanes": {},
                "gateways": {},
            }
            file.write(json.dumps(one | held_by(process.pid)) + "\n")
        process.stdin.close()
    (tmp_path / "faults.jsonl").touch()
    (tmp_path / "end.json").write_text('{"lanes": 0}')
    found = checker.check_growth(Record(tmp_path))
    refused = [one.name for one in found if not one.holds]
    assert refused == ([] if leak == "nothing" else [f"growth of {leak} per 10,000 calls"])


def test_the_wall_clock_of_a_process_is_stepped_and_the_monotonic_one_is_not(tmp_path):
    clock = SteppedClock(tmp_path)
    code = (
        "import sqlite3, sys, threading, time\n"
        "for line in sys.stdin:\n"
        "    began = time.monotonic()\n"
        "    threading.Event().wait(0.01)\n"  # ends by the monotonic clock
        "    at = sqlite3.connect(':memory:').execute(\"SELECT unixepoch('now')\").fetchone()[0]\n"
        "    print(time.time_ns() // 10**9, at, time.monotonic() - began < 3600, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clock.environment,
    )

    def ask():
        process.stdin.write("\n")
        process.stdin.flush()
        wall_s, sql_s, in_time = process.stdout.readline().split()
        assert in_time == "True"
        assert 0 <= int(wall_s) - int(sql_s) < 3600
        return int(wall_s)

    with process:
        first_s = ask()
        for step_s in (DAY_S, -DAY_S, 0):
            clock.step(step_s)
            assert clock.offset_s == step_s
            assert 0 <= ask() - step_s - first_s < 3600
        process.stdin.close()


def part(folder, number, figures, failed=()):
    folder.mkdir()
    findings = [
        {
            "name": name, "wanted": "0", "found": "", "figure": figure, "adds": name != "wait",
            "holds": name not in failed, "judged": True,
        }
        for name, figure in figures.items()
    ]  # fmt: skip
    (folder / "verdict.json").write_text(json.dumps(findings))
    end = {"date": f"2026-01-0{number}", "seed": number, "commit": "abc", "load_average": [1]} | {
        "alone": False
    }
    (folder / "end.json").write_text(json.dumps(end))
    faults = [
        {"name": name, "said": said}
        for name, said in (
            ("resets", ""), ("resets", "skipped: not now"), ("disk full", "skipped: no"),
        )
    ]  # fmt: skip
    (folder / "faults.jsonl").write_text("".join(json.dumps(one) + "\n" for one in faults))
    (folder / "lives.jsonl").write_text('{"how": "killed"}\n{"how": "stopped"}\n')
    return folder


def test_parts_of_several_days_are_added_up_each_once(tmp_path):
    first = part(tmp_path / "a", 1, {"requests": 10, "wait": 3})
    second = part(tmp_path / "b", 2, {"requests": 5, "wait": 7}, failed=["wait"])
    result = total.added({}, [first])
    result = total.added(result, [second, first])
    assert [one["figures"] for one in result["parts"]] == [
        {"requests": 10, "wait": 3}, {"requests": 5, "wait": 7},
    ]  # fmt: skip
    assert [one["failed"] for one in result["parts"]] == [[], ["wait"]]
    assert result["parts"][0]["faults"] == {"resets": 1}
    assert (result["parts"][0]["restarts"], result["parts"][0]["killed"]) == (1, 1)
    assert result["parts"][0]["skipped"] == ["disk full"]
    assert total.sums(result) == [
        {"name": "requests", "wanted": "0", "found": "15", "failed": 0, "judged": 2},
        {"name": "wait", "wanted": "0", "found": "7", "failed": 1, "judged": 2},
    ]


def test_the_folder_of_a_run_may_be_relative(tmp_path, monkeypatch):
    made = []

    def no_world(folder):
        made.append(folder)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chaos, "make_world", no_world)
    with pytest.raises(KeyboardInterrupt):
        chaos.run(Path("part"), argparse.Namespace(), 0)
    assert made == [tmp_path / "part"]


def test_every_second_part_that_is_not_run_yet_has_long_lives(tmp_path, monkeypatch):
    ran = []

    def run(folder, options, seed):
        ran.append((folder.name, options.long_lives))
        return 0

    (tmp_path / "part-0").mkdir()
    (tmp_path / "part-0" / chaos.VERDICT).touch()
    arguments = ["--seconds", "1", "--parts", "4", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["chaos", *arguments])
    monkeypatch.setattr(chaos, "run", run)
    with pytest.raises(SystemExit) as ended:
        chaos.main()
    assert ended.value.code == 0
    assert ran == [("part-1", True), ("part-2", False), ("part-3", True)]


def test_in_long_lives_most_kinds_of_faults_are_left():
    assert FAULTS.keys() > ENDING
    assert len(FAULTS.keys() - ENDING) > len(ENDING)
