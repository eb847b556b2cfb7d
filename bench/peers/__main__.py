"""gnnserve beside what users pick instead, as a client on the same machine sees it.

    pip install gnnserve[peers]
    python -m bench.peers [--quick] [--seeds 2] [--requests 300] [--rhos 0.1,0.3,0.5] [--out FILE]

One trace for all: GCN, SAGE, GIN and GAT, 3 × 64, on 25 subgraphs of 100 to 8,000 nodes sent
inline, Poisson arrivals, open loop. Targets are 2 × the time stock PyG takes alone in a process of
its own on one thread, with no allowance for transport; ρ is the rate × that time's mean ÷ cores.
Late is what comes back to the client after its target, or not at all, from the intended send time.
Every server gets the same bytes; they take turns, each alone on the machine. Peers run stock PyG
with one thread per worker; a run beside which other programs took more than 5 % of the cores is
made again.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.live_setup import OTHERS_LIMIT, Traces, live_server, machine_busy_s, process_tree_s
from bench.live_setup import OURS as SLACK
from bench.machine import machine_facts
from bench.open_loop import GrpcSender, HttpSender, LoadProcess, load_process
from bench.peers.stock import StockModels
from bench.solo import PAUSE_S, REPEATS, Solo, messages_of
from serve.wire import decode_response
from serve.workload import PoolSpec, WorkloadTask
from tests.harness import free_ports

POOL = PoolSpec(datasets=("pubmed",), count=25, scale=1.0, min_nodes=100, max_nodes=8_000)
OURS = "gnnserve"
#: Command and address of each, by port.
PEERS = {
    "grpc.aio, one PyG thread": ("bench.peers.grpc_aio {port}", "127.0.0.1:{port}"),
    "FastAPI, 2 workers": (
        "bench.peers.fastapi_workers {port}",
        "http://127.0.0.1:{port}/infer",
    ),
    "mosec, 2 workers": (
        "bench.peers.mosec_workers --port {port} --max-body-size 104857600 --timeout 30000",
        "http://127.0.0.1:{port}/inference",
    ),
}
TRIES = 3
START_S = 180.0


@contextmanager
def running(system: str, folder: Path) -> Iterator[tuple[int, str]]:
    """The process id of a server and its address."""
    if system == OURS:
        with live_server(folder, SLACK) as server:
            yield server.pid, server.target
        return
    command, address = PEERS[system]
    (port,) = free_ports(1)
    folder.mkdir(parents=True)
    log = folder / "peer.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command.format(port=port).split()],
            stdout=output,
            stderr=output,
        )
    try:
        if not listens(port, process):
            end = f"ended with code {process.poll()}" if process.poll() is not None else "is silent"
            said = log.read_text()[-2000:]
            raise AssertionError(f"{system} {end}; is gnnserve[peers] installed?\n{said}")
        yield process.pid, address.format(port=port)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def listens(port: int, process: "subprocess.Popen[bytes]") -> bool:
    """Whether the process listens within `START_S`, and has not ended before."""
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.1)
    return False


def stock_solo(tasks: Sequence[WorkloadTask]) -> dict[WorkloadTask, Solo]:
    """What stock PyG takes in this process, with pauses in which the core cools down."""
    distinct = sorted(set(tasks))
    models, taken = StockModels(), {task: list[int]() for task in distinct}
    for task, message in [*zip(distinct, messages_of(distinct, POOL), strict=True)] * REPEATS:
        time.sleep(PAUSE_S)
        started_ns = time.perf_counter_ns()
        models.answer(message)
        taken[task].append(time.perf_counter_ns() - started_ns)
    medians = {task: round(statistics.median(values)) for task, values in taken.items()}
    return {task: Solo(ns, ns, ns, 0, 0) for task, ns in medians.items()}


def assert_right(address: str, message: bytes, wanted: np.ndarray[Any, Any]) -> None:
    """One request through the server equals stock PyG here."""
    sender = HttpSender(address) if address.startswith("http") else GrpcSender(address)
    answers: list[tuple[bytes, str]] = []
    try:
        # A peer may listen before its workers do.
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up:
            sender.send(message, lambda _, data, error: answers.append((data, error)))
            while not answers:
                time.sleep(0.01)
            data, error = answers.pop()
            if not error:
                found = decode_response(data).outputs["output"]
                scale = float(np.abs(wanted).max())
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * scale)
                return
            time.sleep(0.3)
        raise AssertionError(f"{address} answers: {error}")
    finally:
        sender.close()


def measure(
    client: LoadProcess,
    traces: Traces,
    folder: Path,
    system: str,
    seed: int,
    rhos: Sequence[float],
    probe: tuple[bytes, np.ndarray[Any, Any]],
    tries: int,
) -> Iterator[dict[str, Any]]:
    """A row per load."""
    with running(system, folder) as (pid, address):
        assert_right(address, *probe)
        client.run(traces.make(min(rhos), seed)[1], address)
        for rho in rhos:
            trace, path = traces.make(rho, seed)
            disturbed = 0
            while True:
                before = machine_busy_s(), process_tree_s(pid), time.process_time()
                run = client.run(path, address)
                after = machine_busy_s(), process_tree_s(pid), time.process_time()
                whole_s, server_s, bench_s = (b - a for a, b in zip(before, after, strict=True))
                cores_s = run.elapsed_s * len(os.sched_getaffinity(0))
                others = (whole_s - server_s - bench_s - run.cpu_s) / cores_s
                if others <= OTHERS_LIMIT or disturbed == tries:
                    break
                disturbed += 1
            over = [
                seen.latency_ns / 1000 / (item.qos_target_us or 1) if not seen.error else 1e9
                for item, seen in zip(trace.items, run.seen, strict=True)
            ]
            yield {
                "system": system,
                "seed": seed,
                "rho": rho,
                "requests": len(over),
                "late": sum(ratio > 1 for ratio in over) / len(over),
                "over_target": dict(zip(("p50", "p90", "p99"), quantiles(over), strict=True)),
                "errors": sorted({seen.error for seen in run.seen if seen.error}),
                "cores_server": server_s / cores_s,
                "cores_client": run.cpu_s / cores_s,
                "cores_others": max(0.0, others),
                "disturbed": disturbed,
            }


def quantiles(values: Sequence[float]) -> list[float]:
    return [float(np.percentile(values, q)) for q in (50, 90, 99)]


def show(rows: Sequence[dict[str, Any]]) -> None:
    rhos = sorted({row["rho"] for row in rows})
    table = Table("late, p50 and p99 ÷ target", *(f"ρ {rho:g}" for rho in rhos))
    for system in dict.fromkeys(row["system"] for row in rows):
        cells = []
        for rho in rhos:
            group = [row for row in rows if (row["system"], row["rho"]) == (system, rho)]
            late = [row["late"] for row in group]
            p50, p99 = (
                statistics.fmean(row["over_target"][q] for row in group) for q in ("p50", "p99")
            )
            cells.append(f"{min(late):.1%}–{max(late):.1%}, {p50:.2f}, {p99:.1f}")
        table.add_row(system, *cells)
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, one load, no second try")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rhos", default="0.1,0.3,0.5")
    parser.add_argument("--out", type=Path, default=Path("bench/results/peers.json"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.rhos, options.requests = 1, "0.3", 100
    tries = 0 if options.quick else TRIES
    rhos = [float(rho) for rho in options.rhos.split(",")]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, load_process() as client:
        folder, cores = Path(name), len(os.sched_getaffinity(0))
        traces = Traces(folder, "mix", options.requests, cores, POOL)
        seeds = range(options.seeds)
        traces.solo = stock_solo([task for seed in seeds for task in traces.tasks(seed)])
        (message,) = messages_of(traces.tasks(0)[:1], POOL)
        probe = message, decode_response(StockModels().answer(message)).outputs["output"].copy()
        for seed in seeds:
            for system in (OURS, *PEERS):
                there = folder / f"{system}-{seed}"
                rows += measure(client, traces, there, system, seed, rhos, probe, tries)
                Console(stderr=True).print(f"seed {seed}: {system} done")
    show(rows)
    ordered = sorted(solo.solo_ns / 1e6 for solo in traces.solo.values())
    content = {
        "machine": machine_facts(),
        "graphs": traces.pool.sources,
        "target_ms": {f"p{q}": 2 * float(np.percentile(ordered, q)) for q in (5, 50, 95)},
        "rows": rows,
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
