"""Find what splitting a machine into devices costs, and what moving tasks gives back, simulated.

    python -m bench.scheduling.devices [--quick] [--seeds 3] [--requests 2000]

Requests and targets as in ``bench.scheduling.policies``. As many slots are run in four ways:

- one device: all slots and all memory in one, which no split can beat but by chance;
- fleet: a task goes where it starts first, and moves to a device or lane that comes free;
- no moves: a task goes where it starts first and stays there;
- by turns: device after device, whatever waits there.

GPU-like devices have four slots and suspend nothing; CPU-like ones have a slot and four lanes.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from bench.kit.script import Script, Table
from bench.scheduling.site import Site, this_machine
from serve.core.commands import Command
from serve.core.fleet.fleet import Fleet, make_scheduler
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.scheduler import Scheduler
from serve.core.types import Bytes, LaneId, TaskId
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import Simulation
from serve.sim.report import Answered, summarize

WAYS = ("one device", "fleet", "no moves", "by turns")
#: Name, devices, slots of each, lanes for each slot.
SHAPES = (
    ("2 GPU-like", 2, 4, 1),
    ("8 GPU-like", 8, 4, 1),
    ("2 CPU-like", 2, 1, 4),
    ("4 CPU-like", 4, 1, 4),
)
SCRIPT = Script(
    "devices",
    full={"seeds": 3, "requests": 2000, "rhos": (0.3, 0.5, 0.7, 0.9)},
    quick={"seeds": 1, "requests": 200, "rhos": (0.7,)},
    tables=[
        Table("The same slots in one device or several", "rows", {
            "devices": "{shape}", "ρ": "{rho}", "way": "{way}", "late": "{late:.2%}",
            "p99 of latency ÷ target": "{latency_over_qt_p99:.2f}",
            "µs a request": "{us_per_request:.0f}",
        })
    ],
)  # fmt: skip


class Staying(Fleet):
    """A fleet whose tasks stay where they went on arrival."""

    def _fill_idle_devices(self, out: list[Command]) -> None:
        """Move nothing."""

    def _bring_urgent(self, target: Scheduler, task_id: TaskId) -> None:
        """Move nothing."""


def facts(site: Site, first_lane: int, slots: int, per_slot: int, times: int = 1) -> DeviceFacts:
    """Return a device of `times` as many slots, lanes and memory."""
    lanes = tuple(map(LaneId, range(first_lane, first_lane + slots * per_slot * times)))
    budget_bytes = Bytes(times * site.budget_bytes)
    return DeviceFacts(budget_bytes, lanes, parallelism=slots * times, can_suspend=per_slot > 1)


def params_of(*devices: DeviceFacts) -> SchedulerParams:
    """Return a scheduler's parameters for these devices."""
    how = "preemptive" if devices[0].can_suspend else "rolling"
    return SchedulerParams(devices[0], devices[1:], policy="slack", discipline=how, max_queue=4096)


def play(scheduler: Scheduler | Fleet, requests: Sequence[Offered]) -> list[Answered]:
    """Return every request at its end."""
    simulation = Simulation(scheduler, DeviceModel())
    simulation.run(requests)
    return simulation.answered


def run(
    way: str, site: Site, shape: tuple[str, int, int, int], requests: Sequence[Offered]
) -> list[Answered]:
    """Return every request at its end, on the slots of that shape."""
    _, count, slots, per_slot = shape
    if way == "one device":
        return play(Scheduler(params_of(facts(site, 0, slots, per_slot, count))), requests)
    devices = [facts(site, n * slots * per_slot, slots, per_slot) for n in range(count)]
    if way == "by turns":
        apart = [play(Scheduler(params_of(d)), requests[n::count]) for n, d in enumerate(devices)]
        return [row for rows in apart for row in rows]
    params = params_of(*devices)
    return play(make_scheduler(params) if way == "fleet" else Staying(params), requests)


def rows(
    site: Site, shape: tuple[str, int, int, int], rho: float, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a row for each way."""
    whole = replace(site, cores=shape[1] * shape[2])
    offers = [whole.requests("mix", rho, seed, options.requests) for seed in range(options.seeds)]
    for way in WAYS:
        began_ns = time.process_time_ns()
        reports = [summarize(run(way, site, shape, requests)) for requests in offers]
        used_ns = time.process_time_ns() - began_ns
        late = [report.violation_rate for report in reports]
        yield {
            "shape": shape[0],
            "rho": rho,
            "way": way,
            "late": fmean(late),
            "late_by_seed": late,
            "latency_over_qt_p99": fmean(report.latency_over_qt_p99 for report in reports),
            "us_per_request": used_ns / 1e3 / options.requests / options.seeds,
        }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each shape, load and way."""
    site = this_machine()
    found = [
        row for shape in SHAPES for rho in options.rhos for row in rows(site, shape, rho, options)
    ]
    return {"requests": options.requests, "rows": found}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
