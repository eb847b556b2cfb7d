"""A short run of the soak: its checks are the test."""

import json
import subprocess
import sys

import pytest

from bench.kit.servers import ROOT
from bench.kit.waiting import PATIENCE_S


@pytest.mark.slow
def test_a_soak_leaves_nothing_behind(tmp_path):
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "bench.live.soak", "--out", str(out)]
    # A load that a machine can carry unless it is very busy; then some are refused, and told so.
    options = ["--requests", "300", "--rho", "0.4", "--calibration", "1"]
    done = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert 0 < found["load"]["answered"] <= 300
    assert len(found["checks"]) >= 10
    assert all(check["passed"] for check in found["checks"])
