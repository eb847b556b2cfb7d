"""Send the same requests with the memory checks and without, on a device too small for them.

    python -m bench.live.memory_safety [--quick] [--requests 40]

A device of 768 MiB, four lanes, and GraphSAGE requests (`eager`) that need 25 to 85 % of it each,
all sent within a second: together many times what there is. A real server serves them twice:
`checked`, with the device's size as its budget, and `mps_aggr`, as under plain MPS sharing, told of
far more memory than there is. When the lanes' memory together passes the device, the largest of
them is killed, as the kernel's out-of-memory killer does with a container; the bench stands in for
it and looks every two milliseconds. Memory is the private resident memory of the lanes beyond what
they had before the trace.
"""

import argparse
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.kit.processes import descendants
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from serve.client import Client, ClientError

DEVICE_BYTES = 768 << 20
BUDGETS = {"checked": DEVICE_BYTES, "mps_aggr": 64 << 30}
SHARES = (0.25, 0.85)
MODEL, FEATURES, EDGES_PER_NODE = "sage", 32, 12
SCRIPT = Script(
    "memory_safety",
    full={"requests": 40},
    quick={"requests": 2},
    tables=[
        Table("Requests that need more than the device has", "rows", {
            "mode": "{mode}", "needed ÷ device": "{needed_share:.1f}",
            "peak ÷ device": "{peak_share:.2f}", "ended": "{ended}",
            "lanes killed": "{killed_lanes}", "took, s": "{took_s:.1f}",
        })
    ],
)  # fmt: skip


class DeviceMemory:
    """Watches the memory of the lanes; kills the largest when together they pass the device."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.peak_bytes = self.kills = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "DeviceMemory":
        self._base = max(_private_bytes(pid) for pid in self._lanes())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _lanes(self) -> set[int]:
        """Return the children of the fork server."""
        return {lane for child in descendants(self._server.pid) for lane in descendants(child)}

    def _watch(self) -> None:
        lanes, looked = self._lanes(), time.monotonic()
        while not self._stop.wait(0.002):
            if time.monotonic() - looked > 0.5:
                lanes, looked = self._lanes(), time.monotonic()
            taken = {pid: max(0, _private_bytes(pid) - self._base) for pid in lanes}
            total = sum(taken.values())
            self.peak_bytes = max(self.peak_bytes, total)
            if total > DEVICE_BYTES:
                victim = max(taken, key=lambda pid: taken[pid])
                os.kill(victim, signal.SIGKILL)
                self.kills += 1
                lanes = lanes - {victim}


def _private_bytes(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0  # it has just ended
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def served(budget_bytes: int, requests: int) -> dict[str, Any]:
    """Return what became of the requests under a budget."""
    sections: dict[str, dict[str, object]] = {
        "device": {"memory_budget": f"{budget_bytes >> 20} MiB", "lanes": 4},
        "models": {"executor": "eager", "load": [MODEL]},
    }
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder), sections=sections, usual_calibrations=True)
        with server, Client(server.target) as client:
            sizes = sizes_for(client, requests)
            # Requests of one size share their arrays, as they are large.
            graphs = {nodes: _graph(nodes) for nodes in set(sizes)}
            ended: Counter[str] = Counter()

            def ask(place: int) -> None:
                x, edge_index = graphs[sizes[place]]
                time.sleep(place / requests)
                try:
                    client.infer(MODEL, x=x, edge_index=edge_index)
                    ended["OK"] += 1
                except ClientError as error:
                    ended[type(error).__name__] += 1

            with DeviceMemory(server) as device, ThreadPoolExecutor(requests) as threads:
                started_s = time.monotonic()
                list(threads.map(ask, range(requests)))
                took_s = time.monotonic() - started_s
            needed_bytes = sum(_reserve_bytes(client, nodes) for nodes in sizes)
    return {
        "ended": dict(ended),
        "killed_lanes": device.kills,
        "peak_bytes": device.peak_bytes,
        "peak_share": round(device.peak_bytes / DEVICE_BYTES, 3),
        "needed_bytes": needed_bytes,
        "needed_share": round(needed_bytes / DEVICE_BYTES, 3),
        "took_s": took_s,
    }


def sizes_for(client: Client, requests: int) -> list[int]:
    """Return the number of nodes of each request."""
    large_bytes = _reserve_bytes(client, 100_000)
    shares = np.random.default_rng(0).choice(np.linspace(*SHARES, 7), requests)
    return [int(share * DEVICE_BYTES / large_bytes * 100_000) for share in shares]


def _reserve_bytes(client: Client, nodes: int) -> int:
    return client.estimate(MODEL, num_nodes=nodes, num_edges=nodes * EDGES_PER_NODE).reserve_bytes


def _graph(nodes: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(nodes)
    x = rng.standard_normal((nodes, FEATURES), dtype=np.float32)
    return x, rng.integers(0, nodes, (2, nodes * EDGES_PER_NODE), dtype=np.int32)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each mode."""
    rows = [{"mode": mode, **served(size, options.requests)} for mode, size in BUDGETS.items()]
    return {"device_bytes": DEVICE_BYTES, "requests": options.requests, "rows": rows}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
