"""Compare gnnserve with what users pick instead, as a client on the same machine sees it.

    pip install gnnserve[peers]
    python -m bench.peers [--quick] [--seeds 4] [--requests 400] [--rhos 0.1,0.5]

One trace for all: GCN, SAGE, GIN and GAT, 3 × 64, on 25 subgraphs of 100 to 8,000 nodes sent
inline, Poisson arrivals, open loop. Targets are 2 × the time stock PyG takes alone in a process on
one thread, with no allowance for transport; ρ is the rate × that time's mean ÷ cores. Late is what
comes back to the client after its target, or not at all, from the intended send time.

Every server gets the same bytes, over gRPC or as the body of a POST, by the same compiled sender
(``bench.kit.open_loop``). They take turns, each alone on the machine and warmed up at the highest
load, and each seed begins with another one. Peers run stock PyG on one thread a worker, as many
workers as their documentation recommends for two cores; gnnserve runs by its defaults. `FLOORS`
answer at once without running anything, on our front and on grpc.aio: what they are late for,
nothing behind such a front could save. A run that other programs disturbed is repeated
(``bench.kit.undisturbed``).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.kit.live_setup import OURS as SLACK
from bench.kit.live_setup import Traces, live_server
from bench.kit.measure import percentiles
from bench.kit.open_loop import LoadRun, ask_once, load_process
from bench.kit.script import Script, Table
from bench.kit.servers import listening
from bench.kit.solo import PAUSE_S, REPEATS, Solo, messages_of, records
from bench.kit.undisturbed import TRIES, Undisturbed
from bench.kit.waiting import PATIENCE_S
from bench.live.live import summary
from bench.peers.stock import StockModels
from serve.wire.messages import decode_response
from serve.workload import PoolSpec, Trace, WorkloadTask

POOL = PoolSpec(datasets=("pubmed",), count=25, scale=1.0, min_nodes=100, max_nodes=8_000)
OURS = "gnnserve"
FLOORS = ("our front that runs nothing", "grpc.aio that runs nothing")
#: Command and address of each, by port.
PEERS = {
    "grpc.aio, one PyG thread": ("bench.peers.grpc_aio {port}", "127.0.0.1:{port}"),
    FLOORS[0]: ("bench.kit.echoes native {port}", "127.0.0.1:{port}"),
    FLOORS[1]: ("bench.kit.echoes aio {port}", "127.0.0.1:{port}"),
    "FastAPI, 2 workers": (
        "bench.peers.fastapi_workers {port}",
        "http://127.0.0.1:{port}/infer",
    ),
    "mosec, 2 workers": (
        "bench.peers.mosec_workers --port {port} --max-body-size 104857600 --timeout 30000",
        "http://127.0.0.1:{port}/inference",
    ),
}
SYSTEMS = (OURS, *PEERS)
#: Bounds of classes of targets in ms; late requests are counted by class.
TARGETS_MS = (0.0, 3.0, 10.0, float("inf"))
#: Facts of our server's own account in the result.
OUR_FACTS = ("late_server", "stages_ms", "excess_of_late")
SCRIPT = Script(
    "peers",
    full={"seeds": 4, "requests": 400, "rhos": (0.1, 0.5), "systems": SYSTEMS, "tries": TRIES},
    quick={"seeds": 1, "requests": 40, "rhos": (0.3,), "systems": (OURS, FLOORS[0]), "tries": 1},
    tables=[
        Table("Late at the client", "rows", {
            "system": "{system}", "ρ": "{rho:g}", "seed": "{seed}", "requests": "{requests}",
            "late": "{late}", "p50 ÷ target": "{over_target[p50]:.2f}",
            "p99 ÷ target": "{over_target[p99]:.1f}",
        })
    ],
)  # fmt: skip


@contextmanager
def running(system: str, folder: Path) -> Iterator[tuple[int, str]]:
    """Yield the process id of a running server, and its address."""
    if system == OURS:
        with live_server(folder, SLACK) as server:
            yield server.pid, server.target
        return
    command, address = PEERS[system]
    with listening(command) as (pid, port):
        yield pid, address.format(port=port)


def stock_solo(tasks: Sequence[WorkloadTask]) -> dict[WorkloadTask, Solo]:
    """Return the time of stock PyG in this process, with pauses in which the core cools down."""
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
    """Assert that an answer of the server equals stock PyG's."""
    # A peer may listen before its workers do.
    give_up = time.monotonic() + PATIENCE_S
    while True:
        data, error = ask_once(address, message)
        if not error:
            break
        assert time.monotonic() < give_up, f"{address} answers: {error}"
        time.sleep(0.3)
    found = decode_response(data).outputs["output"]
    scale = float(np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * scale)


