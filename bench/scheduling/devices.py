"""What it costs to split a machine into devices, and what moving tasks between them gives back.

    python -m bench.scheduling.devices [--quick] [--seeds 3] [--requests 2000] [--out FILE]

Simulated as in ``bench.scheduling.policies`` (calibrated run times, the mix, targets of 2 × solo),
the same requests for four ways to run them on as many slots:

- one device: all slots and all memory in one, which no split can beat but by chance;
- fleet: a task goes where it starts first, and leaves a loaded device for an idle one, or
  for a lane that comes free when it is the most urgent;
- no moves: it goes where it starts first and stays there;
- by turns: device after device, whatever waits there.

GPU-like devices (four slots, nothing is suspended) and CPU-like ones (a slot, four lanes). Late is
the share answered after the target; the last column is the processor time of the simulation.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kit.result import write_result
from bench.scheduling.policies import Site, this_machine
from serve.core.commands import Command
from serve.core.fleet.fleet import Fleet, make_scheduler
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.scheduler import Scheduler
from serve.core.types import Bytes, LaneId, TaskId
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import Simulation
from serve.sim.report import Answered, summarize

RHOS = (0.3, 0.5, 0.7, 0.9)
QUICK_RHOS = (0.7,)
WAYS = ("one device", "fleet", "no moves", "by turns")


class Staying(Fleet):
    """Tasks stay where they went on arrival."""

    def _fill_idle_devices(self, out: list[Command]) -> None:
        """Nothing moves."""

    def _bring_urgent(self, target: Scheduler, task_id: TaskId) -> None:
        """Nothing moves."""


#: Name, devices, slots of each, lanes for each slot.
SHAPES = (
    ("2 GPU-like", 2, 4, 1),
    ("8 GPU-like", 8, 4, 1),
    ("2 CPU-like", 2, 1, 4),
    ("4 CPU-like", 4, 1, 4),
)


def facts(site: Site, first_lane: int, slots: int, per_slot: int, times: int = 1) -> DeviceFacts:
    lanes = tuple(map(LaneId, range(first_lane, first_lane + slots * per_slot * times)))
    budget_bytes = Bytes(times * site.budget_bytes)
    return DeviceFacts(budget_bytes, lanes, parallelism=slots * times, can_suspend=per_slot > 1)


def params_of(*devices: DeviceFacts) -> SchedulerParams:
    how = "preemptive" if devices[0].can_suspend else "rolling"
    return SchedulerParams(devices[0], devices[1:], policy="slack", discipline=how, max_queue=4096)


def play(scheduler: Scheduler | Fleet, requests: Sequence[Offered]) -> list[Answered]:
    simulation = Simulation(scheduler, DeviceModel())
    simulation.run(requests)
    return simulation.answered


def run(
    way: str, site: Site, shape: tuple[str, int, int, int], requests: Sequence[Offered]
) -> list[Answered]:
    _, count, slots, per_slot = shape
    if way == "one device":
        return play(Scheduler(params_of(facts(site, 0, slots, per_slot, count))), requests)
    devices = [facts(site, n * slots * per_slot, slots, per_slot) for n in range(count)]
    if way == "by turns":
        apart = [play(Scheduler(params_of(d)), requests[n::count]) for n, d in enumerate(devices)]
        return [row for rows in apart for row in rows]
    params = params_of(*devices)
    return play(make_scheduler(params) if way == "fleet" else Staying(params), requests)


def measure(
    site: Site, shape: tuple[str, int, int, int], rho: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each way."""
    whole = replace(site, cores=shape[1] * shape[2])
    offers = [whole.requests("mix", rho, seed, options.requests) for seed in range(options.seeds)]
    rows = []
    for way in WAYS:
        late, p99, used_ns = [], [], 0
        for requests in offers:
            began_ns = time.process_time_ns()
            report = summarize(run(way, site, shape, requests))
            used_ns += time.process_time_ns() - began_ns
            late.append(report.violation_rate)
            p99.append(report.latency_over_qt_p99)
        rows.append(
            {
                "shape": shape[0],
                "rho": rho,
                "way": way,
                "late": statistics.fmean(late),
                "late_by_seed": late,
                "latency_over_qt_p99": statistics.fmean(p99),
                "us_per_request": used_ns / 1e3 / options.requests / options.seeds,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="one load, 500 requests; no file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("bench/results/devices.json"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.requests = 1, 500
    site = this_machine()
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for rho in QUICK_RHOS if options.quick else RHOS:
            rows += measure(site, shape, rho, options)
    table = Table(title="The same slots in one device or several")
    for head in ("devices", "ρ", "way", "late (by seed)", "p99 of latency ÷ QT", "µs a request"):
        table.add_column(head, justify="right")
    for row in rows:
        seeds = ", ".join(f"{late:.1%}" for late in row["late_by_seed"])
        table.add_row(
            row["shape"],
            str(row["rho"]),
            row["way"],
            f"{row['late']:.2%} ({seeds})",
            f"{row['latency_over_qt_p99']:.2f}",
            f"{row['us_per_request']:.0f}",
        )
    Console(width=120).print(table)
    if not options.quick:
        result = {"requests": options.requests, "rows": rows}
        write_result(options.out, result)


if __name__ == "__main__":
    main()
