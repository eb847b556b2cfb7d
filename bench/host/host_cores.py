"""Where the server's own threads run: on all cores, or all on the first.

    python -m bench.host.host_cores [--quick]

One server (GCN of the demo, 10 edges a node) whose threads, the main one aside, are moved from
outside between all cores and the first one, in blocks that alternate: one request at a time, where
`added` is what the client waits beyond the run, and four at a time. Ratios are of neighbouring
blocks: median, and the lowest and highest. Writes bench/results/host_cores.json.
"""

import argparse
import contextlib
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kit.result import RESULTS, write_result
from bench.kit.servers import ServerProcess
from serve.client import Client, Request

FEATURES, EDGES_PER_NODE = 32, 10
#: Nodes of a graph, and requests in flight.
LOADS = ((100, 1), (1_000, 1), (1_000, 4))
BLOCKS, REQUESTS = 16, 40
SECTIONS: dict[str, dict[str, object]] = {"device": {"memory_budget": "8 GiB"}}
RESULT = RESULTS / "host_cores.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half of the blocks")
    arguments = parser.parse_args()
    blocks = BLOCKS // 2 if arguments.quick else BLOCKS
    result = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(
            Path(folder), policy="slack", discipline="preemptive", sections=SECTIONS
        ) as server,
        Client(server.target) as client,
    ):
        for nodes, in_flight in LOADS:
            found = measure(server.pid, client, nodes, in_flight, blocks)
            result[f"{nodes} nodes, {in_flight} in flight"] = found
    content = {"by_load": result}
    write_result(RESULT, content)
    show(result)


def measure(pid: int, client: Client, nodes: int, in_flight: int, blocks: int) -> dict[str, Any]:
    """p50 of what is added in each block, and requests per second."""
    rng = np.random.default_rng(0)
    request = Request(
        model="gcn",
        x=rng.standard_normal((nodes, FEATURES), dtype=np.float32),
        edge_index=rng.integers(0, nodes, (2, EDGES_PER_NODE * nodes), dtype=np.int32),
    )
    cores = sorted(os.sched_getaffinity(0))
    places = {"all": cores, "first": cores[:1]}
    added_us: dict[str, list[float]] = {place: [] for place in places}
    per_s: dict[str, list[float]] = {place: [] for place in places}

    def ask(_: int) -> float:
        started_ns = time.perf_counter_ns()
        answer = client.ask(request)
        return (time.perf_counter_ns() - started_ns) / 1e3 - answer.qos.run_us

    with ThreadPoolExecutor(in_flight) as threads:
        list(threads.map(ask, range(REQUESTS)))
        for _ in range(blocks):
            for place, allowed in places.items():
                move(pid, allowed)
                started_ns = time.perf_counter_ns()
                taken = list(threads.map(ask, range(REQUESTS)))
                per_s[place].append(REQUESTS / (time.perf_counter_ns() - started_ns) * 1e9)
                added_us[place].append(float(np.median(taken)))
    return {
        "added_us": {place: round(float(np.median(v)), 1) for place, v in added_us.items()},
        "per_s": {place: round(float(np.median(v)), 1) for place, v in per_s.items()},
        "added_first_over_all": spread(added_us),
        "per_s_first_over_all": spread(per_s),
    }


def move(pid: int, cores: list[int]) -> None:
    """Pin all threads of the process but the main one."""
    for thread_id in map(int, os.listdir(f"/proc/{pid}/task")):
        if thread_id != pid:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread_id, cores)


def spread(values: dict[str, list[float]]) -> dict[str, float]:
    ratios = np.array(values["first"]) / np.array(values["all"])
    return {
        "median": round(float(np.median(ratios)), 3),
        "low": round(float(ratios.min()), 3),
        "high": round(float(ratios.max()), 3),
    }


def show(result: dict[str, dict[str, Any]]) -> None:
    table = Table("load", "added, all", "first", "ratio", "requests/s, all", "first", "ratio")
    for load, row in result.items():
        cells = [load]
        for name, ratio_of, unit in (("added_us", "added", " µs"), ("per_s", "per_s", "")):
            ratio = row[f"{ratio_of}_first_over_all"]
            cells += [f"{row[name][place]:,.0f}{unit}" for place in ("all", "first")]
            cells.append(f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})")
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