def loads(
    client: Undisturbed,
    traces: Traces,
    folder: Path,
    system: str,
    seed: int,
    rhos: Sequence[float],
    probe: tuple[bytes, np.ndarray[Any, Any]],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each load."""
    runs = []
    with running(system, folder) as (pid, address):
        if system not in FLOORS:
            assert_right(address, *probe)
        client.warm_up(traces.make(max(rhos), seed)[1], address)
        for rho in rhos:
            trace, path = traces.make(rho, seed)
            runs.append((trace, *client.run(path, address, pid)))
    for trace, run, used in runs:
        row = {"system": system, "seed": seed, **seen_by_client(trace, run), **used}
        if system == OURS:
            inside = summary(trace, run, records(folder / "report.db"))
            row |= {name: inside[name] for name in OUR_FACTS}
        yield row


def seen_by_client(trace: Trace, run: LoadRun) -> dict[str, Any]:
    """Return how many were late, by how much and for which targets."""
    targets_ms = [(item.qos_target_us or 1) / 1000 for item in trace.items]
    over = [
        seen.latency_ns / 1e6 / target_ms if not seen.error else float("inf")
        for target_ms, seen in zip(targets_ms, run.seen, strict=True)
    ]
    by_target = []
    for low_ms, high_ms in pairwise(TARGETS_MS):
        these = [
            ratio > 1
            for target_ms, ratio in zip(targets_ms, over, strict=True)
            if low_ms <= target_ms < high_ms
        ]
        by_target.append({"from_ms": low_ms, "requests": len(these), "late": sum(these)})
    ordered = sorted(over)
    return {
        "rho": trace.header.rho,
        "rate_hz": trace.header.rate_hz,
        "requests": len(over),
        "late": sum(ratio > 1 for ratio in over),
        "late_by_target": by_target,
        # An error counts as later than any answer.
        "over_target": {f"p{q}": min(1e9, ordered[len(over) * q // 100]) for q in (50, 90, 99)},
        "errors": sorted({seen.error for seen in run.seen if seen.error}),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each server, seed and load."""
    if unknown := set(options.systems) - set(SYSTEMS):
        raise SystemExit(f"--systems {sorted(unknown)}: known are {', '.join(SYSTEMS)}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, load_process() as process:
        client = Undisturbed(process, tries=options.tries)
        folder = Path(name)
        traces = Traces(folder, "mix", options.requests, POOL)
        traces.solo = stock_solo([t for seed in range(options.seeds) for t in traces.tasks(seed)])
        (message,) = messages_of(traces.tasks(0)[:1], POOL)
        probe = message, decode_response(StockModels().answer(message)).outputs["output"].copy()
        for seed in range(options.seeds):
            first = seed % len(options.systems)
            for system in options.systems[first:] + options.systems[:first]:
                there = folder / f"{SYSTEMS.index(system)}-{seed}"
                rows += loads(client, traces, there, system, seed, options.rhos, probe)
    targets_ms = [2 * solo.solo_ns / 1e6 for solo in traces.solo.values()]
    return {
        "graphs": traces.pool.sources,
        "target_ms": percentiles(targets_ms, (5, 25, 50, 75, 95), 6),
        "rows": rows,
    }


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
