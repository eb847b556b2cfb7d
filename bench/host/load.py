"""Measure the server's main process under load: processor time, and whether preparing is hidden.

    python -m bench.host.load QUESTION [--quick]

QUESTION is

- cost: the mix of ``bench.live.live`` at one load, sent open loop to our server and to an echo of
  the same messages, in turns. `server` is the main process's processor time by the kernel's
  account, without lanes; `handovers` counts how often its threads went to sleep.
- prepare: clients keep 1, 4 or 16 requests in flight (GCN, 3,000 nodes and 30,000 edges). By the
  server's own account: the share of preparing during which no idle lane waited for it (`hidden`),
  the share of launches that an idle lane did wait for (`delayed`), and what that waiting was of the
  lanes' time (`cost`). With one in flight nothing runs that preparing could hide behind.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.host.echo import echo_server
from bench.kit.live_setup import OURS, Traces, live_server
from bench.kit.measure import in_turns, percentiles
from bench.kit.open_loop import load_process
from bench.kit.processes import handovers, processor_ns
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from bench.kit.solo import records
from serve.client import Client

WARM_UP_RHO = 0.4
NODES, EDGES, FEATURES = 3_000, 30_000, 32
#: Of every request that was answered, in order of arrival.
COLUMNS = ("prepare_ns", "prepare_exposed_ns", "run_ns")
SCRIPTS = {
    "cost": Script(
        "host_cost",
        full={"rounds": 8, "requests": 400, "rho": 0.5},
        quick={"rounds": 1, "requests": 20},
        tables=[
            Table("Main process, a request", "means", {
                "server": "{way}", "processor time, µs": "{server_us:.0f}",
                "hand-overs": "{handovers:.1f}", "client's p50, ms": "{client_p50_ms:.2f}",
            })
        ],
    ),
    "prepare": Script(
        "prepare",
        full={"requests": 400, "in_flight": (1, 4, 16)},
        quick={"requests": 20, "in_flight": (1,)},
        tables=[
            Table("Preparing behind other work", "rows", {
                "in flight": "{in_flight}", "prepare p50, µs": "{prepare_us[p50]:,.0f}",
                "p99": "{prepare_us[p99]:,.0f}", "hidden": "{hidden:.1%}",
                "launches delayed": "{delayed:.1%}", "cost": "{cost:.1%}",
            })
        ],
    ),
}  # fmt: skip


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """Return medians by server."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        client = stack.enter_context(load_process())
        traces = Traces(folder, "mix", options.requests, len(os.sched_getaffinity(0)))
        server = stack.enter_context(live_server(folder / "ours", OURS))
        traces.measure(server, [0])
        echo = stack.enter_context(echo_server())
        places = {"ours": (server.pid, server.target), "echo": (echo.pid, echo.address)}
        _, warm_up = traces.make(WARM_UP_RHO, 0)
        trace, path = traces.make(options.rho, 0)

        def send(pid: int, address: str) -> dict[str, float]:
            used_ns, slept = processor_ns(pid), handovers(pid)
            run = client.run(path, address)
            count = len(run.seen)
            return {
                "server_us": (processor_ns(pid) - used_ns) / count / 1e3,
                "client_us": run.cpu_s / count * 1e6,
                "handovers": (handovers(pid) - slept) / count,
                "client_p50_ms": median(seen.latency_ns for seen in run.seen) / 1e6,
                "errors": sum(bool(seen.error) for seen in run.seen),
            }

        for _, address in places.values():
            client.run(warm_up, address)
        ways = {name: partial(send, *place) for name, place in places.items()}
        rounds = in_turns(ways, options.rounds, warm_up=0)
    return {
        "rho": options.rho,
        "rate_hz": trace.header.rate_hz,
        "requests": options.requests,
        "means": [
            {"way": way} | {name: median(one[name] for one in found) for name in found[0]}
            for way, found in rounds.items()
        ],
    }


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each number of requests in flight."""
    rows = []
    for in_flight in options.in_flight:
        with tempfile.TemporaryDirectory() as folder:
            sections: dict[str, dict[str, object]] = {"device": {"memory_budget": "8 GiB"}}
            server = ServerProcess(
                Path(folder), policy="slack", discipline="preemptive", sections=sections
            )
            with server:
                keep_in_flight(server, options.requests, in_flight)
                server.stop()
            # The first requests start together, or cold.
            kept = list(records(server.database).values())[2 * in_flight :]
            rows.append({"in_flight": in_flight, **hidden(kept)})
    return {"rows": rows}


def keep_in_flight(server: ServerProcess, count: int, in_flight: int) -> None:
    """Send `count` requests, `in_flight` at a time."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NODES, FEATURES), dtype=np.float32)
    edge_index = rng.integers(0, NODES, (2, EDGES), dtype=np.int32)
    with Client(server.target) as client, ThreadPoolExecutor(in_flight) as threads:
        asked = [
            threads.submit(client.infer, "gcn", x=x, edge_index=edge_index) for _ in range(count)
        ]
        for answer in asked:
            answer.result()


def hidden(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how long preparing took, and how much of it an idle lane waited for."""
    prepared, exposed, run = (np.array([row[name] for row in rows]) for name in COLUMNS)
    return {
        "requests": len(rows),
        "prepare_us": percentiles(prepared / 1e3, (50, 90, 99)),
        "hidden": round(1 - float(exposed.sum() / prepared.sum()), 4),
        "delayed": round(float((exposed > 0).mean()), 4),
        "cost": round(float(exposed.sum() / (exposed.sum() + run.sum())), 4),
    }


QUESTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "cost": cost,
    "prepare": prepare,
}

if __name__ == "__main__":
    question = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in QUESTIONS else "cost"
    SCRIPTS[question].main(QUESTIONS[question], __doc__)
