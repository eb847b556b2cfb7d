"""The GNNSched paper's Figures 5 to 8, simulated: violations, latency, JCT, QUET.

    python -m bench.papers.gnnsched [--quick] [--runs 10] [--gpu-table FILE]

Run times and memory are calibrated on this machine, with the paper's models and queues
(``bench.papers.queues``); systems are the paper's (``serve.sim.paper``) and gnnserve. Only ratios
of times count: a slot is a multiple of the mean solo time, which the paper leaves out.

There are several devices, as the paper's results do not follow from what it tells of its own:

- `cores`: this machine's, each for one task.
- `v100`: one task keeps 70 % of it busy (CoGNN's Figure 4: 62 to 79 % of a V100), so that three
  tasks at once each take 2.1 times as long.
- `implied`: one task keeps 30 % of it busy, and subgraphs of a data set are about alike in size.
- `gpu`: slowdowns by the table that `make gpu-check` measured, with `--gpu-table`.

On all but the cores memory is just enough for any four tasks; while more is reserved, all are
`paging` times slower (CoGNN's Figure 5: 8 to 12 times).

`grid` tells which share and slot would give the paper's figures; `paging` what that factor does.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.kit.script import Script, Table
from bench.papers.queues import LOADS, MODELS, QUEUES, Queues, queues_here
from bench.scheduling.site import missed_share
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.types import Bytes, LaneId
from serve.graphs.datasets import TABLE_4
from serve.sim.device import DeviceModel
from serve.sim.engine import simulate
from serve.sim.paper import GNNSCHED, paper_system, shared_by
from serve.sim.report import SimReport
from serve.sim.workload import BASELINES, System, make_system

OURS = "gnnserve"
SYSTEMS = (*BASELINES, *GNNSCHED, OURS)
FIGURES = (
    "violation_rate", "latency_over_qt_p50", "latency_over_qt_p90", "latency_over_qt_p99",
    "jct_over_qt_mean", "quet_over_qt_mean",
)  # fmt: skip
#: How much lower GNNSched is on average in the paper: figure, baseline, share.
HEADLINES = (
    ("latency_over_qt_p50", "mps_base", 0.262),
    ("latency_over_qt_p90", "mps_base", 0.274),
    ("latency_over_qt_p99", "mps_base", 0.319),
    ("jct_over_qt_mean", "default", 0.606),
    ("jct_over_qt_mean", "mps_base", 0.268),
    ("jct_over_qt_mean", "mps_aggr", 0.627),
)
#: Highest violation rates at the high load in the paper.
PAPER_WORST = {"default": 0.93, "mps_base": 0.20, "mps_aggr": 0.91, "sqtf": 0.08, "bqt": 0.08}
#: What BQT changes beside SQTF in the paper.
PAPER_BQT = {"jct_over_qt_mean": -0.006, "quet_over_qt_mean": 0.008}
PAGING = 10.0
#: Lanes of gnnserve on a GPU.
_GPU_LANES = 4
_CORES_BYTES = 1 << 40

SCRIPT = Script(
    "gnnsched",
    full={
        "runs": 10, "gpu_table": None, "shares": (0.7, 0.5, 0.3, 0.2),
        "slots": (1.0, 1.5, 2.0, 3.0), "pagings": (1.0, 3.0, 10.0), "datasets": tuple(TABLE_4),
    },
    quick={
        "runs": 1, "shares": (0.3,), "slots": (1.5,), "pagings": (10.0,), "datasets": ("pubmed",),
    },
    tables=[
        Table("Most late or refused in any queue at the high load", "worst", {
            "device": "{device}", "ρ": "{rho:.2f}", **{name: f"{{{name}:.0%}}" for name in SYSTEMS},
        }),
        Table("GNNSched lower by, on average", "headlines", {
            "device": "{device}", "figure": "{figure}", "than": "{against}", "paper": "{paper:.1%}",
            "GNNSched here": "{gnnsched:.1%}", "gnnserve here": "{gnnserve:.1%}",
        }),
        Table("BQT beside SQTF", "bqt", {
            "device": "{device}", "figure": "{figure}", "paper": "{paper:+.1%}",
            "here": "{here:+.1%}",
        }),
        Table("Most late at the high load, by what one task takes of the device", "grid", {
            "share": "{share:g}", "slot, solos": "{slot:g}", "ρ": "{rho:.2f}",
            **{name: f"{{{name}:.0%}}" for name in SYSTEMS},
        }),
        Table("MPS-Aggr by the price of paging", "paging", {
            "device": "{device}", "paging": "{paging:g}", "late at the high load": "{worst:.0%}",
        }),
    ],
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A simulated device with its queues."""

    name: str
    queues: Queues
    model: DeviceModel
    #: Slots in mean solo times.
    slot: float
    budget_bytes: int
    #: Cores that suspend; 0 for a GPU.
    cores: int = 0

    @property
    def capacity(self) -> float:
        """Tasks' worth of work that it does in the solo time of one."""
        return max(count / slow for count, slow in enumerate(self.model.slowdown, 1))

    def rho(self, load: str) -> float:
        """Return the offered load as a share of what the device can do."""
        return LOADS[load] / (self.slot * self.capacity)

    def system(self, name: str) -> System:
        """Return a system on this device."""
        if name != OURS:
            return paper_system(name, self.budget_bytes, self.model)
        if self.cores:
            params = make_system(
                "slack", "preemptive", cores=self.cores, budget_bytes=self.budget_bytes
            ).params
            return System(params, DeviceModel())
        lanes = tuple(LaneId(lane) for lane in range(_GPU_LANES))
        facts = DeviceFacts(
            Bytes(self.budget_bytes), lanes, slowdown=self.model.slowdown[:_GPU_LANES]
        )
        return System(SchedulerParams(facts, policy="slack", discipline="rolling"), self.model)

    def serve(self, system: str, load: str, queue: str, runs: int) -> list[SimReport]:
        """Return the reports of `runs` queues."""
        made = self.system(system)
        reports = []
        for seed in range(runs):
            slot_s = self.slot * self.queues.mean_solo_s(queue, seed)
            requests = self.queues.requests(queue, LOADS[load], slot_s, seed)
            reports.append(simulate(requests, made.params, made.device))
        return reports

    def worst(self, system: str, runs: int) -> float:
        """Return the largest share late or refused of any queue at the high load."""
        return max(
            fmean(map(missed_share, self.serve(system, "high", queue, runs))) for queue in QUEUES
        )


