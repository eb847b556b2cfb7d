"""Measure what a request costs the server's main process behind each front of the gRPC port.

    python -m bench.host.fronts [--quick] [--requests 300] [--rounds 4] [--rhos 0.25,0.5]

The mix of ``bench.live.live`` goes open loop to two servers that differ in `server.front`, in
turns, the same requests to both. `main process` is its processor time per request by the kernel's
account, `hand-overs` how often one of its threads gave up its core to wait. `÷ python` is the
median over the rounds of a round's ratio.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench.kit.live_setup import OURS, Traces, live_server
from bench.kit.measure import percentiles
from bench.kit.open_loop import LoadProcess, load_process
from bench.kit.processes import handovers, processor_ns
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess

FRONTS = ("python", "native")
SCRIPT = Script(
    "fronts",
    full={"rounds": 4, "requests": 300, "rhos": (0.25, 0.5)},
    quick={"rounds": 1, "requests": 20, "rhos": (0.3,)},
    tables=[
        Table("A request in the main process, medians of rounds", "rows", {
            "front": "{front}", "ρ": "{rho:g}", "main process, µs": "{processor_us:,.0f}",
            "÷ python": "{ratio:.2f}", "hand-overs": "{handovers:.1f}",
            "latency p50, µs": "{latency_us[p50]:,.0f}", "p99, µs": "{latency_us[p99]:,.0f}",
        })
    ],
)  # fmt: skip


def run(load: LoadProcess, server: ServerProcess, trace: Path) -> dict[str, Any]:
    """Return what one trace takes of the main process, and the latencies that clients see."""
    before = processor_ns(server.pid), handovers(server.pid)
    sent = load.run(trace, server.target)
    processor, waits = processor_ns(server.pid) - before[0], handovers(server.pid) - before[1]
    count = len(sent.seen)
    return {
        "processor_us": processor / 1e3 / count,
        "handovers": waits / count,
        "latency_us": [seen.latency_ns / 1e3 for seen in sent.seen if not seen.error],
    }


def rounds(
    options: argparse.Namespace, folder: Path, load: LoadProcess
) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """Yield ρ, and a run behind each front."""
    traces = Traces(folder, "mix", options.requests)
    with ExitStack() as stack:
        servers = []
        for front in FRONTS:
            ServerProcess.front = front
            servers.append(stack.enter_context(live_server(folder / front, OURS)))
        traces.measure(servers[0], [0])
        for _ in range(options.rounds):
            for rho in options.rhos:
                trace = traces.make(rho, 0)[1]
                yield rho, [run(load, server, trace) for server in servers]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each front and ρ."""
    with tempfile.TemporaryDirectory() as folder, load_process() as load:
        found = list(rounds(options, Path(folder), load))
    rows = []
    for rho in options.rhos:
        pairs = [pair for at, pair in found if at == rho]
        for number, front in enumerate(FRONTS):
            own = [pair[number] for pair in pairs]
            ratios = [pair[number]["processor_us"] / pair[0]["processor_us"] for pair in pairs]
            rows.append({
                "front": front,
                "rho": rho,
                "processor_us": median(one["processor_us"] for one in own),
                "ratio": median(ratios),
                "ratios": ratios,
                "handovers": median(one["handovers"] for one in own),
                "latency_us": percentiles(
                    [us for one in own for us in one["latency_us"]] or [0.0], (50, 99)
                ),
            })  # fmt: skip
    return {"rows": rows}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
