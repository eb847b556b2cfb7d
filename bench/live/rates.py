"""Requests a second that are answered at all, and in time, by this version and another one.

    git worktree add ../first b54c16d && make -C ../first setup
    python -m bench.live.rates [--against ../first] [--quick] [--workload mix] [--in-flight 1,4,16]

First a number of requests is kept in flight (closed loop): what client, server and lanes can do
together. Then traces of Poisson arrivals (open loop) are sent at the loads of `--rhos`, and the
highest rate is found by bisection at which at most 1 % have no answer in time by the server's
clock. The compiled client (``bench.kit.open_loop``) sends from the same machine.

With `--against` another checkout's server is up as well, by its own defaults, and both take turns
in every round and at every step; meanwhile the other's processes stand still. Targets are 2 × the
solo times (``bench.kit.solo``) in the server alone, of the other where there is one; ρ is by those
times, too. The workload is one of ``loadgen``'s, or `small`: the demo's GCN (3 × 64) on random
graphs of `--nodes` nodes, ten edges a node.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.kit.live_setup import OURS, Traces, live_server
from bench.kit.measure import in_turns, percentiles, spread
from bench.kit.open_loop import LoadProcess, load_process
from bench.kit.processes import processor_ns, stopped
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from bench.kit.solo import messages_of
from bench.kit.undisturbed import TRIES, Undisturbed
from serve.workload import RANDOM, GraphRef, PoolSpec, WorkloadTask

LIMIT = 0.01
SMALL, MODEL, EDGES_PER_NODE, GRAPHS = "small", "gcn", 10, 8
#: The search begins between this share of the closed loop's best rate, and that rate.
LOWEST = 1 / 64
#: A trace has as many requests as arrive in this time, or these few, and no more than asked for.
TRACE_S, FEWEST = 20.0, 200
SCRIPT = Script(
    "rates",
    full={
        "against": None, "workload": SMALL, "nodes": 100, "in_flight": (1, 4, 16), "seconds": 5.0,
        "rounds": 5, "rhos": (0.1, 0.3, 0.5), "requests": 4_000, "halvings": 6, "tries": TRIES,
    },
    quick={"in_flight": (2,), "seconds": 0.5, "rounds": 1, "rhos": (0.3,), "requests": 40,
           "halvings": 2, "tries": 1},
    tables=[
        Table("Requests a second with a number in flight", "closed", {
            "version": "{version}", "in flight": "{in_flight}", "1/s, median": "{rate_hz[0]:,.0f}",
            "least": "{rate_hz[1]:,.0f}", "most": "{rate_hz[2]:,.0f}",
            "p50, ms": "{latency_ms[p50]:.2f}", "server, µs": "{server_us:,.0f}",
            "client, µs": "{client_us:,.0f}", "errors": "{errors}",
        }),
        Table("Late at equal loads", "rows", {
            "version": "{version}", "ρ": "{rho:.2f}", "rate, 1/s": "{rate_hz:.1f}",
            "late": "{late_server:.1%}", "late at the client": "{missed:.1%}",
            "p99 ÷ target": "{over_qt[p99]:.2f}",
        }),
        Table("Requests a second with at most 1 % late", "limits", {
            "version": "{version}", "1/s": "{rate_at_limit_hz:,.0f}",
        }),
    ],
)  # fmt: skip


class Search:
    """The highest value that passes, by halving log(high / low)."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        #: The highest that passed so far; None: none did.
        self.found: float | None = None

    @property
    def next(self) -> float:
        """The value to try."""
        return math.sqrt(self.low * self.high)

    def learn(self, passed: bool) -> None:
        """Go on with the values above or below the one that was tried."""
        if passed:
            self.low = self.found = self.next
        else:
            self.high = self.next


def traces_of(options: argparse.Namespace, folder: Path) -> Traces:
    """Return the workload's traces."""
    if options.workload != SMALL:
        return Traces(folder, options.workload, options.requests)
    nodes = options.nodes
    graphs = [GraphRef(RANDOM, index, nodes, EDGES_PER_NODE * nodes) for index in range(GRAPHS)]
    tasks = tuple(WorkloadTask(MODEL, graph) for graph in graphs)
    # No datasets: graphs are generated one by one.
    pool = PoolSpec(datasets=())
    return Traces(folder, MODEL, options.requests, pool, lambda _seed: tasks)


