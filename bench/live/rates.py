"""Requests a second of one small request: answered at all, and with at most 1 % late.

    python -m bench.live.rates [--against CHECKOUT] [--quick] [--nodes 100] [--in-flight 1,4,16]

The demo's GCN (3 × 64) on random graphs of one size, ten edges a node, sent by the compiled client
(``bench.kit.open_loop``) on the same machine. First a number of requests is kept in flight (closed
loop): what client, server and lanes can do together. Then the highest rate of Poisson arrivals
(open loop) is found by bisection at which at most 1 % have no answer in time by the server's clock.

With `--against` another checkout's server is up as well: both take turns in every round and at
every step. Targets are 2 × the median time in the server alone, of the other where there is one.
"""

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.kit.live_setup import OURS, QOS_FACTOR, live_server
from bench.kit.measure import in_turns, percentiles, spread
from bench.kit.open_loop import LoadProcess, load_process
from bench.kit.processes import processor_ns
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from bench.kit.solo import measure_solo, messages_of
from bench.kit.undisturbed import TRIES, Undisturbed
from serve.workload import RANDOM, GraphRef, PoolSpec, TraceHeader, WorkloadTask, build_trace

LIMIT = 0.01
MODEL, EDGES_PER_NODE, GRAPHS = "gcn", 10, 8
#: No datasets: graphs are generated one by one.
POOL = PoolSpec(datasets=())
#: The search begins between this share of the closed loop's best rate, and that rate.
LOWEST = 1 / 64
#: A trace lasts so long at most, and has at least so many requests.
TRACE_S, FEWEST = 20.0, 200
SCRIPT = Script(
    "rates",
    full={
        "against": None, "nodes": 100, "in_flight": (1, 4, 16), "seconds": 5.0, "rounds": 5,
        "requests": 4_000, "halvings": 6, "tries": TRIES,
    },
    quick={"in_flight": (2,), "seconds": 0.5, "rounds": 1, "requests": 200, "halvings": 2,
           "tries": 1},
    tables=[
        Table("Requests a second with a number in flight", "closed", {
            "version": "{version}", "in flight": "{in_flight}", "1/s, median": "{rate_hz[0]:,.0f}",
            "least": "{rate_hz[1]:,.0f}", "most": "{rate_hz[2]:,.0f}",
            "p50, ms": "{latency_ms[p50]:.2f}", "server, µs": "{server_us:,.0f}",
            "client, µs": "{client_us:,.0f}", "errors": "{errors}",
        }),
        Table("Requests a second with at most 1 % late", "limits", {
            "version": "{version}", "1/s": "{rate_at_limit_hz:,.0f}",
        }),
    ],
)  # fmt: skip


def tasks_of(nodes: int) -> tuple[WorkloadTask, ...]:
    """Return requests for graphs of that many nodes."""
    graphs = [GraphRef(RANDOM, index, nodes, EDGES_PER_NODE * nodes) for index in range(GRAPHS)]
    return tuple(WorkloadTask(MODEL, graph) for graph in graphs)


