"""A server seen from outside: its ports, its report, its processes."""

import http.client
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from bench.kit.processes import database_rows, descendants
from bench.kit.servers import ServerProcess
from bench.kit.waiting import PATIENCE_S, wait_for

__all__ = [
    "PATIENCE_S", "descendants", "http_get", "is_running", "metric", "row", "rows",
    "shared_memory_names", "wait_for",
]  # fmt: skip


def http_get(server: ServerProcess, path: str) -> tuple[int, str]:
    """Return status and body; status 0 while nobody listens."""
    try:
        url = f"http://127.0.0.1:{server.http_port}{path}"
        try:
            answer = urllib.request.urlopen(url, timeout=PATIENCE_S)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException):  # also when it ends just then
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


def row(server: ServerProcess, where: str, *values: object) -> dict[str, Any]:
    """Return the one row that fits, once it is there."""
    found: list[dict[str, Any]] = wait_for(
        lambda: rows(server, where, *values), f"a row with {where} {values}"
    )
    assert len(found) == 1
    return found[0]


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
