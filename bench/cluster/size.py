"""Simulate clusters of up to 10,000 machines, and tell what that takes.

    python -m bench.cluster.size [--quick] [--requests 200000]

Requests as in ``bench.cluster.routing`` at ρ 0.7; machines of 2 cores, and a front for each 16 that
counts. Each size is simulated in a process of its own, one after another: processor time is by
request, memory the most that the process held.
"""

import argparse
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from bench.cluster.routing import offers, routed
from bench.kit.script import Script, Table
from serve.sim.cluster import simulate_cluster
from serve.sim.machine import MachineModel

#: Machines of a front.
SHARD = 16
RHO = 0.7

SCRIPT = Script(
    "cluster_size",
    full={"requests": 200_000, "machines": (16, 1008, 10_000)},
    quick={"requests": 500, "machines": (16, 64)},
    tables=[
        Table("Simulated clusters", "rows", {
            "machines": "{machines:,}", "fronts": "{fronts:,}", "requests": "{requests:,}",
            "missed": "{missed:.2%}", "µs of processor a request": "{us:.0f}", "MiB": "{mib:.0f}",
        })
    ],
)  # fmt: skip


def simulated(machines: int, requests: int) -> dict[str, Any]:
    """Return a row: what was missed, and what simulating it took."""
    fronts = max(1, machines // SHARD)
    given = offers(2 * machines, RHO, requests, seed=0)
    setup = routed("count", fronts=fronts)((MachineModel(),) * machines)
    began_s = time.process_time()
    answers = simulate_cluster(given, setup)
    took_s = time.process_time() - began_s
    held_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "machines": machines, "fronts": fronts, "requests": requests,
        "missed": sum(answer.missed for answer in answers) / requests,
        "us": took_s / requests * 1e6, "mib": held_kib / 1024,
    }  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each number of machines."""
    rows = []
    for machines in options.machines:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as worker:
            rows.append(worker.submit(simulated, machines, options.requests).result())
    return {"rho": RHO, "rows": rows}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
