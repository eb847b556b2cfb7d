"""The GNNSched paper's Figures 9 and 10: errors of memory estimates, and what decisions cost.

    python -m bench.papers.gnnsched_costs [--quick] [--data FOLDER] [--graphs 25] [--runs 5]
        [--edges 200000]

Figure 9: estimate ÷ measured − 1 of peak memory, for the paper's models on 25 subgraphs of each of
its data sets, in PyG's own code as there. They have at most `edges` edges: a deviation shows in
small ones, and large ones take minutes. Beside it stand the cost functions of the paper's Table 2
× 1.1, which are what GNNSched itself would have estimated (``bench.models.pmc_accuracy``).

Figure 10: time for estimating, for scheduling and for inserting the buffer, each as a share of the
run time, at both loads. The paper's queues (``bench.papers.queues``) are simulated once; the events
of that simulation are then handled again by a new scheduler, timed as a whole. What inserts a
buffer is a lane's meter: it allows a run its reservation and lifts that afterwards. The paper
compares with runs of 8 × 256 on a V100; here run times are those calibrated on this machine. All
three costs are processor time of the one thread that has them.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.kit.as_lane import become_lane
from bench.kit.script import Script, Table
from bench.models.pmc_accuracy import PAPER_FACTOR, Row, cut, runs
from bench.papers.gnnsched import OURS, Device, devices
from bench.papers.queues import LENGTH, LOADS, MODELS, QUEUES, Queues, queues_here
from serve.core.commands import Command
from serve.core.events import Event
from serve.core.params import SchedulerParams
from serve.core.scheduler import Scheduler
from serve.core.types import Nanos
from serve.graphs.datasets import TABLE_4, load_dataset
from serve.native import Meter
from serve.sim.device import Offered
from serve.sim.engine import Simulation
from serve.sim.paper import GNNSCHED
from serve.sim.workload import System

SYSTEMS = (*GNNSCHED, OURS)
#: "All errors are below": Figure 9.
PAPER_ERROR = 0.08
#: Means over queues of all costs ÷ run time: Figure 10.
PAPER_COST = {"low": 0.0024, "high": 0.0030}
PARTS = ("estimate", "schedule", "insert")

SCRIPT = Script(
    "gnnsched_costs",
    full={"data": None, "scale": 0.05, "datasets": tuple(TABLE_4), "graphs": 25, "runs": 5,
          "edges": 200_000, "repeats": 2000},
    quick={"datasets": ("pubmed",), "graphs": 3, "scale": 0.02, "runs": 1, "repeats": 50},
    tables=[
        Table("Figure 9: estimate ÷ measured − 1", "errors", {
            "model": "{model}", "graphs": "{graphs}", "paper": "within ±{paper:.0%}",
            "here": "{low:+.2%} to {high:+.2%}",
            "Table 2 × 1.1": "{table_2_low:+.0%} to {table_2_high:+.0%}",
            "of these below the peak": "{table_2_below}",
        }),
        Table("Figure 10: cost ÷ run time, in thousandths", "costs", {
            "load": "{load}", "system": "{system}", "paper": "{paper_permille:.1f}",
            "here": "{permille:.2f}", "estimating": "{estimate_permille:.2f}",
            "scheduling": "{schedule_permille:.2f}", "inserting": "{insert_permille:.3f}",
            "µs a request": "{us:.1f}",
        }),
    ],
)  # fmt: skip


class Recorder(Scheduler):
    """A scheduler that keeps what it was told."""

    def __init__(self, params: SchedulerParams) -> None:
        super().__init__(params)
        self.told: list[tuple[Event, Nanos]] = []

    def handle(self, event: Event, now_ns: Nanos) -> list[Command]:
        """See ``Scheduler``."""
        self.told.append((event, now_ns))
        return super().handle(event, now_ns)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of both figures and what they come to."""
    meter = become_lane("bench.papers.gnnsched_costs")
    found = list(accuracy(options, meter))
    with tempfile.TemporaryDirectory() as folder:
        queues, cores, sources = queues_here(Path(folder), options.datasets)
    rows = list(cost_rows(devices(queues, cores, None)[0], options, meter))
    return {
        "paper_error": PAPER_ERROR,
        "paper_cost": PAPER_COST,
        "graphs": sources,
        "errors": [errors(model, found) for model in MODELS],
        "costs": costs(rows),
        "cost_rows": rows,
        "accuracy": found,
    }


def accuracy(options: argparse.Namespace, meter: Meter) -> Iterator[dict[str, Any]]:
    """Yield estimates and the measured peak of every model on every subgraph."""
    data = options.data or os.environ.get("GNNSERVE_DATA")
    for name in options.datasets:
        dataset = load_dataset(name, folder=Path(data) if data else None, scale=options.scale)
        graphs = {"to_largest": cut(dataset, 0, dataset.num_nodes, options.graphs, options.edges)}
        for model in MODELS:
            for number, row in enumerate(runs("eager", model, "paper", dataset, graphs, meter)):
                yield error_of(number, row)


