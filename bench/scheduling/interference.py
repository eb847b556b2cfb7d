"""What it gives to know how much runs on one device slow one another.

    python -m bench.scheduling.interference [--quick] [--seeds 3] [--requests 2000] [--out FILE]

Simulated as in ``bench.scheduling.policies`` (calibrated run times, the mix, targets of 2 × solo)
on a device that suspends nothing, as a GPU, and on which a run beside k others takes `slowdown[k]`
times as long. ρ is rate × mean solo time: at 1 there is as much work as one lane alone can do. All
systems are `slack` + `preemptive`, see the same requests, and differ in

- so many lanes: whatever is ready runs, and nothing is known of the slowdown;
- the table: all lanes, and the scheduler knows the slowdown (``serve.core.rules.interference``);
- the late join: the same without its rule that one that is late in any case leaves room;
- a table that is wrong: what runs are slowed by taken for 25 % less, or more, than it is;
- merging: requests of one model may run as one, as in a server.

The last two devices are two cores with four lanes each, which suspend; ρ counts both, and without
the table only what is known differs. Missed is the share that is late.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from bench.kit.result import write_result
from bench.scheduling.policies import Site, missed_share, this_machine
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.rules import interference as company
from serve.core.slowdown import NO_SLOWDOWN
from serve.core.types import Bytes, LaneId
from serve.server.lane_run import LAUNCH_NS
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import simulate
from serve.sim.report import SimReport

RHOS = (0.5, 0.7, 0.9, 1.1)
MANY = "16 lanes"
#: Loads are so many times as high there.
MANY_TIMES = 6.5
QUICK_RHOS = (0.7,)
DEVICES = {
    "strong": (1.0, 1.6, 2.2, 2.9),
    "medium": (1.0, 1.3, 1.5, 1.7),
    "one after the other": (1.0, 2.0, 3.0, 4.0),
    # The more run at once, the more is done: 1.9 times as much on two lanes, 7.7 times on 16.
    MANY: (1.0, 1.05, 1.1, 1.15, *(round(1.2 + 0.08 * step, 2) for step in range(12))),
    "two cores, weak": (1.0, 1.15),
    "two cores, strong": (1.0, 1.3),
}
CORES = "two cores"
NOTHING = "nothing known"
TABLE = "the table"
WRONG = ("25 % too low", "25 % too high")
MERGING = "merging, "


def systems(device: str) -> tuple[str, ...]:
    if device.startswith(CORES):
        return NOTHING, TABLE, *WRONG, MERGING + NOTHING, MERGING + TABLE
    most = len(DEVICES[device])
    lanes = [f"{count * most // 4} lanes" for count in (1, 2, 3, 4)]
    return *lanes, TABLE, "the late join", *WRONG, MERGING + lanes[-1], MERGING + TABLE


def serve(site: Site, system: str, device: str, requests: Sequence[Offered]) -> SimReport:
    unions = site.union if system.startswith(MERGING) else None
    system = system.removeprefix(MERGING)
    known = slowdown = DEVICES[device]
    lanes, cores = (8, 2) if device.startswith(CORES) else (len(slowdown), None)
    if system == NOTHING:
        known = NO_SLOWDOWN
    elif system.endswith(" lanes"):
        lanes, known = int(system.split()[0]), NO_SLOWDOWN
    elif system.startswith("25 %"):
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
    late_joins = mock.patch.object(company, "leaves_room", return_value=True)
    with late_joins if system == "the late join" else nullcontext():
        return simulate(requests, params, DeviceModel(slowdown=slowdown))


def measure(
    site: Site, name: str, rho: float, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for each system."""
    alone = replace(site, cores=2 if name.startswith(CORES) else 1)
    offers = [alone.requests("mix", rho, seed, options.requests) for seed in range(options.seeds)]
    for system in systems(name):
        reports = [serve(site, system, name, requests) for requests in offers]
        missed = [missed_share(report) for report in reports]
        yield {
            "device": name,
            "slowdown": list(DEVICES[name]),
            "rho": rho,
            "system": system,
            "missed": statistics.fmean(missed),
            "missed_by_seed": missed,
            "latency_over_qt_p99": statistics.fmean(r.latency_over_qt_p99 for r in reports),
            "jct_mean_ms": statistics.fmean(r.jct_mean_ns for r in reports) / 1e6,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="one load, 500 requests; no file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("bench/results/interference.json"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.requests = 1, 500
    site = this_machine()
    rows: list[dict[str, Any]] = []
    for name, slowdown in DEVICES.items():
        times = MANY_TIMES if name == MANY else 1.0
        rhos = [round(rho * times, 2) for rho in (QUICK_RHOS if options.quick else RHOS)]
        rows += [row for rho in rhos for row in measure(site, name, rho, options)]
        table = Table(title=f"{name}, {slowdown}: late (p99 of latency ÷ target, mean JCT in ms)")
        for head in ("system", *(f"ρ {rho:g}" for rho in rhos)):
            table.add_column(head, justify="left" if head == "system" else "right")
        for system in systems(name):
            cells = [row for row in rows if (row["device"], row["system"]) == (name, system)]
            table.add_row(
                system,
                *(
                    f"{r['missed']:.1%} ({r['latency_over_qt_p99']:.1f}, {r['jct_mean_ms']:.1f})"
                    for r in cells
                ),
            )
        Console(width=140).print(table)
    if not options.quick:
        result = {"requests": options.requests, "rows": rows}
        write_result(options.out, result)


if __name__ == "__main__":
    main()
