"""Measure what a run waits for between server and lane: on its way there, and on its way back.

    python -m bench.host.handover [--quick] [--requests 300] [--rhos 0.1,0.5] [--nicenesses 20,19,0]
        [--priorities plain,short,realtime]

The mix of ``bench.live.live`` goes open loop to servers whose lanes have one niceness or another,
in turns, with threads as the server sets them (plain) or as ``bench.kit.priorities`` does. `there`
is from the launch until the lane begins, by the lane's own clock, which all processes of a machine
share; `back` is from the end of the run until the scheduler hears of it. `there, alone` looks at
launches on a device where nothing else ran.

By the kernel's account (schedstat), `lane waits` is how long a lane stood ready without a core for
each of its runs, between the launch and the answer, and `server waits` is the same of the main
process's threads. What `there` holds beyond it is work: the packet, the wake-up, the decoding.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from bench.kit.live_setup import OURS, Traces, live_server
from bench.kit.measure import percentiles
from bench.kit.open_loop import LoadProcess, load_process
from bench.kit.priorities import set_priorities
from bench.kit.processes import descendants, waited_ns
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from bench.kit.solo import records

SCRIPT = Script(
    "handover",
    full={
        "rounds": 2, "requests": 300, "rhos": (0.1, 0.5), "nicenesses": (20, 19, 0),
        "priorities": ("plain",),
    },
    quick={
        "rounds": 1, "requests": 20, "rhos": (0.3,), "nicenesses": (20,),
        "priorities": ("plain",),
    },
    tables=[
        Table("Between server and lane, µs", "rows", {
            "lanes' niceness": "{niceness}", "priorities": "{priorities}", "ρ": "{rho:g}",
            "there, p50": "{there_us[p50]:,.0f}", "p90": "{there_us[p90]:,.0f}",
            "p99": "{there_us[p99]:,.0f}", "alone, p50": "{alone_us[p50]:,.0f}",
            "back, p50": "{back_us[p50]:,.0f}", "p90 ": "{back_us[p90]:,.0f}",
            "p99 ": "{back_us[p99]:,.0f}", "lane waits": "{lane_waits_us:,.0f}",
            "server waits": "{server_waits_us:,.0f}", "late, client": "{late:.1%}",
        })
    ],
)  # fmt: skip


def run(load: LoadProcess, server: ServerProcess, trace: Path) -> dict[str, Any]:
    """Return what the kernel and the client say of one trace."""
    before = waits_ns(server)
    sent = load.run(trace, server.target)
    # A process that measures between requests may come and go.
    waited = {pid: now - before[pid] for pid, now in waits_ns(server).items() if pid in before}
    server_ns = waited.pop(server.pid)
    lane_ns = sum(waited.values())
    return {
        "uids": [seen.request_uid for seen in sent.seen if not seen.error],
        "lane_waits_us": lane_ns / 1e3 / len(sent.seen),
        "server_waits_us": server_ns / 1e3 / len(sent.seen),
        "late": sum(seen.late or bool(seen.error) for seen in sent.seen) / len(sent.seen),
    }


def waits_ns(server: ServerProcess) -> dict[int, int]:
    """Return how long each process of the server has waited for a core."""
    found = {}
    for pid in (server.pid, *descendants(server.pid)):
        with suppress(FileNotFoundError):  # it has just ended
            found[pid] = waited_ns(pid)
    return found


def told(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ways there and back in µs of requests that ran by themselves, once."""
    plain = [row for row in rows if row["attempt"] == row["merged"] == 1 and row["start_ns"]]
    there = [row["start_ns"] / 1e3 for row in plain]
    alone = [row["start_ns"] / 1e3 for row in plain if not row["co_runners"]]
    back = [
        (
            row["latency_ns"] - row["quet_ns"] - row["start_ns"] - row["run_ns"]
            - row["suspended_ns"] - row["answer_ns"]
        ) / 1e3
        for row in plain
    ]  # fmt: skip
    ways = {"there_us": there, "alone_us": alone, "back_us": back}
    return {name: percentiles(us or [0.0], (50, 90, 99)) for name, us in ways.items()}


def runs(options: argparse.Namespace, folder: Path, load: LoadProcess) -> Iterator[dict[str, Any]]:
    """Yield each run with its ways; the nicenesses and priorities take turns."""
    traces = Traces(folder, "mix", options.requests)
    with live_server(folder / "first", OURS) as server:
        traces.measure(server, [0])
    ways = [*product(options.nicenesses, options.priorities)] * options.rounds
    for number, (niceness, priorities) in enumerate(ways):
        ServerProcess.lane_niceness = niceness
        with live_server(folder / f"{number}", OURS) as server:
            below = descendants(server.pid)
            lanes = [pid for pid, command in below.items() if "forkserver" in command]
            set_priorities(priorities, server.pid, lanes, load.pid)
            found = [run(load, server, traces.make(rho, 0)[1]) for rho in options.rhos]
        kept = records(server.database)
        for rho, one in zip(options.rhos, found, strict=True):
            facts = {"niceness": niceness, "priorities": priorities, "rho": rho}
            yield facts | one | told([kept[uid] for uid in one.pop("uids")])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each run."""
    with tempfile.TemporaryDirectory() as folder, load_process() as load:
        return {"rows": list(runs(options, Path(folder), load))}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
