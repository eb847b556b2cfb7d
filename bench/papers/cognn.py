"""CoGNN's queues of training tasks, simulated: Table V, and the memory of groups (Figure 14).

    python -m bench.papers.cognn [--quick]

Queues, times and the GPU's memory are the authors' (``bench.papers.cognn_queues``); policies and
the scheduler are those that serve. All tasks of a queue are there at the beginning.

- Default runs one task after the other, each in a process of its own, whose start it pays.
- PipeSwitch does the same in a process that is there already.
- MPS runs two at a time in order of arrival. While both need more memory than there is, both are
  ten times slower (the paper's Figure 5: 9.87 times).
- CoGNN runs groups of at most two that fit the memory, one group after the other: in order of
  arrival (Base), by rising memory (LMCF), or the least with the most (BMC).
- `lmcf, no groups` is how a server here orders jobs: the next starts once it fits.

A task takes what Figure 15 shows for eight layers, as far as that is more than the least data set
takes: that much is the start of a process. Other numbers of layers take in proportion. How much two
tasks slow each other is not told, nor what a task costs that starts no process. So there are three
devices: on `occupancy` a task keeps as much of the GPU busy as the paper's Figure 4 says; on `full`
all of it, so that two at once gain nothing; on `fitted` also, and each task takes as much longer as
makes PipeSwitch's makespan that of Table V.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from bench.kit.script import Script, Table
from bench.papers.cognn_queues import (
    LOG_GROUP_MIB,
    OCCUPANCY,
    QUEUES,
    TABLE_V,
    TrainingTask,
)
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.policies import get_policy
from serve.core.types import Bytes, Capacity, LaneId, Nanos, QoS, Task, TaskEstimate, TaskId
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import simulate
from serve.sim.paper import shared_by
from serve.sim.report import SimReport
from serve.sim.workload import System

#: For tasks, of the V100's 32 GB.
MEMORY_BYTES = Bytes(26 << 30)
WORKERS = 2
PAGING = 10.0
#: Without a target; a minute has so many nanoseconds.
_NO_TARGET = QoS(Nanos(1 << 62))
_MINUTE_NS = 60e9
POLICIES = {"base": "fifo", "lmcf": "lmcf", "bmc": "bmc"}
NO_GROUPS = "lmcf, no groups"
SYSTEMS = (*TABLE_V, NO_GROUPS)
DEVICES = ("occupancy", "full", "fitted")
FIGURES = ("makespan", "jct", "qt")

SCRIPT = Script(
    "cognn",
    full={"queues": tuple(QUEUES), "devices": DEVICES},
    quick={"queues": ("GCN",), "devices": ("fitted",)},
    tables=[
        Table("Minutes, means over the queues", "means", {
            "device": "{device}", "system": "{system}",
            "makespan": "{makespan:.2f}", "paper": "{paper_makespan:.2f}",
            "JCT": "{jct:.2f}", "paper ": "{paper_jct:.2f}",
            "QT": "{qt:.2f}", "paper  ": "{paper_qt:.2f}",
        }),
        Table("Default ÷ LMCF", "ratios", {
            "device": "{device}", "queue": "{queue}", "JCT": "{jct:.1f}",
            "paper": "{paper_jct:.1f}", "QT": "{qt:.1f}", "paper ": "{paper_qt:.1f}",
        }),
        Table("Groups, Figure 14", "groups", {
            "queue": "{queue}", "policy": "{policy}", "groups": "{count}",
            "in the paper": "{paper_count}", "most, GiB": "{most_gib:.2f}",
            "in the paper ": "{paper_most_gib:.2f}", "memory ÷ paper's": "{low:.2f} to {high:.2f}",
        }),
    ],
)  # fmt: skip


def beyond_s(name: str) -> float:
    """Return what each task of a queue takes beyond its work, by PipeSwitch's makespan."""
    told_s = 60 * TABLE_V["pipeswitch"][0][list(QUEUES).index(name)]
    return (told_s - sum(one.work_s for one in QUEUES[name])) / len(QUEUES[name])


def offered(
    queue: Sequence[TrainingTask], added_s: Callable[[TrainingTask], float]
) -> list[Offered]:
    """Return a queue's tasks, all there at once, each with what it takes beyond its work."""
    found = []
    for number, one in enumerate(queue):
        run_ns = Nanos(max(1, round((one.work_s + added_s(one)) * 1e9)))
        reserve = Bytes(one.reserve_bytes)
        task = Task(
            TaskId(number), one.model, 0, 0, Nanos(0),
            TaskEstimate(reserve, reserve, run_ns, run_ns), _NO_TARGET,
        )  # fmt: skip
        found.append(Offered(task, run_ns, Nanos(0)))
    return found


def parallelism(queue: Sequence[TrainingTask], device: str) -> float:
    """Return how many of the queue's tasks keep the device busy."""
    return 1 / fmean(OCCUPANCY[one.model] for one in queue) if device == "occupancy" else 1.0


