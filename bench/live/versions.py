"""Requests a second at 1 % violations, and violations side by side: this version and another one.

    git worktree add ../first b54c16d && make -C ../first setup
    python -m bench.live.versions ../first [--quick] [--out FILE]

Both servers are up all the time and serve the same requests (``loadgen``'s mix, open loop, one
client process on the same machine) in turn, each with its own default policy and executors. Targets
are the other version's: 2 × the solo time it measures in itself (``bench.kit.solo``), absolute
numbers, alike for both; ours would be too tight for it at any load. ρ is by those times.

First the same traces at `SIDE_BY_SIDE`. Then for each the highest rate at which at most `LIMIT` of
the answers are late by the server's clock, by bisection of the rate's logarithm between `LOWEST`
and `HIGHEST`. At each rate up to `CHUNKS` traces are sent; once more are late than the limit allows
in all of them the rest is left out, as it cannot change the verdict. A rate passes with at least
400 requests (half of that with --quick). `missed` is the client's view of the same, transport and
failures included. A trace that others disturbed is sent again (``bench.kit.undisturbed``).
"""

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kit.live_setup import OURS, Traces, live_server
from bench.kit.open_loop import load_process
from bench.kit.result import write_result
from bench.kit.servers import ServerProcess
from bench.kit.solo import records, wait_for_rows
from bench.kit.undisturbed import Undisturbed
from bench.live.live import WHO, summary

LIMIT = 0.01
SIDE_BY_SIDE = (0.1, 0.3, 0.5)
#: ρ of the rates that are tried, by the other version's solo times. Below, cores are cold, and
#: enough requests to tell 1 % take minutes.
LOWEST, HIGHEST = SIDE_BY_SIDE[0], 8.0
WARM_UP_RHO = 0.3
#: Traces a rate; ``Traces.make`` halves them below ρ 0.2.
CHUNKS = 4
CHUNK_REQUESTS = 200


@dataclass
class Contender:
    """One version's server, and what was sent to it."""

    server: ServerProcess
    sent: int = 0


def at_rate(
    client: Undisturbed, traces: Traces, contender: Contender, rho: float, *, in_full: bool
) -> dict[str, Any]:
    """Violations at one load; `in_full` sends every trace whatever the first ones show."""
    rows: list[dict[str, Any]] = []
    planned = 0
    for seed in range(CHUNKS):
        trace, path = traces.make(rho, seed)
        planned = planned or CHUNKS * len(trace.items)
        run, used = client.run(path, contender.server.target, contender.server.pid)
        contender.sent += len(run.seen) * (1 + round(used["disturbed"]))
        wait_for_rows(contender.server, contender.sent)
        rows.append(summary(trace, run, records(contender.server.database)) | used)
        late = sum(row["late_server"] * row["requests"] for row in rows)
        if not in_full and late > LIMIT * planned:
            break
    return pooled(rows)


def pooled(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several traces of one load as one: shares by requests, the rest as means over the traces."""
    requests = sum(row["requests"] for row in rows)
    found: dict[str, Any] = {"rho": rows[0]["rho"], "requests": requests}
    for name in ("late_server", "missed"):
        found[name] = sum(row[name] * row["requests"] for row in rows) / requests
    for name in ("rate_hz", "slower", *(f"cores_{who}" for who in WHO)):
        found[name] = statistics.fmean(row[name] for row in rows)
    for name in ("over_qt", "stages_ms", "excess_of_late"):
        keys = rows[0][name]
        found[name] = {key: statistics.fmean(row[name][key] for row in rows) for key in keys}
    return found


def bisect(passes: Callable[[float], bool], low: float, high: float, steps: int) -> float | None:
    """The highest value known to pass after `steps` halvings of log(high / low); none: not `low`.

    `passes` is taken to hold up to some value and not beyond. `low` is tried only where nothing
    else has passed, as a low rate takes longest; `high` is not tried.
    """
    lowest = low
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low if low > lowest or passes(low) else None


def show(found: dict[str, dict[str, Any]]) -> None:
    table = Table(
        "version", *(f"late, client, p99 ÷ target at ρ {rho:g}" for rho in SIDE_BY_SIDE),
        "requests/s at 1 %", "late a step above",
    )  # fmt: skip
    for name, row in found.items():
        sides = [
            f"{side['late_server']:.1%}, {side['missed']:.1%}, {side['over_qt']['p99']:.2f}"
            for side in row["side_by_side"]
        ]
        rate = row["rate_at_limit_hz"]
        beyond = [step for step in row["steps"] if rate is None or step["rate_hz"] > rate]
        nearest = min(beyond, key=lambda step: step["rate_hz"], default=None)
        lowest = min(step["rate_hz"] for step in row["steps"])
        table.add_row(
            name, *sides,
            f"< {lowest:.1f}" if rate is None else f"{rate:.1f}",
            f"{nearest['late_server']:.1%} at {nearest['rate_hz']:.1f}" if nearest else "–",
        )  # fmt: skip
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--quick", action="store_true", help="half the requests, four halvings")
    parser.add_argument("--out", type=Path, default=Path("bench/results/versions.json"))
    options = parser.parse_args()
    chunk, halvings = (CHUNK_REQUESTS // 2, 4) if options.quick else (CHUNK_REQUESTS, 6)
    other = f"@{options.checkout.resolve()}"
    with tempfile.TemporaryDirectory() as name, load_process() as process:
        client, folder, seeds = Undisturbed(process), Path(name), range(CHUNKS)
        traces = Traces(folder, "mix", chunk, len(os.sched_getaffinity(0)))
        with (
            live_server(folder / "other", other) as first,
            live_server(folder / "this", OURS) as this,
        ):
            traces.measure(first, seeds)
            contenders = {"the other": Contender(first), "this": Contender(this)}
            contenders["the other"].sent = len(records(first.database))
            for contender in contenders.values():
                path = traces.make(WARM_UP_RHO, 0)[1]
                contender.sent += len(client.warm_up(path, contender.server.target).seen)
            found: dict[str, dict[str, Any]] = {
                label: {"side_by_side": [], "steps": []} for label in contenders
            }
            for rho in SIDE_BY_SIDE:
                for label, contender in contenders.items():
                    row = at_rate(client, traces, contender, rho, in_full=True)
                    found[label]["side_by_side"].append(row)
            for label, contender in contenders.items():
                steps = found[label]["steps"]

                known = {row["rho"]: row for row in found[label]["side_by_side"]}

                def passes(
                    rho: float,
                    contender: Contender = contender,
                    steps: list[dict[str, Any]] = steps,
                    known: dict[float, dict[str, Any]] = known,
                ) -> bool:
                    row = known.get(rho) or at_rate(client, traces, contender, rho, in_full=False)
                    steps.append(row)
                    return bool(row["late_server"] <= LIMIT)

                limit_rho = bisect(passes, LOWEST, HIGHEST, halvings)
                rates = [step["rate_hz"] for step in steps if step["rho"] == limit_rho]
                found[label]["rate_at_limit_hz"] = statistics.fmean(rates) if rates else None
    show(found)
    content = {
        "graphs": traces.pool.sources,
        "mean_solo_ms": statistics.fmean(solo.solo_ns for solo in traces.solo.values()) / 1e6,
        "versions": found,
    }
    write_result(options.out, content)


if __name__ == "__main__":
    main()
