"""The demo as a user runs it; none of its processes outlives it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.kit.servers import SHORT_CALIBRATIONS
from bench.kit.waiting import PATIENCE_S, wait_for

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def start_demo(folder):
    command = [sys.executable, "-m", "serve", "demo", "--folder", str(folder), "--duration", "2"]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | SHORT_CALIBRATIONS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells let background jobs, and so these tests, ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def session_of_server(folder):
    """The session that the server leads and its lanes belong to."""
    wanted = str(folder / "gnnserve.toml")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_text().split("\0")
                if wanted in arguments:
                    return os.getsid(int(entry.name))
            except (OSError, ProcessLookupError):
                continue
    raise AssertionError(f"no process serves {wanted}")


def members(session):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    found.append((entry / "cmdline").read_text())
            except (OSError, ProcessLookupError):
                continue
    return found


def test_the_demo_shows_answers_load_and_report(tmp_path):
    folder = tmp_path / "out"
    with start_demo(folder) as process:
        shown, errors = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, errors
    accuracies = [float(found) for found in re.findall(r"│ *([0-9.]+)%.* (?:yes|late) +│", shown)]
    assert len(accuracies) == 4
    assert min(accuracies) > 90
    for word in (
        "an edge to nowhere is refused: INVALID_ARGUMENT",
        "send lag",
        "answered in time",
        f"gnnserve serve --config {folder}/gnnserve.toml",
    ):
        assert word in shown
    assert "<svg" in (folder / "report.html").read_text()
    assert (folder / "gnnserve.db").stat().st_size > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_everything(tmp_path, number):
    with start_demo(tmp_path) as process:
        for line in process.stdout:
            if line.startswith("3."):
                break
        session = session_of_server(tmp_path)
        assert len(members(session)) > 1
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    # Helper processes of Python itself end just after the server, at the end of their pipe.
    wait_for(lambda: not any(members(session)), "the end of all processes")