def setup(name: str, queue_name: str, device: str) -> tuple[list[Offered], System]:
    """Return a queue's tasks, and a system on a device."""
    queue = QUEUES[queue_name]
    resident_s = beyond_s(queue_name) if device == "fitted" else 0.0
    tasks = offered(queue, lambda one: one.start_s if name == "default" else resident_s)
    grouped = name in POLICIES
    workers = 1 if name in ("default", "pipeswitch") else WORKERS
    unchecked = not grouped and name != NO_GROUPS
    params = SchedulerParams(
        DeviceFacts(
            Bytes(1 << 62) if unchecked else MEMORY_BYTES, tuple(map(LaneId, range(workers)))
        ),
        policy=POLICIES.get(name, "fifo" if unchecked else "lmcf"),
        discipline="barrier" if grouped else "rolling",
        # All tasks are planned together, as all are there at one time.
        window="fixed", window_ns=Nanos(1), prepare_ahead=len(queue), horizon=2 * len(queue),
    )  # fmt: skip
    model = DeviceModel(
        shared_by(parallelism(queue, device), WORKERS), switch_ns=Nanos(0), paging=PAGING,
        capacity_bytes=MEMORY_BYTES,
    )  # fmt: skip
    return tasks, System(params, model)


def simulated(name: str, queue_name: str, device: str) -> SimReport:
    """Return what a system makes of a queue."""
    tasks, system = setup(name, queue_name, device)
    return simulate(tasks, system.params, system.device)


def times(report: SimReport) -> dict[str, float]:
    """Return a report's figures in minutes."""
    found = report.makespan_ns, report.jct_mean_ns, report.quet_mean_ns
    return {name: ns / _MINUTE_NS for name, ns in zip(FIGURES, found, strict=True)}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures of each system on each queue, beside Table V's."""
    for device, queue, system in product(options.devices, options.queues, SYSTEMS):
        place = list(QUEUES).index(queue)
        told = TABLE_V.get(system, ())
        paper = {
            f"paper_{name}": minutes[place] for name, minutes in zip(FIGURES, told, strict=False)
        }
        yield {
            "device": device, "queue": queue, "system": system,
            **times(simulated(system, queue, device)),
            **paper,
        }  # fmt: skip


def groups(policy: str, name: str) -> dict[str, Any]:
    """Return the memory of a policy's groups beside the paper's; without the factor, as there."""
    queue = QUEUES[name]
    planned = get_policy(POLICIES[policy]).plan(
        [one.task for one in offered(queue, lambda _: 0.0)],
        Capacity(MEMORY_BYTES, WORKERS),
        Nanos(0),
    )
    gib = [
        sum(queue[task.task_id].peak_bytes for task in group.tasks) / (1 << 30) for group in planned
    ]
    paper_gib = [2**log / 1024 for log in LOG_GROUP_MIB[policy][name]]
    of_paper = [here / there for here, there in zip(gib, paper_gib, strict=False)]
    return {
        "queue": name, "policy": policy, "count": len(gib), "paper_count": len(paper_gib),
        "most_gib": max(gib), "paper_most_gib": max(paper_gib),
        "low": min(of_paper), "high": max(of_paper), "gib": gib, "paper_gib": paper_gib,
        "most_reserved_gib": max(
            sum(task.reserve_bytes for task in group.tasks) for group in planned
        ) / (1 << 30),
    }  # fmt: skip


def means(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each device and system: means over the queues."""
    result = []
    for device, system in dict.fromkeys((row["device"], row["system"]) for row in found):
        its = [row for row in found if (row["device"], row["system"]) == (device, system)]
        names = [*FIGURES, *(f"paper_{name}" for name in FIGURES if system in TABLE_V)]
        of_all = {name: fmean(row[name] for row in its) for name in names}
        result.append({"device": device, "system": system, **of_all})
    return result


def ratios(found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield how many times as good as Default's LMCF's figures are, by queue and on average."""
    names = [f"{whose}{name}" for name in ("jct", "qt") for whose in ("", "paper_")]
    by_place = {(row["device"], row["queue"], row["system"]): row for row in found}
    for device in dict.fromkeys(row["device"] for row in found):
        its = []
        for queue in dict.fromkeys(row["queue"] for row in found):
            default, lmcf = (by_place[device, queue, system] for system in ("default", "lmcf"))
            its.append({
                "device": device, "queue": queue,
                **{name: default[name] / lmcf[name] for name in names},
            })  # fmt: skip
        yield from its
        of_all = {name: fmean(row[name] for row in its) for name in names}
        yield {"device": device, "queue": "mean", **of_all}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of both."""
    found = list(rows(options))
    return {
        "memory_bytes": MEMORY_BYTES, "workers": WORKERS, "paging": PAGING,
        "means": means(found), "ratios": list(ratios(found)),
        "groups": [groups(policy, name) for policy in LOG_GROUP_MIB for name in options.queues],
        "rows": found,
    }  # fmt: skip


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
