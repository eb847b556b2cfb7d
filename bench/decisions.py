"""What one scheduling decision costs with 10, 1,000 and 100,000 tasks pending.

    python -m bench.decisions [--cycles 3000] [--out bench/results/decisions.json]

Drives a bare ``Scheduler`` on a virtual clock: every finished task is replaced by a new one, so
the queue keeps its length, and a task's whole cycle (arrived, prepared, finished) is timed, call
by call. Two lanes, adaptive window, run times log-normal around 2 ms.
"""

import argparse
import gc
import heapq
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import machine_facts
from serve.core.commands import LaunchTask, PrepareTask
from serve.core.disciplines import DISCIPLINES
from serve.core.events import Event, LaneReady, TaskArrived, TaskFinished, TaskPrepared, Tick
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.policies import POLICIES
from serve.core.scheduler import Scheduler
from serve.core.types import Bytes, Estimate, LaneId, Nanos, QoS, Task, TaskId, Usage

PENDING = (10, 1_000, 100_000)
LANES = 2
PREPARE_NS = 200_000


class Driver:
    """Feeds one scheduler on a virtual clock and times every call."""

    def __init__(self, policy: str, discipline: str, seed: int) -> None:
        lanes = tuple(LaneId(lane) for lane in range(LANES))
        device = DeviceFacts(Bytes(1 << 30), lanes, can_suspend=True)
        self.scheduler = Scheduler(
            SchedulerParams(device=device, policy=policy, discipline=discipline, max_queue=1 << 30)
        )
        self.rng = random.Random(seed)
        self.now = 0
        self.sequence = 0
        self.due: list[tuple[int, int, Event]] = []
        self.tasks: dict[TaskId, Task] = {}
        self.costs_ns: list[tuple[str, int]] = []
        for lane in lanes:
            self.tell(LaneReady(lane))

    def tell(self, event: Event) -> None:
        started = time.perf_counter_ns()
        commands = self.scheduler.handle(event, Nanos(self.now))
        self.scheduler.next_wakeup()
        self.costs_ns.append((type(event).__name__, time.perf_counter_ns() - started))
        for command in commands:
            if isinstance(command, PrepareTask):
                self.later(PREPARE_NS, TaskPrepared(command.task_id))
            elif isinstance(command, LaunchTask):
                run_ns = self.tasks[command.task_id].estimate.run_ns
                usage = Usage(run_ns, Bytes(1))
                self.later(run_ns, TaskFinished(command.task_id, command.lane_id, usage))

    def later(self, delay_ns: int, event: Event) -> None:
        self.sequence += 1
        heapq.heappush(self.due, (self.now + delay_ns, self.sequence, event))

    def arrive(self) -> None:
        run_ns = int(2e6 * self.rng.lognormvariate(0, 1)) + 1
        reserve = Bytes(512 * self.rng.randrange(1, 1 << 18))
        task_id = TaskId(len(self.tasks))
        solo_ns = Nanos(run_ns + PREPARE_NS)
        estimate = Estimate(reserve, reserve, Nanos(run_ns), solo_ns)
        qos = QoS(Nanos(2 * solo_ns), timeout_ns=Nanos(10**12))
        task = Task(task_id, "gcn:1", 100, 1000, Nanos(self.now), estimate, qos)
        self.tasks[task_id] = task
        self.tell(TaskArrived(task))

    def run_until_finished(self) -> None:
        """Play events until one task has finished."""
        while True:
            at, _, event = self.due[0]
            wake = self.scheduler.next_wakeup()
            if wake is not None and wake < at:
                self.now = wake
                self.tell(Tick())
                continue
            heapq.heappop(self.due)
            self.now = at
            self.tell(event)
            if isinstance(event, TaskFinished):
                return


def measure(policy: str, discipline: str, pending: int, cycles: int) -> dict[str, Any]:
    """Costs per call in µs, at a queue of `pending` tasks."""
    driver = Driver(policy, discipline, seed=pending)
    for _ in range(pending):
        driver.now += 1000
        driver.arrive()
    driver.costs_ns.clear()
    gc.collect()
    gc.disable()  # a collection walks every pending task and would be billed to one call
    try:
        for _ in range(cycles):
            driver.run_until_finished()
            driver.arrive()
    finally:
        gc.enable()
    costs_us = sorted(cost / 1000 for _, cost in driver.costs_ns)
    by_event = {
        name: statistics.fmean(cost / 1000 for kind, cost in driver.costs_ns if kind == name)
        for name in sorted({kind for kind, _ in driver.costs_ns})
    }
    return {
        "policy": policy,
        "discipline": discipline,
        "pending": pending,
        "calls": len(costs_us),
        "p50_us": round(costs_us[len(costs_us) // 2], 2),
        "p99_us": round(costs_us[len(costs_us) * 99 // 100], 2),
        "mean_us": round(statistics.fmean(costs_us), 2),
        "cycle_us": round(sum(costs_us) / cycles, 2),
        "mean_us_by_event": {name: round(cost, 2) for name, cost in by_event.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cycles", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path("bench/results/decisions.json"))
    options = parser.parse_args()
    rows = [
        measure(policy, discipline, pending, options.cycles)
        for policy in sorted(POLICIES)
        for discipline in sorted(DISCIPLINES)
        for pending in PENDING
    ]
    result = {"machine": machine_facts(), "cycles": options.cycles, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    table = Table(title="One scheduling decision, µs per call", caption=str(options.out))
    for column in ("policy", "discipline", "pending", "p50", "p99", "mean", "task's cycle"):
        table.add_column(column, justify="left" if column[0] in "pd" else "right")
    for row in rows:
        table.add_row(
            row["policy"],
            row["discipline"],
            f"{row['pending']:,}",
            *(f"{row[key]:.1f}" for key in ("p50_us", "p99_us", "mean_us", "cycle_us")),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
