"""A server seen from outside: its ports, its database, its processes and their processor time."""

import os
import re
import sqlite3
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.kit.servers import ServerProcess
from bench.kit.waiting import PATIENCE_S, wait_for

__all__ = [
    "PATIENCE_S", "database_rows", "descendants", "handovers", "http_get", "is_running", "metric",
    "processor_ns", "row", "rows", "shared_memory_names", "wait_for",
]  # fmt: skip


def http_get(server: ServerProcess, path: str) -> tuple[int, str]:
    """Return status and body; status 0 while nobody listens."""
    try:
        url = f"http://127.0.0.1:{server.http_port}{path}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:  # also when it stops listening just then
        return 0, ""


def metric(server: ServerProcess, name: str) -> float:
    """Return the current value of a metric without labels."""
    _, text = http_get(server, "/metrics")
    found = re.search(rf"^{name} (\S+)$", text, re.M)
    assert found, f"{name} is not in\n{text}"
    return float(found[1])


def rows(server: ServerProcess, where: str = "", *values: object) -> list[dict[str, Any]]:
    """Return rows of the server's report; see ``database_rows``."""
    return database_rows(server.database, where, *values)


def database_rows(database: Path, where: str = "", *values: object) -> list[dict[str, Any]]:
    """Return rows of a report's database in order of arrival; they appear within a second."""
    uri = f"file:{database}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=PATIENCE_S)) as db:
        db.row_factory = sqlite3.Row
        query = f"SELECT * FROM request {where and 'WHERE ' + where} ORDER BY row_id"
        found: list[dict[str, Any]] = [dict(row) for row in db.execute(query, values)]
        return found


def row(server: ServerProcess, where: str, *values: object) -> dict[str, Any]:
    """Return the one row that fits, once it is there."""
    found: list[dict[str, Any]] = wait_for(
        lambda: rows(server, where, *values), f"a row with {where} {values}"
    )
    assert len(found) == 1
    return found[0]


def descendants(pid: int) -> dict[int, str]:
    """Return the command lines of all processes below `pid`, by process id."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue  # it has just ended
        parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    below: set[int] = set()
    grown = {pid}
    while grown:
        below |= grown
        grown = {child for child, parent in parents.items() if parent in below} - below
    return {child: _command(child) for child in below - {pid}}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Return True when the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def shared_memory_names() -> set[str]:
    """Return the names of shared memory on this machine."""
    folder = Path("/dev/shm")
    return set(os.listdir(folder)) if folder.is_dir() else set()


def processor_ns(pid: int) -> int:
    """Return the time that the threads of the process have had on processors."""
    return sum(int(text.split()[0]) for text in _of_threads(pid, "schedstat"))


def handovers(pid: int) -> int:
    """Return how often threads of the process gave up their core to wait."""
    waits = (
        text.rpartition("\nvoluntary_ctxt_switches:")[2] for text in _of_threads(pid, "status")
    )
    return sum(int(text.split()[0]) for text in waits)


def _of_threads(pid: int, name: str) -> list[str]:
    """Return that file of every thread."""
    texts = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            texts.append((thread / name).read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return texts
