"""More load than the lanes can carry, with `shed_late` and without: what is still served in time.

    python -m bench.scheduling.overload [--quick] [--seeds 3] [--requests 2500] [--out FILE]

From half a load, where nothing should be shed, to three times what the lanes can carry.

Simulated as in ``bench.scheduling.policies`` (calibrated run times, the mix, targets of 2 × solo,
`slack` with `preemptive`): a flood, then a calm at ρ 0.3. Of the flood: how many were admitted, how
many of those were answered in time, and the goodput in time, as work (solo time) per second and
core. Of the calm: how many were late, and how long after the flood's last arrival the last of those
came.

Then clients that wait for each answer before they ask again, so many at once, and again after 1 ms
when they are refused: what `shed_late` does to those who never ask for more than is answered.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs
from rich.console import Console
from rich.table import Table

from bench.kit.result import write_result
from bench.scheduling.policies import Site, this_machine
from serve.core.scheduler import Scheduler
from serve.core.types import Completed, Nanos, TaskId
from serve.sim.device import Offered
from serve.sim.engine import Simulation
from serve.sim.report import Answered
from serve.sim.workload import make_system

CLIENTS = (2, 4, 8, 16, 32)
THINK_NS = 1_000_000
RHOS = (0.5, 0.7, 0.9, 1.1, 1.5, 2.0, 3.0)
CALM_RHO = 0.3
CALM_SHARE = 0.2


def flood_and_calm(
    site: Site, rho: float, seed: int, count: int
) -> tuple[list[Offered], list[Offered]]:
    flood = site.requests("mix", rho, seed, count)
    calm = site.requests("mix", CALM_RHO, seed + 1000, int(CALM_SHARE * count))
    ends_ns = flood[-1].task.arrived_ns
    later = [
        replace(
            offered,
            task=structs.replace(
                offered.task,
                task_id=TaskId(offered.task.task_id + count),
                arrived_ns=Nanos(offered.task.arrived_ns + ends_ns),
            ),
        )
        for offered in calm
    ]
    return flood, later


def in_time(row: Answered) -> bool:
    return isinstance(row.outcome, Completed) and row.cause is None


def serve(site: Site, requests: Sequence[Offered], shed: bool) -> list[Answered]:
    made = make_system("slack", "preemptive", cores=site.cores, budget_bytes=site.budget_bytes)
    simulation = Simulation(Scheduler(replace(made.params, shed_late=shed)), made.device)
    simulation.run(requests)
    return simulation.answered


def measure(site: Site, rho: float, seed: int, count: int, shed: bool) -> dict[str, float]:
    flood, calm = flood_and_calm(site, rho, seed, count)
    rows = {row.task.task_id: row for row in serve(site, [*flood, *calm], shed)}
    flooded = [rows[offered.task.task_id] for offered in flood]
    admitted = [row for row in flooded if isinstance(row.outcome, Completed)]
    kept = [row for row in flooded if in_time(row)]
    span_ns = flood[-1].task.arrived_ns - flood[0].task.arrived_ns
    ends_ns = flood[-1].task.arrived_ns
    late = [
        offered.task.arrived_ns - ends_ns
        for offered in calm
        if not in_time(rows[offered.task.task_id])
    ]
    return {
        "admitted": len(admitted) / len(flood),
        "attainment": len(kept) / max(1, len(admitted)),
        "in_time": len(kept) / len(flood),
        "goodput": sum(r.task.estimate.solo_ns for r in kept) / span_ns / site.cores,
        "calm_late": len(late) / len(calm),
        "recovery_ms": max(late, default=0) / 1e6,
    }


def measure_closed(site: Site, clients: int, count: int, shed: bool) -> dict[str, float]:
    source = iter(site.requests("mix", 1.0, 0, count))
    made = make_system("slack", "preemptive", cores=site.cores, budget_bytes=site.budget_bytes)
    simulation = Simulation(Scheduler(replace(made.params, shed_late=shed)), made.device)

    def ask() -> bool:
        offered = next(source, None)
        if offered is not None:
            task = structs.replace(offered.task, arrived_ns=simulation.now_ns)
            simulation.offer(replace(offered, task=task))
        return offered is not None

    more = all(ask() for _ in range(clients))
    told = 0
    while more:
        if told == len(simulation.answered):
            simulation.step()
            continue
        if not isinstance(simulation.answered[told].outcome, Completed):
            simulation.now_ns = Nanos(simulation.now_ns + THINK_NS)
        told += 1
        more = ask()
    answered = [row for row in simulation.answered if isinstance(row.outcome, Completed)]
    return {
        "refused": 1 - len(answered) / told,
        "in_time": sum(map(in_time, answered)) / told,
        "answered_per_s": len(answered) / simulation.now_ns * 1e9,
    }


def closed_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("clients", "shed_late", "refused", "in time", "answers/s", title="Closed loop")
    for row in rows:
        shares = (f"{row[key]:.1%}" for key in ("refused", "in_time"))
        table.add_row(
            str(row["clients"]), str(row["shed_late"]), *shares, f"{row['answered_per_s']:.0f}"
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="one seed, 500 requests; no file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2500)
    parser.add_argument("--out", type=Path, default=Path("bench/results/overload.json"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.requests = 1, 500
    site = this_machine()
    rows: list[dict[str, Any]] = []
    for rho in RHOS:
        for shed in (False, True):
            runs = [
                measure(site, rho, seed, options.requests, shed) for seed in range(options.seeds)
            ]
            means = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
            rows.append({"rho": rho, "shed_late": shed, **means, "by_seed": runs})
    table = Table(title="A flood, and the calm after it")
    heads = ("admitted", "attainment", "in_time", "goodput", "calm_late", "recovery_ms")
    for head in ("ρ", "shed_late", *heads):
        table.add_column(head, justify="right")
    for row in rows:
        shares = [f"{row[key]:.1%}" for key in heads[:3]]
        others = (f"{row['goodput']:.2f}", f"{row['calm_late']:.1%}", f"{row['recovery_ms']:.0f}")
        table.add_row(str(row["rho"]), str(row["shed_late"]), *shares, *others)
    closed = [
        {"clients": n, "shed_late": shed, **measure_closed(site, n, options.requests, shed)}
        for n in CLIENTS
        for shed in (False, True)
    ]
    Console(width=110).print(table, closed_table(closed))
    if not options.quick:
        result = {
            "requests": options.requests,
            "rows": rows,
            "closed": closed,
        }
        write_result(options.out, result)


if __name__ == "__main__":
    main()
