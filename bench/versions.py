"""Requests a second at 1 % violations: this version of gnnserve and another one.

    git worktree add ../first b54c16d && make -C ../first setup
    python -m bench.versions ../first [--quick] [--seeds 3] [--requests 300] [--out FILE]

Both serve the same requests (``loadgen``'s mix, open loop, one client process on the same machine)
as they come, each with its own default policy and executors. Targets are the other version's: 2 ×
the solo time it measures in itself (``bench.solo``), absolute numbers, alike for both; ours would
be too tight for it at any load.

For each seed the two take turns. Each goes up a ladder of rates, a factor `STEP` apart, until more
than 1 % of the answers are late by the server's clock; the rate at exactly 1 % lies between the
last two steps, in proportion to their logarithms. `missed` in the steps is the client's view of the
same, transport and failures included. A step beside which other programs took more than
`OTHERS_LIMIT` of the cores is made again.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.live import summary, undisturbed
from bench.live_setup import OURS, Traces, live_server
from bench.machine import machine_facts
from bench.open_loop import LoadProcess, load_process
from bench.solo import records, wait_for_rows

LIMIT = 0.01
STEP = 1.4
#: ρ of the first step and the last, by the other version's solo times.
LOWEST, HIGHEST = 0.04, 4.0
WARM_UP_RHO = 0.2


def climb(
    client: LoadProcess, traces: Traces, folder: Path, system: str, seed: int
) -> list[dict[str, Any]]:
    """A row per step, the last one beyond the limit unless the ladder ends before."""
    rows: list[dict[str, Any]] = []
    sent = 0
    with live_server(folder, system) as server:
        sent += len(client.run(traces.make(WARM_UP_RHO, seed)[1], server.target).seen)
        rho = LOWEST
        while rho <= HIGHEST and not (rows and rows[-1]["late_server"] > LIMIT):
            trace, path = traces.make(rho, seed)
            run, used = undisturbed(client, server, path)
            sent += len(run.seen) * (1 + round(used["disturbed"]))
            wait_for_rows(server, sent)
            rows.append(summary(trace, run, records(server.database)) | used)
            rho *= STEP
    return rows


def rate_at_limit(steps: Sequence[dict[str, Any]]) -> float:
    """Requests a second at exactly `LIMIT`; 0 where the first step is beyond it."""
    if steps[0]["late_server"] > LIMIT:
        return 0.0
    if steps[-1]["late_server"] <= LIMIT:
        return float(steps[-1]["rate_hz"])
    below, above = steps[-2], steps[-1]
    share = (LIMIT - below["late_server"]) / (above["late_server"] - below["late_server"])
    return float(below["rate_hz"] * (above["rate_hz"] / below["rate_hz"]) ** share)


def show(found: dict[str, dict[str, Any]]) -> None:
    table = Table("version", "requests/s at 1 %, median", "each seed")
    for name, row in found.items():
        each = ", ".join(f"{rate:.0f}" for rate in row["each"])
        table.add_row(name, f"{row['median']:.0f}", each)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--quick", action="store_true", help="one seed, few requests")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("bench/results/versions.json"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.requests = 1, 100
    other = f"@{options.checkout.resolve()}"
    names = {OURS: "this", other: "the other"}
    steps: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names.values()}
    with tempfile.TemporaryDirectory() as name, load_process() as client:
        folder, seeds = Path(name), range(options.seeds)
        traces = Traces(folder, "mix", options.requests, len(os.sched_getaffinity(0)))
        with live_server(folder / "first", other) as server:
            traces.measure(server, seeds)
        for seed in seeds:
            for number, system in enumerate(names):
                rows = climb(client, traces, folder / f"{number}-{seed}", system, seed)
                steps[names[system]].append(rows)
    found = {}
    for label, runs in steps.items():
        each = [rate_at_limit(rows) for rows in runs]
        found[label] = {"median": statistics.median(each), "each": each, "steps": runs}
    show(found)
    content = {
        "machine": machine_facts(),
        "graphs": traces.pool.sources,
        "mean_solo_ms": statistics.fmean(solo.solo_ns for solo in traces.solo.values()) / 1e6,
        "requests": options.requests,
        "versions": found,
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
