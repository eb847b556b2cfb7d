"""Options, profiles and results of scripts; `make test-benches` runs the quick profile of all."""

import json
import subprocess
import sys

import pytest

from bench.kit.result import ROOT
from bench.kit.script import Script, Table
from bench.kit.waiting import PATIENCE_S

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


@pytest.mark.slow
def test_quick_runs_are_told_apart(tmp_path):
    """One passes, one ends badly, one writes no envelope, one writes nothing."""
    package = tmp_path / "bench"
    package.mkdir()
    for name, body in {
        "fine": "from bench.kit.script import Script\nScript('fine').main(lambda _: {}, '')",
        "bad": "import sys\nprint('what went wrong')\nsys.exit(3)",
        "bare": "import sys\nopen(sys.argv[-1], 'w').write('{}')",
        "silent": "",
    }.items():
        (package / f"{name}.py").write_text(body)
    run = f"""
import bench, sys
bench.__path__.append({str(package)!r})
from bench.__main__ import run_quick
from bench.registry import Entry
print(run_quick([Entry("", name, "x.md") for name in ("fine", "bad", "bare", "silent")]))
"""
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True,
        timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    said = done.stdout
    assert said.splitlines()[-1] == "3"
    ends = {
        line.split()[3]: line.split(maxsplit=3)[0] for line in said.splitlines() if " s  " in line
    }
    assert ends == {"fine": "ok", "bad": "FAILED", "bare": "FAILED", "silent": "FAILED"}
    assert "bad  exit code 3" in said
    assert "what went wrong" in said
    assert "no commit in the result" in said
    assert "silent  it wrote no result" in said
