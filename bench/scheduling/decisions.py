"""Measure the processor time of scheduling decisions, and of a long simulation.

    python -m bench.scheduling.decisions [--quick] [--cycles 3000] [--million 1000000]

A closed loop keeps the queue at 10, 1,000 and 100,000 pending tasks: every finished task is
replaced by a new one, and every call of ``Scheduler.handle`` (with ``next_wakeup``) is timed. Two
slots, six lanes, adaptive window, log-normal run times around 2 ms. Then a million requests are
simulated at ρ 0.7, with `slack` under `preemptive` and eight lanes. For a request that comes alone,
its inputs staged, the calls for its arrival and for its end are timed. All times are processor time
of the one thread, so other work on the machine does not count.
"""

import argparse
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.kit.measure import percentiles
from bench.kit.script import Script, Table
from serve.core.commands import Command
from serve.core.disciplines import DISCIPLINES
from serve.core.events import Event, LaneReady, TaskArrived, TaskFinished
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.policies import POLICIES
from serve.core.scheduler import Scheduler
from serve.core.types import Bytes, LaneId, Nanos, QoS, Task, TaskEstimate, TaskId, Usage
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import Simulation, simulate

SLOTS, LANES, LANES_OF_MILLION, RHO = 2, 6, 8, 0.7
PREPARE_NS = Nanos(200_000)
#: Of a log-normal distribution around 2 ms whose logarithm has a spread of 1.
MEAN_RUN_NS = 2e6 * 1.6487
SCRIPT = Script(
    "decisions",
    full={"cycles": 3000, "pending": (10, 1_000, 100_000), "million": 1_000_000},
    quick={"cycles": 50, "pending": (10, 100), "million": 2_000},
    tables=[
        Table("One scheduling decision, µs of processor time", "rows", {
            "policy": "{policy}", "discipline": "{discipline}", "pending": "{pending:,}",
            "p50": "{p50_us:.1f}", "p99": "{p99_us:.1f}", "mean": "{mean_us:.1f}",
            "task's cycle": "{cycle_us:.1f}",
        }),
        Table("A lone request, µs of processor time", "lone", {
            "arrival": "{arrived_us:.1f}", "end": "{finished_us:.1f}",
        }),
        Table("A long simulation", "million", {
            "requests": "{requests:,}", "processor time, s": "{cpu_s:.1f}", "missed": "{missed:,}",
        }),
    ],
)  # fmt: skip


class TimedScheduler(Scheduler):
    """Records the processor time of each call."""

    def __init__(self, params: SchedulerParams) -> None:
        super().__init__(params)
        self.costs_us: list[float] = []

    def handle(self, event: Event, now_ns: Nanos) -> list[Command]:
        """Return the commands; their cost is recorded."""
        started_ns = time.thread_time_ns()
        commands = super().handle(event, now_ns)
        self.next_wakeup()
        self.costs_us.append((time.thread_time_ns() - started_ns) / 1e3)
        return commands


def requests(seed: int, now_ns: Callable[[], float]) -> Iterator[Offered]:
    """Yield endless requests that arrive when they are asked for."""
    rng = random.Random(seed)
    for task_id in itertools.count():
        run_ns = Nanos(int(2e6 * rng.lognormvariate(0, 1)) + 1)
        size = Bytes(512 * rng.randrange(1, 1 << 12))
        solo_ns = Nanos(run_ns + PREPARE_NS)
        qos = QoS(Nanos(2 * solo_ns), timeout_ns=Nanos(10**12))
        estimate = TaskEstimate(size, size, run_ns, solo_ns)
        task = Task(TaskId(task_id), "gcn:1", 100, 1000, Nanos(int(now_ns())), estimate, qos)
        yield Offered(task, run_ns, PREPARE_NS)


def device(lanes: int) -> DeviceFacts:
    """Return two cores with that many lanes, which suspend."""
    return DeviceFacts(
        Bytes(1 << 30), tuple(map(LaneId, range(lanes))), parallelism=SLOTS, can_suspend=True
    )


def decisions(policy: str, discipline: str, pending: int, cycles: int) -> dict[str, Any]:
    """Return the cost of a call in µs at a queue of `pending` tasks."""
    scheduler = TimedScheduler(
        SchedulerParams(
            device=device(LANES), policy=policy, discipline=discipline, max_queue=1 << 30
        )
    )
    simulation = Simulation(scheduler, DeviceModel())
    source = requests(pending, lambda: simulation.now_ns)
    for _ in range(pending):
        simulation.now_ns = Nanos(simulation.now_ns + 1000)
        simulation.offer(next(source))
    scheduler.costs_us.clear()
    gc.collect()
    gc.disable()  # a collection walks every pending task and would be billed to one call
    try:
        for replaced in range(len(simulation.answered), len(simulation.answered) + cycles):
            while len(simulation.answered) == replaced:
                simulation.step()
            simulation.offer(next(source))
    finally:
        gc.enable()
    costs_us = scheduler.costs_us
    found = percentiles(costs_us, (50, 99), 2)
    return {
        "policy": policy,
        "discipline": discipline,
        "pending": pending,
        "calls": len(costs_us),
        "p50_us": found["p50"],
        "p99_us": found["p99"],
        "mean_us": round(statistics.fmean(costs_us), 2),
        "cycle_us": round(sum(costs_us) / cycles, 2),
    }


def lone(cycles: int) -> dict[str, float]:
    """Return medians of the two calls for a request that finds nothing waiting."""
    params = SchedulerParams(device(LANES), policy="slack", discipline="preemptive", watched=True)
    scheduler, now_ns = TimedScheduler(params), Nanos(0)
    for lane_id in params.device.lane_ids:
        scheduler.handle(LaneReady(lane_id), now_ns)
    scheduler.costs_us.clear()
    source = requests(1, lambda: now_ns)
    for _ in range(cycles):
        offered = next(source)
        task, first = offered.task, LaneId(0)
        scheduler.handle(TaskArrived(task, now_ns), Nanos(now_ns + PREPARE_NS))
        now_ns = Nanos(now_ns + PREPARE_NS + offered.run_ns)
        usage = Usage(offered.run_ns, task.estimate.peak_bytes)
        scheduler.handle(TaskFinished(task.task_id, first, usage), now_ns)
        now_ns = Nanos(now_ns + 10_000_000)
    arrived_us, finished_us = scheduler.costs_us[::2], scheduler.costs_us[1::2]
    return {
        "arrived_us": round(statistics.median(arrived_us), 2),
        "finished_us": round(statistics.median(finished_us), 2),
    }


def million(count: int) -> dict[str, Any]:
    """Simulate `count` Poisson arrivals; making the requests is not timed."""
    rng, now_ns = random.Random(1), 0.0

    def arrival_ns() -> float:
        nonlocal now_ns
        now_ns += rng.expovariate(RHO * SLOTS / (MEAN_RUN_NS + PREPARE_NS))
        return now_ns

    offered = list(itertools.islice(requests(1, arrival_ns), count))
    params = SchedulerParams(device(LANES_OF_MILLION), policy="slack", discipline="preemptive")
    started_s = time.thread_time()
    report = simulate(offered, params)
    missed = report.violations + count - report.completed
    return {"requests": count, "cpu_s": time.thread_time() - started_s, "missed": missed}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each policy, discipline and length of the queue."""
    cases = itertools.product(sorted(POLICIES), sorted(DISCIPLINES), options.pending)
    return {
        "cycles": options.cycles,
        "rows": [decisions(*case, options.cycles) for case in cases],
        "lone": [lone(options.cycles)],
        "million": [million(options.million)],
    }


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
