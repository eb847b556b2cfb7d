"""Processor time a request of the server's main process under load, beside a bare gRPC echo's.

    python -m bench.host.host_cost [--quick] [--rounds N] [--rho R] [--against CHECKOUT]

The traces of ``bench.live.live`` at one load, sent open loop by one client process to our server
and to an echo of the same messages on the same kind of gRPC server, in turn. Told is the main
process's time on processors from the kernel's account of its threads, which a busy machine moves
far less than the clock; what lanes take is not in it, nor what threads waited for. `handovers`
counts how often a thread went to sleep: each is a wake-up of another later. The stages are the
means of what the server's records say. With `--against` a server of another checkout, with a
`.venv` of its own, takes turns with ours. Writes bench/results/host_cost.json.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.host.grpc_echo import echo_port, start_server
from bench.kit.live_setup import OURS, Traces, live_server
from bench.kit.open_loop import LoadProcess, LoadRun, load_process
from bench.kit.processor import handovers, processor_ns
from bench.kit.result import RESULTS, write_result
from bench.kit.servers import ServerProcess
from bench.kit.solo import records
from bench.live.live import quantile
from bench.live.live_late import STAGES, stages
from serve.workload import Trace

WARM_UP_RHO = 0.4
RESULT = RESULTS / "host_cost.json"


@dataclass(frozen=True, slots=True)
class Way:
    """Who answers."""

    name: str
    address: str
    pid: int
    #: None: the echo.
    server: ServerProcess | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds of 200 requests")
    parser.add_argument("--workload", default="mix")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rho", type=float, default=0.5)
    parser.add_argument("--against", type=Path, help="another checkout, with its own .venv")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests = 2, 200
    systems = {"ours": OURS} | ({"other": f"@{options.against}"} if options.against else {})
    cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        client = stack.enter_context(load_process())
        traces = Traces(folder, options.workload, options.requests, cores)
        ways = []
        for name, system in systems.items():
            server = stack.enter_context(live_server(folder / name, system))
            ways.append(Way(name, server.target, server.pid, server))
        assert ways[0].server is not None
        traces.measure(ways[0].server, [0])
        echo = start_server("infer")
        stack.callback(echo.wait)
        stack.callback(echo.kill)
        ways.append(Way("echo", f"127.0.0.1:{echo_port(echo)}", echo.pid, None))
        rows = measure(client, ways, traces, options.rho, options.rounds)
    means = summary(rows)
    show(means, options.rho)
    content = {
        "workload": options.workload,
        "rho": options.rho,
        "requests": options.requests,
        "means": means,
        "rows": rows,
    }
    write_result(options.out, content)


def measure(
    client: LoadProcess, ways: Sequence[Way], traces: Traces, rho: float, rounds: int
) -> list[dict[str, Any]]:
    """A row for each round and way."""
    rows = []
    for way in ways:
        client.run(traces.make(WARM_UP_RHO, 0)[1], way.address)
    trace, path = traces.make(rho, 0)
    for number in range(rounds):
        for way in ways if number % 2 else reversed(ways):
            before = processor_ns(way.pid), handovers(way.pid)
            run = client.run(path, way.address)
            used_ns, slept = processor_ns(way.pid) - before[0], handovers(way.pid) - before[1]
            rows.append(
                {
                    "way": way.name,
                    "round": number,
                    "rate_hz": trace.header.rate_hz,
                    "server_us": used_ns / len(run.seen) / 1e3,
                    "client_us": run.cpu_s / len(run.seen) * 1e6,
                    "handovers": slept / len(run.seen),
                    "client_p50_ms": quantile([s.latency_ns / 1e6 for s in run.seen], 50),
                    "errors": sum(bool(s.error) for s in run.seen),
                    **(seen_inside(way.server, run, trace) if way.server else {}),
                }
            )
    return rows


def seen_inside(server: ServerProcess, run: LoadRun, trace: Trace) -> dict[str, Any]:
    """Late by the server's account, and its stages."""
    items = trace.items
    done = [(i, s) for i, s in zip(items, run.seen, strict=True) if not s.error]
    kept = kept_rows(server, {s.request_uid for _, s in done})
    late = sum(kept[s.request_uid]["latency_ns"] > (i.qos_target_us or 0) * 1000 for i, s in done)
    times = [stages(kept[s.request_uid], s.latency_ns) for _, s in done]
    return {
        "late": (late + len(items) - len(done)) / len(items),
        "stages_ms": {
            stage: statistics.fmean(taken[stage] / 1e6 for taken in times) for stage in STAGES
        },
    }


def kept_rows(server: ServerProcess, uids: set[str]) -> dict[str, dict[str, Any]]:
    """Rows of the report's database, when all of these are there: they come a little later."""
    give_up = time.monotonic() + 10
    while not uids <= (kept := records(server.database)).keys() and time.monotonic() < give_up:
        time.sleep(0.1)
    return kept


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Medians by way; ratios to the other checkout by round, with their extremes."""
    found: dict[str, dict[str, Any]] = {}
    by_way: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_way.setdefault(row["way"], []).append(row)
    for way, group in by_way.items():
        names = ["server_us", "client_us", "handovers", "client_p50_ms", "errors", "late"]
        found[way] = {
            name: statistics.median(row[name] for row in group)
            for name in names
            if name in group[0]
        }
        if "stages_ms" in group[0]:
            found[way]["stages_ms"] = {
                s: statistics.median(row["stages_ms"][s] for row in group) for s in STAGES
            }
    if "other" in by_way:
        pairs = list(zip(by_way["ours"], by_way["other"], strict=True))
        for name in ("server_us", "handovers", "client_p50_ms"):
            ratios = [ours[name] / other[name] for ours, other in pairs]
            found["ours"][f"{name}_ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
        apart = [ours["late"] - other["late"] for ours, other in pairs]
        found["ours"]["late_apart"] = [statistics.median(apart), min(apart), max(apart)]
    return found


def show(means: dict[str, dict[str, Any]], rho: float) -> None:
    table = Table("", "server, µs", "client, µs", "hand-overs", "p50, ms", "late", *STAGES,
                  title=f"Main process, a request at ρ {rho:g}; stages mean ms")  # fmt: skip
    for way, row in means.items():
        stages_ms = row.get("stages_ms", {})
        table.add_row(
            way, f"{row['server_us']:.0f}", f"{row['client_us']:.0f}", f"{row['handovers']:.1f}",
            f"{row['client_p50_ms']:.2f}", f"{row['late']:.1%}" if "late" in row else "",
            *(f"{stages_ms[s]:.2f}" if stages_ms else "" for s in STAGES),
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    for name, value in means["ours"].items():
        if isinstance(value, list):
            console.print(
                f"ours against other, {name}: {value[0]:.3f} ({value[1]:.3f} to {value[2]:.3f})"
            )


if __name__ == "__main__":
    main()
