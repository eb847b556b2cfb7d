"""Reports made in a process of their own, at a lower priority than the lanes.

``python -m serve.obs.offline DATABASE html|json [SINCE_S]`` writes a report to standard output. In
the server's own process, a report over many rows would hold the interpreter lock for most of a
second, against the threads that answer requests, and make some answers late.
"""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import Literal

from serve.errors import DeadlineExceeded, NotReady
from serve.obs.cli_report import run_report

_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1
#: Makes one report at a time: a second caller waits instead of taking another core.
_one_report = Lock()


def make_report(database: Path, form: Literal["html", "json"], since_s: float) -> bytes:
    """Make the report as a page or as JSON, in a process of its own.

    Args:
        database: Database of a server.
        form: Format of the report.
        since_s: Only requests that arrived in the last so many seconds; 0 for all.

    Raises:
        DeadlineExceeded: It took too long.
        NotReady: It failed; the message is the reason.
    """
    command = [sys.executable, "-P", "-m", "serve.obs.offline", str(database), form, str(since_s)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with _one_report:
        try:
            made = subprocess.run(
                command,
                capture_output=True,
                check=False,
                timeout=_TIMEOUT_S,
                env=os.environ | {"PYTHONPATH": path},
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded("the report took too long; ask for less: ?since=10m") from error
    if made.returncode != 0:
        raise NotReady(made.stderr.decode().strip())
    return made.stdout


def main(arguments: list[str]) -> int:
    """Write the report; returns the exit code."""
    # The kernel ends this process with the thread that started it, and so with the server.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    database, form = Path(arguments[0]), arguments[1]
    since_s = float(arguments[2]) if len(arguments) > 2 else None
    os.nice(10)
    if form == "json":
        return run_report(database, since_s, as_json=True)
    return run_report(database, since_s, html=Path("-"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
