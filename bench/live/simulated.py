"""The requests of a live run again in the simulator: with what they took live, and without a host.

`as_live` offers each request when the server received it, with its own times of the live run:
preparing, launching and hearing of the run's end, the run, answering. The scheduler decides anew,
so this tells whether the simulator's queue is that of the live server.

`no_host` offers them when they were meant to be sent, with their solo runs and a host that takes
nothing: what the scheduler alone would miss.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bench.kit.solo import Solo
from bench.scheduling.site import missed_share
from serve.core.types import ZERO_NS, Nanos, Task
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import simulate
from serve.sim.workload import make_system, task_of
from serve.workload import TraceItem

#: More than all requests need: how memory is shared is another question.
_BUDGET_BYTES = 1 << 40

#: Request, its solo times, and its row in the server's database.
Served = tuple[TraceItem, Solo, dict[str, Any]]


def simulated(
    served: Sequence[Served], handover_ns: Callable[[dict[str, Any]], int], cores: int
) -> dict[str, float]:
    """Return the shares that are late in both simulations of our system.

    `handover_ns` tells from a row what a launch and hearing of its end took.
    """
    params = make_system("slack", "preemptive", cores=cores, budget_bytes=_BUDGET_BYTES).params
    first_ns = min(row["arrived_unix_ns"] for _, _, row in served)
    slower = statistics.median(row["run_ns"] / solo.run_ns for _, solo, row in served)

    def arrived_ns(one: Served) -> Nanos:
        return Nanos(one[2]["arrived_unix_ns"] - first_ns)

    no_host, as_live = [], []
    for number, (item, solo, _) in enumerate(served, 1):
        no_host.append(Offered(_task(number, item, solo), Nanos(solo.run_ns), ZERO_NS))
    for number, one in enumerate(sorted(served, key=arrived_ns), 1):
        item, solo, row = one
        task = msgspec.structs.replace(_task(number, item, solo), arrived_ns=arrived_ns(one))
        # The run of a union is that of all its requests.
        run_ns = row["run_ns"] if row["merged"] == 1 else round(solo.run_ns * slower)
        lane_ns = Nanos(run_ns + handover_ns(row))
        as_live.append(Offered(task, lane_ns, Nanos(row["prepare_ns"]), Nanos(row["answer_ns"])))
    model = DeviceModel(launch_ns=ZERO_NS)
    return {
        "as_live": missed_share(simulate(as_live, params, model)),
        "no_host": missed_share(simulate(no_host, params, model)),
    }


def _task(number: int, item: TraceItem, solo: Solo) -> Task:
    assert item.qos_target_us is not None
    return task_of(number, item, solo.estimate, item.qos_target_us * 1000)
