"""Measure what a start of a server takes whose models are calibrated: time, processor time, memory.

    python -m bench.host.warm_start [--quick] [--repeats 7]

The server has the four demo models and starts as a user starts it. Time counts until it prints
`ready`, and until it has answered a first request. Processor time is that of all its processes
until then, also of those that have ended; memory is their proportional set size, which counts
shared pages once. Asked of four models: 5 s, 5 s of processor time, 500 MiB.
"""

import argparse
import os
import re
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.kit.processes import descendants
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from serve.client import Client

MODELS = ("gcn", "sage", "gin", "gat")
_FEATURES = 32
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
SCRIPT = Script(
    "warm_start",
    full={"repeats": 7},
    quick={"repeats": 1},
    tables=[
        Table("A warm start of four models", "measures", {
            "measure": "{measure}", "median": "{median:.2f}", "most": "{most:.2f}",
            "asked": "{asked:g}",
        })
    ],
)  # fmt: skip


def processor_s(pid: int) -> float:
    """Return the processor time of a process, those below it, and those of them that ended."""
    ticks = 0
    for one in (pid, *descendants(pid)):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            stat = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            # User and system time, and those of children that were waited for.
            ticks += sum(map(int, stat[11:15]))
    return ticks / _TICKS_A_SECOND


def shared_out_bytes(pid: int) -> int:
    """Return the proportional set size of a process and those below it."""
    found = 0
    for one in (pid, *descendants(pid)):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            text = Path(f"/proc/{one}/smaps_rollup").read_text()
            found += sum(int(size) for size in re.findall(r"^Pss:\s+(\d+) kB", text, re.M)) * 1024
    return found


def started(server: ServerProcess) -> dict[str, float]:
    """Start a server and stop it; return what each measure found."""
    begun = time.monotonic()
    with server.starting():
        server.wait_ready()
        ready_s, used_s = time.monotonic() - begun, processor_s(server.pid)
        with Client(server.target) as client:
            x = np.zeros((3, _FEATURES), np.float32)
            client.infer(MODELS[0], x=x, edge_index=np.array([[0, 1], [1, 2]]))
            answered_s = time.monotonic() - begun
        memory = shared_out_bytes(server.pid)
    return {
        "ready, s": ready_s,
        "first answer, s": answered_s,
        "processor time until ready, s": used_s,
        "memory, MiB": memory / 2**20,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each measure."""
    asked = {
        "ready, s": 5.0,
        "first answer, s": 5.0,
        "processor time until ready, s": 5.0,
        "memory, MiB": 500.0,
    }
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder), sections={"models": {"load": list(MODELS)}})
        with server:
            pass  # calibrates what is not, and has the files read
        found = [started(server) for _ in range(options.repeats)]
    rows = [
        {
            "measure": name,
            "median": median(one[name] for one in found),
            "most": max(one[name] for one in found),
            "asked": aim,
        }
        for name, aim in asked.items()
    ]
    return {"models": list(MODELS), "measures": rows}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
