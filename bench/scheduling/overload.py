"""Find what is still answered in time under overload, with `shed_late` and without, simulated.

    python -m bench.scheduling.overload [--quick] [--seeds 3] [--requests 2500]

Requests and targets as in ``bench.scheduling.policies``, `slack` with `preemptive`: a flood at load
ρ, then a calm at ρ 0.3. Of the flood: the share admitted, the share of those in time, and the
goodput in time, as work (solo time) a second and core. Of the calm: the share late, and how long
after the flood's last arrival the last late one came. Then closed-loop clients, which wait for each
answer before they ask again, and ask again 1 ms after a refusal.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

from msgspec import structs

from bench.kit.script import Script, Table
from bench.scheduling.site import Site, this_machine
from serve.core.scheduler import Scheduler
from serve.core.types import Completed, Nanos, TaskId
from serve.sim.device import Offered
from serve.sim.engine import Simulation
from serve.sim.report import Answered
from serve.sim.workload import make_system

THINK_NS = 1_000_000
CALM_RHO, CALM_SHARE = 0.3, 0.2
SCRIPT = Script(
    "overload",
    full={
        "seeds": 3, "requests": 2500, "clients": (2, 4, 8, 16, 32),
        "rhos": (0.5, 0.7, 0.9, 1.1, 1.5, 2.0, 3.0),
    },
    quick={"seeds": 1, "requests": 200, "clients": (4,), "rhos": (1.5,)},
    tables=[
        Table("A flood, and the calm after it", "rows", {
            "ρ": "{rho}", "shed_late": "{shed_late}", "admitted": "{admitted:.1%}",
            "in time of these": "{attainment:.1%}", "in time of all": "{in_time:.1%}",
            "goodput": "{goodput:.2f}", "late in the calm": "{calm_late:.1%}",
            "recovery, ms": "{recovery_ms:.0f}",
        }),
        Table("Closed loop", "closed", {
            "clients": "{clients}", "shed_late": "{shed_late}", "refused": "{refused:.1%}",
            "in time": "{in_time:.1%}", "answers/s": "{answered_per_s:.0f}",
        }),
    ],
)  # fmt: skip


def simulation_of(site: Site, shed: bool) -> Simulation:
    """Return a server on the virtual clock."""
    made = make_system("slack", "preemptive", cores=site.cores, budget_bytes=site.budget_bytes)
    return Simulation(Scheduler(replace(made.params, shed_late=shed)), made.device)


def flood_and_calm(
    site: Site, rho: float, seed: int, count: int
) -> tuple[list[Offered], list[Offered]]:
    """Return the flood's requests, and those that come after it."""
    flood = site.requests("mix", rho, seed, count)
    calm = site.requests("mix", CALM_RHO, seed + 1000, int(CALM_SHARE * count))
    ends_ns = flood[-1].task.arrived_ns

    def later(offered: Offered) -> Offered:
        task = structs.replace(
            offered.task,
            task_id=TaskId(offered.task.task_id + count),
            arrived_ns=Nanos(offered.task.arrived_ns + ends_ns),
        )
        return replace(offered, task=task)

    return flood, [later(offered) for offered in calm]


def in_time(row: Answered) -> bool:
    """Return True when the request has a result that was not late."""
    return isinstance(row.outcome, Completed) and row.cause is None


def flooded(site: Site, rho: float, seed: int, count: int, shed: bool) -> dict[str, float]:
    """Return the figures of one flood and its calm."""
    flood, calm = flood_and_calm(site, rho, seed, count)
    simulation = simulation_of(site, shed)
    simulation.run([*flood, *calm])
    rows = {row.task.task_id: row for row in simulation.answered}
    ended = [rows[offered.task.task_id] for offered in flood]
    admitted = sum(isinstance(row.outcome, Completed) for row in ended)
    kept = [row for row in ended if in_time(row)]
    ends_ns = flood[-1].task.arrived_ns
    late_ns = [
        offered.task.arrived_ns - ends_ns
        for offered in calm
        if not in_time(rows[offered.task.task_id])
    ]
    work_ns = sum(row.task.estimate.solo_ns for row in kept)
    return {
        "admitted": admitted / len(flood),
        "attainment": len(kept) / max(1, admitted),
        "in_time": len(kept) / len(flood),
        "goodput": work_ns / (ends_ns - flood[0].task.arrived_ns) / site.cores,
        "calm_late": len(late_ns) / len(calm),
        "recovery_ms": max(late_ns, default=0) / 1e6,
    }


def closed(site: Site, clients: int, count: int, shed: bool) -> dict[str, float]:
    """Return the figures of clients that wait for each answer."""
    source = iter(site.requests("mix", 1.0, 0, count))
    simulation = simulation_of(site, shed)

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


def means(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each figure."""
    return {key: fmean(run[key] for run in runs) for key in runs[0]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return rows of the floods and of the closed loops."""
    site, count = this_machine(), options.requests
    rows: list[dict[str, Any]] = []
    for rho, shed in product(options.rhos, (False, True)):
        runs = [flooded(site, rho, seed, count, shed) for seed in range(options.seeds)]
        rows.append({"rho": rho, "shed_late": shed, **means(runs)})
    loops = [
        {"clients": clients, "shed_late": shed, **closed(site, clients, count, shed)}
        for clients, shed in product(options.clients, (False, True))
    ]
    return {"requests": count, "rows": rows, "closed": loops}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