def gpu(name: str, queues: Queues, slowdown: Sequence[float], slot: float) -> Device:
    """Return a device whose memory is just enough for any four tasks."""
    memory = queues.four_tasks_bytes()
    model = DeviceModel(slowdown=tuple(slowdown), paging=PAGING, capacity_bytes=memory)
    return Device(name, queues, model, slot, memory)


def devices(queues: Queues, cores: int, table: Path | None) -> list[Device]:
    """Return the devices, `gpu` only where there is a table."""
    found = [
        Device("cores", queues, DeviceModel(slowdown=shared_by(cores)), 2.0, _CORES_BYTES, cores),
        gpu("v100", queues, shared_by(1 / 0.7), 2.0),
        gpu("implied", queues.alike(), shared_by(1 / 0.3), 1.5),
    ]
    if table is not None:
        found.append(gpu("gpu", queues, measured_slowdown(table), 2.0))
    return found


def measured_slowdown(path: Path) -> list[float]:
    """Return the slowdown beside 0, 1, 2, … others from a result of ``bench.gpu.concurrency``.

    Numbers of others between those measured are interpolated.
    """
    told = json.loads(path.read_text(encoding="utf-8"))["slowdown"]["table"]
    known = sorted((int(others), float(slower)) for others, slower in told.items())
    found = []
    for (low, slow), (high, slower) in pairwise(known):
        found += [slow + (slower - slow) * (at - low) / (high - low) for at in range(low, high)]
    return [*found, known[-1][1]]