def closed(
    client: LoadProcess,
    servers: Mapping[str, ServerProcess],
    messages: tuple[bytes, ...],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return a row for each version and number of requests in flight."""

    def block(server: ServerProcess, in_flight: int) -> dict[str, Any]:
        with stopped(others(server, servers)):
            used_ns = processor_ns(server.pid)
            run = client.keep_in_flight(messages, in_flight, options.seconds, server.target)
        count = max(1, len(run.latencies_ns))
        return {
            "rate_hz": len(run.latencies_ns) / run.elapsed_s,
            "server_us": (processor_ns(server.pid) - used_ns) / count / 1e3,
            "client_us": run.cpu_s / count * 1e6,
            "errors": run.errors,
            **percentiles([ns / 1e6 for ns in run.latencies_ns] or [0.0], (50, 99), 3),
        }

    rows = []
    for in_flight in options.in_flight:
        ways = {name: partial(block, server, in_flight) for name, server in servers.items()}
        for version, blocks in in_turns(ways, options.rounds).items():
            found = {name: [one[name] for one in blocks] for name in blocks[0]}
            rows.append({
                "version": version,
                "in_flight": in_flight,
                "rate_hz": spread(found["rate_hz"], 1),
                "latency_ms": {name: statistics.median(found[name]) for name in ("p50", "p99")},
                "server_us": statistics.median(found["server_us"]),
                "client_us": statistics.median(found["client_us"]),
                "errors": sum(found["errors"]),
            })  # fmt: skip
    return rows


def others(server: ServerProcess, servers: Mapping[str, ServerProcess]) -> list[int]:
    """Return the processes of the other servers."""
    return [one.pid for one in servers.values() if one is not server]


def at_load(
    client: Undisturbed, version: str, servers: Mapping[str, ServerProcess], traces: Traces,
    rho: float,
) -> dict[str, Any]:  # fmt: skip
    """Return what became of one trace by the server's clock and by the client's."""
    server = servers[version]
    count = min(traces.count, max(FEWEST, round(traces.rate_hz(rho, 0) * TRACE_S)))
    trace, path = traces.make(rho, 0, count)
    with stopped(others(server, servers)):
        run, used = client.run(path, server.target, server.pid)
    over = [seen.over_target or 0.0 for seen in run.seen if not seen.error]
    late = sum(bool(seen.error) or seen.late_by_server for seen in run.seen)
    return {
        "rho": rho,
        "rate_hz": trace.header.rate_hz,
        "requests": count,
        "late_server": late / count,
        "missed": 1 - sum(ratio <= 1 for ratio in over) / count,
        "over_qt": percentiles(over or [0.0], (50, 90, 99), 6),
        **used,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return rates of the closed loop, lateness by load, and rates at the limit, by version."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        process = stack.enter_context(load_process())
        servers = {}
        if options.against is not None:
            system = f"@{options.against.resolve()}"
            servers["other"] = stack.enter_context(live_server(folder / "other", system))
        servers["this"] = stack.enter_context(live_server(folder / "this", OURS))
        traces = traces_of(options, folder)
        traces.measure(next(iter(servers.values())), [0])
        found = closed(process, servers, messages_of(traces.tasks(0), traces.pool.spec), options)
        client = Undisturbed(process, options.tries)
        rows = [
            {"version": version, **at_load(client, version, servers, traces, rho)}
            for rho in options.rhos
            for version in servers
        ]
        searches = {}
        for version in servers:
            best_hz = max(row["rate_hz"][2] for row in found if row["version"] == version)
            highest = best_hz / traces.rate_hz(1.0, 0)
            searches[version] = Search(LOWEST * highest, highest)
        steps: dict[str, list[dict[str, Any]]] = {version: [] for version in servers}
        for _ in range(options.halvings):
            for version, search in searches.items():
                step = at_load(client, version, servers, traces, search.next)
                steps[version].append(step)
                search.learn(step["late_server"] <= LIMIT)
    limits = [
        {
            "version": version,
            "rate_at_limit_hz": search.found and traces.rate_hz(search.found, 0),
            "steps": steps[version],
        }
        for version, search in searches.items()
    ]
    return {
        "workload": options.workload,
        "graphs": traces.pool.sources,
        "cores": traces.cores,
        "solo_ms": traces.solo_ms,
        "closed": found,
        "rows": rows,
        "limits": limits,
    }


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
