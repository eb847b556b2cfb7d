"""What the memory checks are worth: the same requests with them and without.

    python -m bench.live.memory_safety [--requests N]

A device of 768 MiB, four lanes, and a trace of GraphSAGE requests (`eager`) that need 25 to 85 % of
it each, all sent within a second, so that together they need many times what there is. Served twice
by a real server: `checked`, with the device's size as its budget, and `mps_aggr`, as under plain
MPS sharing: the server is told of far more memory than there is and starts whatever has a lane.

The device ends what does not fit: when the lanes' own memory together passes its size, the largest
of them is killed, as the kernel's out-of-memory killer does with a container; the bench stands in
for it, looking every two milliseconds. Memory is the private resident memory of the lanes beyond
what they had before the trace. Writes bench/results/memory_safety.json.
"""

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kit.processes import descendants
from bench.kit.result import RESULTS, write_result
from bench.kit.servers import ServerProcess
from serve.client import Client, ClientError
from serve.config import ModelsConfig

RESULT = RESULTS / "memory_safety.json"
DEVICE_BYTES = 768 << 20
UNCHECKED_BYTES = 64 << 30
SHARES = (0.25, 0.85)
MODEL = "sage"
FEATURES = 32
EDGES_PER_NODE = 12


class DeviceMemory:
    """Watches the memory of the lanes; kills the largest when they pass the device together."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.peak_bytes = 0
        self.kills = 0
        self._idle: dict[int, int] = {}
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
        """Children of the fork server."""
        found: set[int] = set()
        for child in descendants(self._server.pid):
            found |= descendants(child).keys()
        return found

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40)
    arguments = parser.parse_args()
    modes = {"checked": DEVICE_BYTES, "mps_aggr": UNCHECKED_BYTES}
    results = {name: measure(budget, arguments.requests) for name, budget in modes.items()}
    document = {
        "device_bytes": DEVICE_BYTES,
        "requests": arguments.requests,
        "modes": results,
    }
    write_result(RESULT, document)
    show(document)


def measure(budget_bytes: int, requests: int) -> dict[str, Any]:
    """What became of the trace under a budget."""
    sections: dict[str, dict[str, object]] = {
        "device": {"memory_budget": f"{budget_bytes >> 20} MiB", "lanes": 4},
        "models": {"executor": "eager"},
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(
            Path(folder), sections=sections, calibration_s=ModelsConfig().calibration_s
        ) as server,
        Client(server.target) as client,
    ):
        sizes, needs = _sizes(client, requests)
        ended: Counter[str] = Counter()
        said: dict[str, str] = {}
        latencies: list[float] = []
        # Requests of one size share their arrays, as they are large.
        graphs = {nodes: _graph(nodes) for nodes in set(sizes)}

        def ask(place: int) -> None:
            x, edge_index = graphs[sizes[place]]
            time.sleep(place / requests)
            started = time.monotonic()
            try:
                client.infer(MODEL, x=x, edge_index=edge_index)
            except ClientError as error:
                ended[type(error).__name__] += 1
                said.setdefault(type(error).__name__, str(error))
            else:
                ended["OK"] += 1
            latencies.append(time.monotonic() - started)

        with DeviceMemory(server) as device, ThreadPoolExecutor(requests) as threads:
            started = time.monotonic()
            list(threads.map(ask, range(requests)))
            took_s = time.monotonic() - started
        return {
            "ended": dict(ended),
            "said": said,
            "killed_lanes": device.kills,
            "peak_bytes": device.peak_bytes,
            "needed_bytes": sum(needs),
            "took_s": took_s,
            "latency_median_s": statistics.median(latencies),
        }


def _sizes(client: Client, requests: int) -> tuple[list[int], list[int]]:
    """Nodes of each request, and what it will reserve."""
    large = _reserve(client, 100_000)
    shares = np.random.default_rng(0).choice(np.linspace(*SHARES, 7), requests)
    sizes = [int(share * DEVICE_BYTES / large * 100_000) for share in shares]
    needs = [_reserve(client, nodes) for nodes in sizes]
    return sizes, needs


def _reserve(client: Client, nodes: int) -> int:
    return client.estimate(MODEL, num_nodes=nodes, num_edges=nodes * EDGES_PER_NODE).reserve_bytes


def _graph(nodes: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(nodes)
    x = rng.standard_normal((nodes, FEATURES), dtype=np.float32)
    return x, rng.integers(0, nodes, (2, nodes * EDGES_PER_NODE), dtype=np.int32)


def show(document: dict[str, Any]) -> None:
    """Both modes side by side."""
    table = Table(title=f"{document['requests']} requests on {DEVICE_BYTES >> 20} MiB")
    for name in ("", "needed", "peak", "answered", "failed", "lanes killed", "took"):
        table.add_column(name, justify="right")
    for name, found in document["modes"].items():
        ended = dict(found["ended"])
        answered = ended.pop("OK", 0)
        table.add_row(
            name,
            f"{found['needed_bytes'] / DEVICE_BYTES:.1f} ×",
            f"{found['peak_bytes'] / DEVICE_BYTES:.2f} ×",
            str(answered),
            ", ".join(f"{count} {kind}" for kind, count in ended.items()) or "0",
            str(found["killed_lanes"]),
            f"{found['took_s']:.1f} s",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