def closed(
    client: LoadProcess,
    servers: Mapping[str, ServerProcess],
    messages: tuple[bytes, ...],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return a row for each version and number of requests in flight."""

    def block(server: ServerProcess, in_flight: int) -> dict[str, Any]:
        used_ns = processor_ns(server.pid)
        run = client.keep_in_flight(messages, in_flight, options.seconds, server.target)
        count = max(1, len(run.latencies_ns))
        return {
            "rate_hz": len(run.latencies_ns) / run.elapsed_s,
            "latency_ms": percentiles([ns / 1e6 for ns in run.latencies_ns] or [0.0], (50, 99), 3),
            "server_us": (processor_ns(server.pid) - used_ns) / count / 1e3,
            "client_us": run.cpu_s / count * 1e6,
            "errors": len(run.errors),
        }

    rows = []
    for in_flight in options.in_flight:
        ways = {name: partial(block, server, in_flight) for name, server in servers.items()}
        for version, found in in_turns(ways, options.rounds).items():
            middle = {
                name: statistics.median(one[name] for one in found)
                for name in ("server_us", "client_us")
            }
            latency_ms = {
                q: statistics.median(one["latency_ms"][q] for one in found) for q in ("p50", "p99")
            }
            rates_hz = spread([one["rate_hz"] for one in found], 1)
            errors = sum(one["errors"] for one in found)
            rows.append(
                {"version": version, "in_flight": in_flight, "rate_hz": rates_hz,
                 "latency_ms": latency_ms, **middle, "errors": errors}
            )  # fmt: skip
    return rows


class Search:
    """The highest rate with at most 1 % late of one version, halving log(high / low) each time."""

    def __init__(
        self, client: Undisturbed, server: ServerProcess, folder: Path, high_hz: float
    ) -> None:
        self._client, self._server, self._folder = client, server, folder
        self.low_hz, self.high_hz = high_hz * LOWEST, high_hz
        self.steps: list[dict[str, Any]] = []

    def step(self, tasks: tuple[WorkloadTask, ...], target_us: int, requests: int) -> None:
        """Try the rate between the highest that passed and the lowest that did not."""
        rate_hz = math.sqrt(self.low_hz * self.high_hz)
        share = self._late(tasks, target_us, requests, rate_hz)
        if share <= LIMIT:
            self.low_hz = rate_hz
        else:
            self.high_hz = rate_hz
        self.steps.append({"rate_hz": rate_hz, "late": share})

    @property
    def found_hz(self) -> float | None:
        """The highest rate that passed; None when none did."""
        return max((one["rate_hz"] for one in self.steps if one["late"] <= LIMIT), default=None)

    def _late(
        self, tasks: tuple[WorkloadTask, ...], target_us: int, requests: int, rate_hz: float
    ) -> float:
        """Return the share without an answer in time by the server's clock."""
        header = TraceHeader(workload=MODEL, seed=len(self.steps), rate_hz=rate_hz, pool=POOL)
        count = max(FEWEST, min(requests, round(rate_hz * TRACE_S)))
        path = self._folder / f"{self._server.grpc_port}-{len(self.steps)}.jsonl"
        build_trace(header, tasks, count=count).with_targets(lambda _: target_us).save(path)
        run, _ = self._client.run(path, self._server.target, self._server.pid)
        return sum(bool(seen.error) or seen.late_by_server for seen in run.seen) / len(run.seen)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return rates of the closed loop, and at the limit, by version."""
    tasks = tasks_of(options.nodes)
    messages = messages_of(tasks, POOL)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        process = stack.enter_context(load_process())
        servers = {}
        if options.against is not None:
            system = f"@{options.against.resolve()}"
            servers["other"] = stack.enter_context(live_server(folder / "other", system))
        servers["this"] = stack.enter_context(live_server(folder / "this", OURS))
        solo = measure_solo(next(iter(servers.values())), tasks, POOL)
        solo_ns = statistics.median(one.solo_ns for one in solo.values())
        target_us = round(QOS_FACTOR * solo_ns / 1000)
        rows = closed(process, servers, messages, options)
        client = Undisturbed(process, options.tries)
        searches = {
            version: Search(
                client, server, folder,
                max(row["rate_hz"][2] for row in rows if row["version"] == version),
            )
            for version, server in servers.items()
        }  # fmt: skip
        for _ in range(options.halvings):
            for search in searches.values():
                search.step(tasks, target_us, options.requests)
    return {
        "model": MODEL,
        "nodes": options.nodes,
        "edges": EDGES_PER_NODE * options.nodes,
        "cores": len(os.sched_getaffinity(0)),
        "target_us": target_us,
        "closed": rows,
        "limits": [
            {"version": version, "rate_at_limit_hz": one.found_hz, "steps": one.steps}
            for version, one in searches.items()
        ],
    }


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
