"""Compare this version with another checkout: lateness at equal load, and the rate at 1 % late.

    git worktree add ../first b54c16d && make -C ../first setup
    python -m bench.live.versions --against ../first [--quick]

Both servers are up all the time and serve the same requests in turn: ``loadgen``'s mix, open loop,
one client process on the same machine. Each has its own default policy and executors. Targets are
2 × the other version's solo times (``bench.kit.solo``), alike for both; ρ is by those times.

First the same traces go to both at `SIDE_BY_SIDE`. Then the highest rate is found for each at which
at most 1 % of the answers are late by the server's clock, by bisection of the rate's logarithm. At
each rate up to `CHUNKS` traces are sent; the rest is left out once the verdict cannot change.
"""

import argparse
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.kit.live_setup import OURS, Traces, live_server
from bench.kit.open_loop import load_process
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from bench.kit.solo import records, wait_for_rows
from bench.kit.undisturbed import Undisturbed
from bench.live.live import USERS, mean_of, summary

LIMIT = 0.01
SIDE_BY_SIDE = (0.1, 0.3, 0.5)
#: Below the lowest ρ cores are cold, and enough requests to tell 1 % take minutes.
LOWEST, HIGHEST = SIDE_BY_SIDE[0], 8.0
WARM_UP_RHO = 0.3
CHUNKS = 4
SCRIPT = Script(
    "versions",
    full={"against": None, "requests": 200, "halvings": 6},
    quick={"requests": 100, "halvings": 4},
    tables=[
        Table("Versions", "rows", {
            "version": "{version}", "ρ": "{rho:.2f}", "rate, 1/s": "{rate_hz:.1f}",
            "late": "{late_server:.1%}", "late at the client": "{missed:.1%}",
            "p99 ÷ target": "{over_qt[p99]:.2f}",
        }),
        Table("Requests a second at 1 % late", "limits", {
            "version": "{version}", "rate": "{rate_at_limit_hz:.1f}",
        }),
    ],
)  # fmt: skip


class Contender:
    """One version's server, and how many requests were sent to it."""

    def __init__(self, client: Undisturbed, traces: Traces, server: ServerProcess) -> None:
        self._client, self._traces, self.server = client, traces, server
        self._sent = len(records(server.database))

    def warm_up(self) -> None:
        """Send a trace that is not counted."""
        path = self._traces.make(WARM_UP_RHO, 0)[1]
        self._sent += len(self._client.warm_up(path, self.server.target).seen)

    def at_rate(self, rho: float, *, in_full: bool) -> dict[str, Any]:
        """Return the figures of one load; `in_full` sends every trace whatever the first show."""
        rows: list[dict[str, Any]] = []
        for seed in range(CHUNKS):
            trace, path = self._traces.make(rho, seed)
            run, used = self._client.run(path, self.server.target, self.server.pid)
            self._sent += len(run.seen) * (1 + round(used["disturbed"]))
            wait_for_rows(self.server, self._sent)
            rows.append(summary(trace, run, records(self.server.database)) | used)
            late = sum(row["late_server"] * row["requests"] for row in rows)
            if not in_full and late > LIMIT * CHUNKS * len(trace.items):
                break
        return pooled(rows)


def pooled(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return several traces of one load as one: shares by requests, other figures as means."""
    requests = sum(row["requests"] for row in rows)
    found: dict[str, Any] = {"rho": rows[0]["rho"], "requests": requests}
    for name in ("late_server", "missed"):
        found[name] = sum(row[name] * row["requests"] for row in rows) / requests
    names = ("rate_hz", "slower", *(f"cores_{who}" for who in USERS), "over_qt", "stages_ms")
    return found | {name: mean_of([row[name] for row in rows]) for name in names}


def bisect(passes: Callable[[float], bool], low: float, high: float, steps: int) -> float | None:
    """Return the highest value known to pass after `steps` halvings of log(high / low).

    Returns None when not even `low` passes. `low` is tried only where nothing else passed, as a low
    rate takes longest; `high` is not tried.
    """
    lowest = low
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low if low > lowest or passes(low) else None


def highest_rate(
    contender: Contender, known: dict[float, dict[str, Any]], halvings: int
) -> dict[str, Any]:
    """Return the highest rate that passes, and every step of the search."""
    steps: list[dict[str, Any]] = []

    def passes(rho: float) -> bool:
        steps.append(known.get(rho) or contender.at_rate(rho, in_full=False))
        return bool(steps[-1]["late_server"] <= LIMIT)

    limit_rho = bisect(passes, LOWEST, HIGHEST, halvings)
    rates = [step["rate_hz"] for step in steps if step["rho"] == limit_rho]
    told = [{k: step[k] for k in ("rho", "rate_hz", "requests", "late_server")} for step in steps]
    return {"rate_at_limit_hz": fmean(rates) if rates else None, "steps": told}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each version and load, and the rate of each at the limit."""
    if options.against is None:
        raise SystemExit("--against names the checkout to compare with")
    rows: list[dict[str, Any]] = []
    limits: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, load_process() as process:
        client, folder = Undisturbed(process), Path(name)
        traces = Traces(folder, "mix", options.requests, len(os.sched_getaffinity(0)))
        with (
            live_server(folder / "other", f"@{options.against.resolve()}") as other,
            live_server(folder / "this", OURS) as this,
        ):
            traces.measure(other, range(CHUNKS))
            contenders = {
                "other": Contender(client, traces, other),
                "this": Contender(client, traces, this),
            }
            for contender in contenders.values():
                contender.warm_up()
            for rho in SIDE_BY_SIDE:
                for version, contender in contenders.items():
                    rows.append({"version": version, **contender.at_rate(rho, in_full=True)})
            for version, contender in contenders.items():
                known = {row["rho"]: row for row in rows if row["version"] == version}
                found = highest_rate(contender, known, options.halvings)
                limits.append({"version": version, **found})
    return {
        "graphs": traces.pool.sources,
        "mean_solo_ms": fmean(solo.solo_ns for solo in traces.solo.values()) / 1e6,
        "rows": rows,
        "limits": limits,
    }


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
