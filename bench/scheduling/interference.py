"""Find what it is worth to know how much runs on one device slow one another, simulated.

    python -m bench.scheduling.interference [--quick] [--seeds 3] [--requests 2000]

Requests and targets as in ``bench.scheduling.policies``, on a device that suspends nothing, as a
GPU, where a run beside k others takes `slowdown[k]` times as long. At ρ = 1 there is as much work
as one lane can do alone. All systems are `slack` + `preemptive`. They differ in

- a number of lanes: whatever is ready runs, and nothing is known of the slowdown;
- the table: all lanes, and the scheduler knows the slowdown (``serve.core.rules.co_running``);
- the late join: the table without the rule that a task that is late anyway leaves room;
- a wrong table: slowdowns taken for 25 % less, or more, than they are;
- merging: requests of one model may run as one, as in a server.

The last two devices are two cores with four lanes each, which suspend; there ρ counts both cores.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean
from typing import Any
from unittest import mock

from bench.kit.script import Script, Table
from bench.scheduling.site import Site, missed_share, this_machine
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.rules import co_running as rule
from serve.core.slowdown import NO_SLOWDOWN
from serve.core.types import Bytes, LaneId
from serve.server.lane_run import LAUNCH_NS
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import simulate
from serve.sim.report import SimReport

#: On 16 lanes loads are this many times as high.
MANY, MANY_TIMES = "16 lanes", 6.5
DEVICES = {
    "strong": (1.0, 1.6, 2.2, 2.9),
    "medium": (1.0, 1.3, 1.5, 1.7),
    "one after the other": (1.0, 2.0, 3.0, 4.0),
    # The more run at once, the more is done: 1.9 times as much on two lanes, 7.7 times on 16.
    MANY: (1.0, 1.05, 1.1, 1.15, *(round(1.2 + 0.08 * step, 2) for step in range(12))),
    "two cores, weak": (1.0, 1.15),
    "two cores, strong": (1.0, 1.3),
}
CORES, NOTHING, TABLE, LATE_JOIN, MERGING = (
    "two cores", "nothing known", "the table", "the late join", "merging, ",
)  # fmt: skip
WRONG = ("25 % too low", "25 % too high")
SCRIPT = Script(
    "interference",
    full={"seeds": 3, "requests": 2000, "rhos": (0.5, 0.7, 0.9, 1.1)},
    quick={"seeds": 1, "requests": 100, "rhos": (0.7,)},
    tables=[
        Table("Late", "rows", {
            "device": "{device}", "ρ": "{rho:g}", "system": "{system}", "late": "{missed:.1%}",
            "p99 of latency ÷ target": "{latency_over_qt_p99:.1f}",
            "mean JCT, ms": "{jct_mean_ms:.1f}",
        })
    ],
)  # fmt: skip


def systems(device: str) -> tuple[str, ...]:
    """Return the systems that are compared on the device."""
    if device.startswith(CORES):
        return NOTHING, TABLE, *WRONG, MERGING + NOTHING, MERGING + TABLE
    most = len(DEVICES[device])
    lanes = [f"{count * most // 4} lanes" for count in (1, 2, 3, 4)]
    return *lanes, TABLE, LATE_JOIN, *WRONG, MERGING + lanes[-1], MERGING + TABLE


def serve(site: Site, system: str, device: str, requests: Sequence[Offered]) -> SimReport:
    """Simulate the system on the device."""
    unions = site.union if system.startswith(MERGING) else None
    system = system.removeprefix(MERGING)
    known = slowdown = DEVICES[device]
    lanes, cores = (8, 2) if device.startswith(CORES) else (len(slowdown), None)
    if system == NOTHING:
        known = NO_SLOWDOWN
    elif system.endswith(" lanes"):
        lanes, known = int(system.split()[0]), NO_SLOWDOWN
    elif system in WRONG:
        factor = 0.75 if system.endswith("low") else 1.25
        known = tuple(1 + factor * (value - 1) for value in slowdown)
    facts = DeviceFacts(
        Bytes(1 << 40),
        tuple(map(LaneId, range(lanes))),
        parallelism=cores,
        can_suspend=cores is not None,
        launch_ns=LAUNCH_NS,
        slowdown=known,
    )
    params = SchedulerParams(
        facts, policy="slack", discipline="preemptive", max_queue=1 << 20, unions=unions
    )
    late_joins = mock.patch.object(rule, "leaves_room", return_value=True)
    with late_joins if system == LATE_JOIN else nullcontext():
        return simulate(requests, params, DeviceModel(slowdown=slowdown))


def rows(
    site: Site, device: str, rho: float, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a row for each system."""
    alone = replace(site, cores=2 if device.startswith(CORES) else 1)
    offers = [alone.requests("mix", rho, seed, options.requests) for seed in range(options.seeds)]
    for system in systems(device):
        reports = [serve(site, system, device, requests) for requests in offers]
        missed = [missed_share(report) for report in reports]
        yield {
            "device": device,
            "slowdown": list(DEVICES[device]),
            "rho": rho,
            "system": system,
            "missed": fmean(missed),
            "missed_by_seed": missed,
            "latency_over_qt_p99": fmean(report.latency_over_qt_p99 for report in reports),
            "jct_mean_ms": fmean(report.jct_mean_ns for report in reports) / 1e6,
        }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each device, load and system."""
    site = this_machine()
    loads = [
        (device, round(rho * (MANY_TIMES if device == MANY else 1.0), 2))
        for device in DEVICES
        for rho in options.rhos
    ]
    found = [row for device, rho in loads for row in rows(site, device, rho, options)]
    return {"requests": options.requests, "rows": found}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
