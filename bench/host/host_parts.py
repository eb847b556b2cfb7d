"""Where the main process's processor time of a request goes, part by part, under load.

    python -m bench.host.host_parts [--quick] [--rate HZ] [--requests N]

A trace of ``bench.live.live``'s mix, sent open loop to a server whose parts count their processor
time (``bench.host.counted_server``). Told for each part: calls and µs a request. What is in no part
(gRPC's own threads and copies, waits for the interpreter lock, garbage) is the rest of its time.
Two looks at the clock cost about a microsecond a call, so the sum is a little more than the truth:
to compare versions use ``bench.host.host_cost``. Writes bench/results/host_parts.json.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.host.counted_server import FILE, PARTS, SIGNAL
from bench.kit.live_setup import OURS, Traces, live_server
from bench.kit.open_loop import load_process
from bench.kit.processor import handovers, processor_ns
from bench.kit.result import RESULTS, write_result

REST = "rest"
RESULT = RESULTS / "host_parts.json"
_WAIT_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="400 requests")
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=4000)
    options = parser.parse_args()
    requests = 400 if options.quick else options.requests
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        client = stack.enter_context(load_process())
        traces = Traces(folder, "mix", requests, len(os.sched_getaffinity(0)))
        os.environ[FILE] = str(counted := folder / "parts.json")
        server = stack.enter_context(
            live_server(folder / "server", OURS, module="bench.host.counted_server")
        )
        traces.measure(server, [0])
        solo_s = statistics.fmean(solo.solo_ns for solo in traces.solo.values()) / 1e9
        _, path = traces.make(options.rate * solo_s / len(os.sched_getaffinity(0)), 0)
        client.run(path, server.target)
        before = _read(server.pid, counted), processor_ns(server.pid), handovers(server.pid)
        run = client.run(path, server.target)
        used_us = (processor_ns(server.pid) - before[1]) / len(run.seen) / 1e3
        slept = (handovers(server.pid) - before[2]) / len(run.seen)
        after = _read(server.pid, counted)
    rows = {}
    for part in PARTS:
        calls, taken_ns = (
            after[what].get(part, 0) - before[0][what].get(part, 0)
            for what in ("calls", "taken_ns")
        )
        rows[part] = {"calls": calls / len(run.seen), "us": taken_ns / len(run.seen) / 1e3}
    rows[REST] = {"calls": 0.0, "us": used_us - sum(row["us"] for row in rows.values())}
    content = {
        "rate_hz": options.rate,
        "requests": requests,
        "server_us": used_us,
        "handovers": slept,
        "parts": rows,
    }
    write_result(RESULT, content)
    table = Table(
        "part", "calls", "µs a request",
        title=f"Main process at {options.rate:g}/s: {used_us:.0f} µs, {slept:.1f} hand-overs",
    )  # fmt: skip
    for part, row in sorted(rows.items(), key=lambda row: -row[1]["us"]):
        table.add_row(part, f"{row['calls']:.1f}" if row["calls"] else "", f"{row['us']:.0f}")
    Console().print(table)


def _read(pid: int, path: Path) -> dict[str, dict[str, int]]:
    """What the server has counted so far."""
    path.unlink(missing_ok=True)
    os.kill(pid, SIGNAL)
    give_up = time.monotonic() + _WAIT_S
    while not path.exists():
        if time.monotonic() > give_up:
            raise RuntimeError("the server does not say what it has counted")
        time.sleep(0.02)
    found: dict[str, dict[str, int]] = json.loads(path.read_text())
    return found


if __name__ == "__main__":
    main()
