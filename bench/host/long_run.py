"""Measure whether files and memory of a server stay flat while it serves for an hour.

    python -m bench.host.long_run [--quick] [--minutes N] [--rate N] [--keep-s N]

A server gets the same small request of the demo's GCN at equal distances, `rate` a second, and
deletes rows of its report after `keep_s`. Every ten seconds the bench looks at the size of the
database, and at the proportional set size of the main process and of all processes. Once rows have
been deleted for a while all should stay within 10 % of their middle, and no row may be lost. Of
each minute the least size counts, as the main process keeps freed memory for up to 20 s.
"""

import argparse
import re
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from bench.host.operating import FEATURES, LIMIT_S
from bench.host.warm_start import processor_s
from bench.kit.processes import descendants, shared_out_bytes
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from loadgen.native import NativeSender
from serve.wire.messages import encode_request

#: What is asked of sizes, as a share of their middle.
AIM = 0.1
_NODES = 100
_LOOK_S = 10.0
#: Looks in a minute.
_LOOKS = 6
_MEASURES = {
    "database_mib": "database and its log, MiB",
    "main_mib": "main process, MiB",
    "all_mib": "all processes, MiB",
}
SCRIPT = Script(
    "long_run",
    full={"minutes": 60.0, "rate": 500, "keep_s": 600.0},
    quick={"minutes": 0.1, "rate": 50, "keep_s": 2.0},
    tables=[
        Table("Sizes since rows are deleted", "measures", {
            "measure": "{measure}", "least": "{least:.2f}", "most": "{most:.2f}",
            "from the middle": "{spread:.1%}",
        })
    ],
)  # fmt: skip


def look(server: ServerProcess, begun_s: float, requests: int) -> dict[str, Any]:
    """Return what there is now."""
    return {
        "minutes": round((time.monotonic() - begun_s) / 60, 2),
        "requests": requests,
        "database_mib": database_bytes(server.database) / 2**20,
        "main_mib": shared_out_bytes(server.pid) / 2**20,
        "all_mib": sum(map(shared_out_bytes, (server.pid, *descendants(server.pid)))) / 2**20,
    }


def database_bytes(database: Path) -> int:
    """Return the size of a database and of its write-ahead log."""
    log = database.with_name(f"{database.name}-wal")
    return database.stat().st_size + (log.stat().st_size if log.exists() else 0)


def rows_lost(server: ServerProcess) -> int:
    """Return how many rows the server's database could not take."""
    url = f"http://127.0.0.1:{server.http_port}/metrics"
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    found = re.search(r"^gnnserve_report_rows_dropped_total (\S+)$", text, re.M)
    assert found is not None
    return int(float(found[1]))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all looks, and the extremes of those since rows were deleted for a while."""
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "x": np.zeros((_NODES, FEATURES), np.float32),
        "edge_index": np.zeros((2, 10 * _NODES), np.int64),
    }
    message = encode_request("gcn", tensors)
    end_s = 60 * options.minutes
    portion = round(options.rate * min(_LOOK_S, end_s / 4))
    offsets_ns = [round(number / options.rate * 1e9) for number in range(portion)]
    with tempfile.TemporaryDirectory() as folder:
        sections: dict[str, dict[str, object]] = {
            "models": {"load": ["gcn"]},
            "report": {"keep": f"{options.keep_s:g}s"},
        }
        with ServerProcess(Path(folder), sections=sections, usual_calibrations=True) as server:
            sender = NativeSender(server.target, LIMIT_S)
            failed, requests, begun_s = 0, 0, time.monotonic()
            looks, used_s = [look(server, begun_s, requests)], processor_s(server.pid)
            while time.monotonic() - begun_s < end_s:
                sender.send_at([message] * portion, offsets_ns)
                failed += sum(one.reply.status != "OK" for one in sender.take())
                requests += portion
                looks.append(look(server, begun_s, requests))
            lost, used_s = rows_lost(server), processor_s(server.pid) - used_s
            lasted_s = time.monotonic() - begun_s
    settled = [one for one in looks if 60 * one["minutes"] >= 1.5 * options.keep_s] or looks[-1:]
    return {
        "rate_hz": options.rate,
        "keep_s": options.keep_s,
        "lasted_s": round(lasted_s, 1),
        # Of the server, without the client.
        "cores_used": round(used_s / lasted_s, 3),
        "requests": requests,
        "failed": failed,
        "rows_lost": lost,
        "aim": AIM,
        "measures": [
            extremes(told, least_of_minutes(settled, name)) for name, told in _MEASURES.items()
        ],
        "looks": looks,
    }


def least_of_minutes(looks: list[dict[str, Any]], name: str) -> list[float]:
    """Return the least of a size in each whole minute, or in what there is of the only one."""
    minutes = [looks[at : at + _LOOKS] for at in range(0, len(looks), _LOOKS)]
    whole = [minute for minute in minutes if len(minute) == _LOOKS] or minutes
    return [min(one[name] for one in minute) for minute in whole]


def extremes(measure: str, sizes: list[float]) -> dict[str, Any]:
    """Return least and most, and how far these are from their middle, as a share of it."""
    least, most = min(sizes), max(sizes)
    spread = (most - least) / (most + least)
    return {"measure": measure, "least": least, "most": most, "spread": spread}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