def rows(device: Device, runs: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each load, queue and system."""
    for load in LOADS:
        for queue in QUEUES:
            for system in SYSTEMS:
                reports = device.serve(system, load, queue, runs)
                found = {
                    name: fmean(getattr(report, name) for report in reports) for name in FIGURES
                }
                # A refused request is no answer in time either.
                found["violation_rate"] = fmean(map(missed_share, reports))
                yield {
                    "device": device.name, "load": load, "rho": device.rho(load), "queue": queue,
                    "system": system, **found,
                }  # fmt: skip


def lower(found: Sequence[dict[str, Any]], ours: Sequence[str], than: str, figure: str) -> float:
    """Return how much lower a figure is than another system's, averaged over loads and queues."""
    by_case = {(row["load"], row["queue"], row["system"]): row[figure] for row in found}
    return fmean(
        1 - by_case[load, queue, system] / by_case[load, queue, than]
        for load in LOADS
        for queue in QUEUES
        for system in ours
        if by_case[load, queue, than]
    )


def headlines(device: str, found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield how far GNNSched's two policies, and gnnserve, are below the baselines."""
    for figure, against, paper in HEADLINES:
        yield {
            "device": device, "figure": figure, "against": against, "paper": paper,
            "gnnsched": lower(found, GNNSCHED, against, figure),
            "gnnserve": lower(found, (OURS,), against, figure),
        }  # fmt: skip


def bqt(device: str, found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield how BQT's figures differ from SQTF's, as shares of these."""
    for figure, paper in PAPER_BQT.items():
        sums = {
            system: sum(row[figure] for row in found if row["system"] == system)
            for system in GNNSCHED
        }
        here = sums["bqt"] / sums["sqtf"] - 1 if sums["sqtf"] else 0.0
        yield {"device": device, "figure": figure, "paper": paper, "here": here}


def worst(device: Device, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the highest violation rate of each system at the high load."""
    high = [row for row in found if row["load"] == "high"]
    rates = {
        system: max(row["violation_rate"] for row in high if row["system"] == system)
        for system in SYSTEMS
    }
    return {"device": device.name, "rho": device.rho("high"), **rates}


def grid(queues: Queues, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the highest violation rates by what one task takes of a device, and by slot."""
    for share in options.shares:
        for slot in options.slots:
            device = gpu("", queues, shared_by(1 / share), slot)
            found = {system: device.worst(system, options.runs) for system in SYSTEMS}
            yield {"share": share, "slot": slot, "rho": device.rho("high"), **found}


def paging(found: Sequence[Device], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what MPS-Aggr misses by how much slower paging is."""
    for device in found:
        if device.cores:
            continue
        for factor in options.pagings:
            priced = replace(device, model=replace(device.model, paging=factor))
            told = priced.worst("mps_aggr", options.runs)
            yield {"device": device.name, "paging": factor, "worst": told}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all rows and what they come to."""
    with tempfile.TemporaryDirectory() as folder:
        queues, cores, sources = queues_here(Path(folder), options.datasets)
    found = devices(queues, cores, options.gpu_table and Path(options.gpu_table))
    return {"runs": options.runs, "graphs": sources, **figures(queues, found, options)}


def figures(queues: Queues, found: Sequence[Device], options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of these devices."""
    by_device = {device.name: list(rows(device, options.runs)) for device in found}
    return {
        "loads": LOADS,
        "models": MODELS,
        "slots": {device.name: device.slot for device in found},
        "paper_worst": PAPER_WORST,
        "worst": [worst(device, by_device[device.name]) for device in found],
        "headlines": [row for name, its in by_device.items() for row in headlines(name, its)],
        "bqt": [row for name, its in by_device.items() for row in bqt(name, its)],
        "grid": list(grid(queues.alike(), options)),
        "paging": list(paging(found, options)),
        "rows": [row for its in by_device.values() for row in its],
    }


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
