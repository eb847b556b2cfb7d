"""Every bench runs with its quick profile, and its result has the envelope."""

import json
import subprocess
import sys

import pytest

from bench.kit.result import ROOT
from bench.kit.script import Script, Table
from bench.kit.waiting import PATIENCE_S
from bench.registry import entries

#: Drawings have no profiles; the others need what a test machine lacks, or have tests of their own.
QUICK = [
    entry.script
    for entry in entries()
    if not entry.apart and entry.results and entry.script != "live.soak"
]


@pytest.mark.slow
@pytest.mark.parametrize("script", QUICK)
def test_a_quick_run_writes_a_result(script, tmp_path):
    module, *question = script.split()
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", f"bench.{module}", *question, "--quick", "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["command"].startswith(f"python -m bench.{module}")
    assert {"commit", "date", "machine", "load_average"} <= found.keys()


SCRIPT = Script(
    "made_up",
    full={"count": 7, "share": 0.5, "names": ("a", "b"), "against": None, "fresh": False},
    quick={"count": 1},
)


def test_options_come_from_the_profile_and_the_command_line():
    options = SCRIPT.parse("", ["--names", "x,y", "--fresh"])
    assert (options.count, options.share, options.names) == (7, 0.5, ("x", "y"))
    assert options.fresh is True
    assert options.against is None
    assert SCRIPT.parse("", ["--quick"]).count == 1
    assert SCRIPT.parse("", ["--quick", "--count", "3"]).count == 3


def test_a_quick_run_keeps_no_result_unless_told_where(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bench.kit.script.RESULTS", tmp_path)
    script = Script("made_up", tables=[Table("Rows", "rows", {"n": "{n}", "gone": "{no[x]:.1f}"})])
    monkeypatch.setattr("sys.argv", ["made_up", "--quick"])
    script.main(lambda _: {"rows": [{"n": 41}]}, "")
    assert "41" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("sys.argv", ["made_up"])
    script.main(lambda _: {"rows": [{"n": 1}]}, "")
    assert json.loads((tmp_path / "made_up.json").read_text())["rows"] == [{"n": 1}]