def error_of(number: int, row: Row) -> dict[str, Any]:
    """Return a bar of Figure 9, ours and by Table 2."""
    assert row.paper_bytes is not None
    return {
        "model": row.model, "dataset": row.dataset, "number": number,
        "num_nodes": row.num_nodes, "num_edges": row.num_edges,
        "measured_bytes": row.measured_bytes,
        "error": round(row.estimate_bytes / row.measured_bytes - 1, 6),
        "table_2_error": round(row.paper_bytes / row.measured_bytes - 1, 6),
    }  # fmt: skip


def errors(model: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the extremes of one model's errors."""
    its = [row for row in found if row["model"] == model]
    ours, table_2 = ([row[name] for row in its] for name in ("error", "table_2_error"))
    return {
        "model": model, "graphs": len(its), "paper": PAPER_ERROR, "factor": PAPER_FACTOR,
        "low": min(ours), "high": max(ours),
        "table_2_low": min(table_2), "table_2_high": max(table_2),
        "table_2_below": sum(error < 0 for error in table_2),
    }  # fmt: skip


def cost_rows(
    device: Device, options: argparse.Namespace, meter: Meter
) -> Iterator[dict[str, Any]]:
    """Yield what each system's decisions cost a request, at each load and for each queue."""
    insert_ns = timed(lambda: insert_and_clear(meter, options.repeats)) / options.repeats
    for load in LOADS:
        for queue in QUEUES:
            estimate_ns = median(
                estimating(device.queues, queue, seed) for seed in range(options.runs)
            )
            for system in SYSTEMS:
                found = [scheduling(device, system, load, queue, n) for n in range(options.runs)]
                yield {
                    "load": load, "queue": queue, "system": system,
                    "run_ns": fmean(run_ns for _, run_ns in found),
                    "estimate_ns": estimate_ns,
                    "schedule_ns": median(schedule_ns for schedule_ns, _ in found),
                    "insert_ns": insert_ns,
                }  # fmt: skip


def estimating(queues: Queues, queue: str, seed: int) -> float:
    """Return nanoseconds of an estimate, over the tasks of a queue."""
    tasks = queues.tasks(queue, seed)[:LENGTH]

    def estimate_all() -> None:
        for task in tasks:
            queues.estimate(task.model, task.graph.num_nodes, task.graph.num_edges)

    estimate_all()
    return timed(estimate_all) / len(tasks)


def scheduling(
    device: Device, system: str, load: str, queue: str, seed: int
) -> tuple[float, float]:
    """Return nanoseconds of all decisions, and of the run, for a request of the queue."""
    slot_s = device.slot * device.queues.mean_solo_s(queue, seed)
    requests = device.queues.requests(queue, LOADS[load], slot_s, seed)
    run_ns = fmean(offered.run_ns for offered in requests)
    return deciding(device.system(system), requests) / len(requests), run_ns


def deciding(system: System, requests: Sequence[Offered]) -> int:
    """Return nanoseconds of all decisions about these requests, on a scheduler of their own."""
    recorder = Recorder(system.params)
    Simulation(recorder, system.device).run(requests)
    again = Scheduler(system.params)

    def handle_all() -> None:
        for event, now_ns in recorder.told:
            again.handle(event, now_ns)

    return timed(handle_all)


def insert_and_clear(meter: Meter, times: int) -> None:
    """Give a run its buffer and take it back, so many times."""
    for _ in range(times):
        meter.insert(1 << 30)
        meter.clear()


def timed(act: Callable[[], object]) -> int:
    """Return nanoseconds of processor time that this thread takes to act."""
    started_ns = time.thread_time_ns()
    act()
    return time.thread_time_ns() - started_ns


def costs(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return means over the queues of costs ÷ run time, in thousandths."""
    found = []
    for load in LOADS:
        for system in SYSTEMS:
            its = [row for row in rows if (row["load"], row["system"]) == (load, system)]
            parts = {
                f"{part}_permille": fmean(1000 * row[f"{part}_ns"] / row["run_ns"] for row in its)
                for part in PARTS
            }
            us = fmean(sum(row[f"{part}_ns"] for part in PARTS) / 1000 for row in its)
            found.append({
                "load": load, "system": system, "paper_permille": 1000 * PAPER_COST[load],
                "permille": sum(parts.values()), **parts, "us": us,
            })  # fmt: skip
    return found


if __name__ == "__main__":
    become_lane("bench.papers.gnnsched_costs")
    SCRIPT.main(measure, __doc__)
