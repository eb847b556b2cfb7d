"""What one scheduling decision costs with 10, 1,000 and 100,000 tasks pending.

    python -m bench.scheduling.decisions [--cycles 3000] [--out bench/results/decisions.json]

Simulates a closed loop: every finished task is replaced by a new one, so the queue keeps its
length, and every call of ``Scheduler.handle`` (with ``next_wakeup``) in a task's whole cycle,
arrived, prepared, finished, is timed. Processor time of the calling thread, so that other work on
the machine does not count. Two slots, six lanes, adaptive window, log-normal run times around
2 ms.
"""

import argparse
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kit.result import write_result
from serve.core.commands import Command
from serve.core.disciplines import DISCIPLINES
from serve.core.events import Event
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.policies import POLICIES
from serve.core.scheduler import Scheduler
from serve.core.types import Bytes, Estimate, LaneId, Nanos, QoS, Task, TaskId
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import Simulation

PENDING = (10, 1_000, 100_000)
LANES, SLOTS = 6, 2
PREPARE_NS = Nanos(200_000)


class TimedScheduler(Scheduler):
    """Notes what each call costs."""

    def __init__(self, params: SchedulerParams) -> None:
        super().__init__(params)
        self.costs_ns: list[tuple[str, int]] = []

    def handle(self, event: Event, now_ns: Nanos) -> list[Command]:
        started = time.thread_time_ns()
        commands = super().handle(event, now_ns)
        self.next_wakeup()
        self.costs_ns.append((type(event).__name__, time.thread_time_ns() - started))
        return commands


def requests(seed: int, now_ns: Callable[[], Nanos]) -> Iterator[Offered]:
    """Endless requests that arrive when they are asked for."""
    rng = random.Random(seed)
    for task_id in itertools.count():
        run_ns = Nanos(int(2e6 * rng.lognormvariate(0, 1)) + 1)
        reserve_bytes = Bytes(512 * rng.randrange(1, 1 << 18))
        solo_ns = Nanos(run_ns + PREPARE_NS)
        estimate = Estimate(reserve_bytes, reserve_bytes, run_ns, solo_ns)
        qos = QoS(Nanos(2 * solo_ns), timeout_ns=Nanos(10**12))
        task = Task(TaskId(task_id), "gcn:1", 100, 1000, now_ns(), estimate, qos)
        yield Offered(task, run_ns, PREPARE_NS)


def measure(policy: str, discipline: str, pending: int, cycles: int) -> dict[str, Any]:
    """Costs per call in µs, at a queue of `pending` tasks."""
    device = DeviceFacts(
        Bytes(1 << 30), tuple(map(LaneId, range(LANES))), parallelism=SLOTS, can_suspend=True
    )
    scheduler = TimedScheduler(
        SchedulerParams(device=device, policy=policy, discipline=discipline, max_queue=1 << 30)
    )
    simulation = Simulation(scheduler, DeviceModel())
    source = requests(pending, lambda: simulation.now_ns)
    for _ in range(pending):
        simulation.now_ns = Nanos(simulation.now_ns + 1000)
        simulation.offer(next(source))
    scheduler.costs_ns.clear()
    gc.collect()
    gc.disable()  # a collection walks every pending task and would be billed to one call
    try:
        replaced = len(simulation.answered)
        for _ in range(cycles):
            while len(simulation.answered) == replaced:
                simulation.step()
            replaced += 1
            simulation.offer(next(source))
    finally:
        gc.enable()
    costs_us = sorted(cost / 1000 for _, cost in scheduler.costs_ns)
    by_event = {
        name: statistics.fmean(cost / 1000 for kind, cost in scheduler.costs_ns if kind == name)
        for name in sorted({kind for kind, _ in scheduler.costs_ns})
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
    result = {"cycles": options.cycles, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(options.out, result)
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
