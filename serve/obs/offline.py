"""Reports made in a process of their own, at a lower priority than the lanes.

``python -m serve.obs.offline DATABASE FORM [SELECTION]`` writes a report to standard output, as
html, json or csv, over the requests of a `Selection` in JSON. In
the server's own process, a report over many rows would hold the interpreter lock for most of a
second, against the threads that answer requests, and make some answers late.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Literal

import msgspec

from serve.errors import ConfigError, DeadlineExceeded, NotReady
from serve.obs.selection import Selection

Form = Literal["html", "json", "csv"]
_Key = tuple[Path, Form, Selection]

#: Size of a database from which on reports are kept, about 200,000 rows, and for how long.
LARGE_BYTES = 32 * 2**20
KEPT_S = 60.0
#: Most reports that are kept, and the size of the largest.
_MOST_KEPT = 16
_KEPT_BYTES = 2 * 2**20
#: Most rows of CSV over HTTP, about 20 MB, which the server has in memory while it sends them.
MOST_CSV_ROWS = 50_000
_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1
#: Makes one report at a time: a second caller waits instead of taking another core.
_one_report = Lock()


def make_report(database: Path, form: Form, chosen: Selection | None = None) -> bytes:
    """Make the report as a page, as JSON or as rows in CSV, in a process of its own.

    A report of a large database is made at most once a minute: whoever asks for the same again gets
    the same, so that asking often costs little.

    Args:
        database: Database of a server.
        form: Format of the report.
        chosen: Only these requests; None for all.

    Raises:
        DeadlineExceeded: It took too long.
        NotReady: It failed; the message is the reason.
    """
    chosen = chosen or Selection()
    with _one_report:
        return _recent.get((database, form, chosen), lambda: _made(database, form, chosen))


def is_large(database: Path) -> bool:
    """Return True when the database is so large that its reports are kept for a minute."""
    try:
        return database.stat().st_size >= LARGE_BYTES
    except OSError:
        return False


class _Recent:
    """The last reports of large databases; for use under a lock."""

    def __init__(self) -> None:
        self._kept: dict[_Key, tuple[float, bytes]] = {}

    def get(self, key: _Key, make: Callable[[], bytes]) -> bytes:
        """Return a report that is less than a minute old, or a new one."""
        now_s = time.monotonic()
        self._kept = {k: held for k, held in self._kept.items() if now_s - held[0] < KEPT_S}
        if key in self._kept:
            return self._kept[key][1]
        made = make()
        if is_large(key[0]) and len(made) <= _KEPT_BYTES:
            if len(self._kept) >= _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = (time.monotonic(), made)
        return made


_recent = _Recent()


def _made(database: Path, form: Form, chosen: Selection) -> bytes:
    command = [sys.executable, "-P", "-m", "serve.obs.offline", str(database), form]
    command.append(msgspec.json.encode(chosen).decode())
    path = os.pathsep.join(entry for entry in sys.path if entry)
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
    chosen = msgspec.json.decode(arguments[2] if len(arguments) > 2 else "{}", type=Selection)
    os.nice(10)
    # The server's process imports this module, and makes no report itself.
    from serve.obs.cli_report import run_report, write_csv

    try:
        if form == "json":
            run_report(database, chosen=chosen, as_json=True)
        elif form == "html":
            run_report(database, chosen=chosen, html=Path("-"))
        else:
            write_csv({"": database}, chosen, Path("-"), MOST_CSV_ROWS)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
