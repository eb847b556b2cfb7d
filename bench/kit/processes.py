"""Processes of a server seen from outside: its database, what runs below it, processor time."""

import os
import re
import signal
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.kit.waiting import PATIENCE_S


def database_rows(database: Path, where: str = "", *values: object) -> list[dict[str, Any]]:
    """Return rows of a report's database in order of arrival; they appear within a second."""
    uri = f"file:{database}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=PATIENCE_S)) as db:
        db.row_factory = sqlite3.Row
        query = f"SELECT * FROM request {where and 'WHERE ' + where} ORDER BY row_id"
        found: list[dict[str, Any]] = [dict(row) for row in db.execute(query, values)]
        return found


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


@contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """Have these processes, and all below them, stand still while open.

    A server that waits still wakes up now and then, and lanes in the kernel's idle class wait
    for any program of their session.
    """
    all_pids = [one for pid in pids for one in (pid, *descendants(pid))]
    for pid in all_pids:
        _signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in all_pids:
            _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def processor_ns(pid: int) -> int:
    """Return the time that the threads of the process have had on processors."""
    return _over_threads(pid, "schedstat", lambda text: text.split()[0])


def waited_ns(pid: int) -> int:
    """Return how long the threads of the process were ready to run and had no processor."""
    return _over_threads(pid, "schedstat", lambda text: text.split()[1])


def handovers(pid: int) -> int:
    """Return how often threads of the process gave up their core to wait."""
    mark = "\nvoluntary_ctxt_switches:"
    return _over_threads(pid, "status", lambda text: text.rpartition(mark)[2].split()[0])


def shared_out_bytes(pid: int) -> int:
    """Return the memory of a process, shared pages divided by who maps them; 0 when it ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return sum(int(size) for size in re.findall(r"^Pss:\s+(\d+) kB", text, re.M)) * 1024


def _over_threads(pid: int, file: str, find: Callable[[str], str]) -> int:
    """Return the sum of what `find` finds in that file of each thread of the process."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            total += int(find((thread / file).read_text()))
    return total
