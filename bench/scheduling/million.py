"""How long it takes to simulate a million requests.

    python -m bench.scheduling.million [--quick] [--requests 1000000] [--out FILE]

`slack` under `preemptive`, two cores with four lanes each, log-normal run times around 2 ms,
Poisson arrivals at ρ 0.7. Making the requests is not counted. Wall clock and processor time of the
one thread; on a busy machine the second is what counts.
"""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

from bench.kit.result import write_result
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.types import Bytes, Estimate, LaneId, Nanos, QoS, Task, TaskId
from serve.sim.device import Offered
from serve.sim.engine import simulate

CORES, LANES, RHO = 2, 8, 0.7
PREPARE_NS = Nanos(200_000)


def requests(count: int) -> Iterator[Offered]:
    rng = random.Random(1)
    mean_ns = 2e6 * 1.6487 + PREPARE_NS  # e^(1/2): the mean of a log-normal of spread 1
    now = 0.0
    for number in range(count):
        now += rng.expovariate(RHO * CORES / mean_ns)
        run_ns = Nanos(int(2e6 * rng.lognormvariate(0, 1)) + 1)
        solo_ns = Nanos(run_ns + PREPARE_NS)
        size = Bytes(512 * rng.randrange(1, 1 << 12))
        estimate = Estimate(size, size, run_ns, solo_ns)
        task = Task(TaskId(number), "m:1", 9, 9, Nanos(int(now)), estimate, QoS(Nanos(2 * solo_ns)))
        yield Offered(task, run_ns, PREPARE_NS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="20,000 requests; no file")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path("bench/results/million.json"))
    options = parser.parse_args()
    count = 20_000 if options.quick else options.requests
    offered = list(requests(count))
    device = DeviceFacts(
        Bytes(1 << 30), tuple(map(LaneId, range(LANES))), parallelism=CORES, can_suspend=True
    )
    params = SchedulerParams(device, policy="slack", discipline="preemptive")
    wall, cpu = time.monotonic(), time.thread_time()
    report = simulate(offered, params)
    wall_s, cpu_s = time.monotonic() - wall, time.thread_time() - cpu
    missed = report.violations + count - report.completed
    print(f"{count:,} requests: {wall_s:.1f} s, {cpu_s:.1f} s of processor time; {missed:,} missed")
    print(f"{cpu_s / count * 1e6:.1f} µs of processor time a request")
    if not options.quick:
        found = {"requests": count, "wall_s": wall_s, "cpu_s": cpu_s, "missed": missed}
        result = {**found}
        write_result(options.out, result)


if __name__ == "__main__":
    main()
