"""``python -m serve.obs.offline DATABASE html|json [SINCE_S]``: the report on standard output.

A server makes its reports in such a process, below the lanes' priority: made in its own, one over
many rows would compete for the interpreter lock with the threads that answer requests, for most
of a second, and make some of them late.
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
#: One report at a time: the second asker waits instead of taking another core.
_one_report = Lock()


def make_report(database: Path, form: Literal["html", "json"], since_s: float) -> bytes:
    """The report as a page or as JSON, made in a process of its own; `since_s` 0: all rows.

    Raises DeadlineExceeded when it takes too long, NotReady with the reason when it fails.
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
    """Exit code of the report."""
    # Nobody waits for it once the thread that started it, and so the server, has ended.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    database, form = Path(arguments[0]), arguments[1]
    since_s = float(arguments[2]) if len(arguments) > 2 else None
    os.nice(10)
    if form == "json":
        return run_report(database, since_s, as_json=True)
    return run_report(database, since_s, html=Path("-"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
