"""Compare ways to spread requests over machines, simulated.

    python -m bench.cluster.routing [--quick] [--requests 20000] [--seeds 2]

Each machine is the scheduler that serves, each front the dispatcher, both on a virtual clock
(``serve.sim.cluster``). Machines have 2 cores and 8 lanes, `slack` + `preemptive`. Solo times are
log-normal, targets twice the solo time on the reference pool, true times 10 % off the estimates,
arrivals Poisson; ρ = rate × mean solo time ÷ all cores. A request is missed when it is late or has
no result. Beside each figure stands what a prototype of this simulation gave for requests of its
own; they are to agree in order and size, not in every digit.
"""

import argparse
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from statistics import fmean
from typing import Any

from bench.kit.script import Script, Table
from serve.core.cluster.dispatch import DispatchParams
from serve.core.cluster.promise import promised_ns
from serve.core.types import Bytes, Nanos, QoS, Task, TaskEstimate, TaskId
from serve.sim.cluster import ClusterSetup, Forwarding, simulate_cluster
from serve.sim.device import Offered
from serve.sim.machine import MachineModel

MS = 1_000_000
QOS_FACTOR = 2.0
#: Of the requests: mean solo time, standard deviation of its logarithm, the host's part of it.
MEAN_NS, SPREAD, HOST_NS = 6 * MS, 1.0, 300_000
#: How far true times are off the estimates: standard deviation of the logarithm.
ERROR = 0.1
#: Memory is no question here.
_NEED_BYTES = Bytes(1 << 20)
_NO_LIMIT = DispatchParams(patience_ns=60_000 * MS, most_requests=10**6)

SCRIPT = Script(
    "routing",
    full={"requests": 20_000, "seeds": 2, "machines": 16, "rhos": (0.7, 0.85), "steps": 7},
    quick={"requests": 400, "seeds": 1, "machines": 8, "rhos": (0.85,), "steps": 2},
    tables=[
        Table("Alike machines of 2 cores", "alike", {
            "front": "{way}", "ρ": "{rho}", "missed": "{missed:.2%}", "prototype": "{prototype}",
        }),
        Table("Unlike machines", "unlike", {
            "machines": "{machines}", "ρ": "{rho}", "rule": "{way}", "missed": "{missed:.2%}",
            "prototype": "{prototype}",
        }),
        Table("Goodput: highest ρ with at most 1 % missed", "goodput", {
            "machines": "{machines}", "goodput": "{goodput:.2f}", "prototype": "{prototype}",
        }),
    ],
)  # fmt: skip


def offers(cores: float, rho: float, count: int, seed: int) -> list[Offered]:
    """Return `count` requests at load `rho` of `cores` cores of the reference pool."""
    rng = random.Random(seed)
    drift = -SPREAD * SPREAD / 2
    rate_ns = rho * cores / MEAN_NS
    at_ns, found = 0.0, []
    for number in range(1, count + 1):
        at_ns += rng.expovariate(rate_ns)
        solo_ns = HOST_NS + max(1, round((MEAN_NS - HOST_NS) * rng.lognormvariate(drift, SPREAD)))
        run_ns = solo_ns - HOST_NS
        estimate = TaskEstimate(_NEED_BYTES, _NEED_BYTES, Nanos(run_ns), Nanos(solo_ns))
        task = Task(
            TaskId(number), "model:1", 1, 1, Nanos(round(at_ns)), estimate,
            QoS(Nanos(promised_ns(solo_ns, QOS_FACTOR))),
        )  # fmt: skip
        true_ns = max(1, round(run_ns * rng.lognormvariate(0.0, ERROR)))
        half_ns = Nanos(HOST_NS // 2)
        found.append(Offered(task, Nanos(true_ns), half_ns, half_ns))
    return found


@dataclass(frozen=True)
class Way:
    """A way to spread requests, and what the prototype missed with it by ρ."""

    name: str
    #: Returns the cluster of these machines.
    setup: Callable[[tuple[MachineModel, ...]], ClusterSetup]
    prototype: dict[float, str]


def routed(
    rule: str, choices: int | None = None, **others: Any
) -> Callable[[tuple[MachineModel, ...]], ClusterSetup]:
    """Return what makes a cluster whose fronts route by `rule`."""
    dispatch = replace(_NO_LIMIT, rule=rule, choices=choices)
    return lambda machines: ClusterSetup(machines, dispatch=dispatch, **others)


def _one_machine(machines: tuple[MachineModel, ...]) -> ClusterSetup:
    cores = sum(machine.cores for machine in machines)
    return ClusterSetup((MachineModel(cores=cores),), dispatch=_NO_LIMIT, front_ns=0)


#: Several fronts that each send to all machines.
ROUTERS: dict[str, Any] = {"fronts": 8, "owned": False, "front_ns": 0}
OLD: dict[str, Any] = {**ROUTERS, "report_every_ns": 5 * MS}
ALIKE = (
    Way("one machine of all cores", _one_machine, {0.7: "0.00 %", 0.85: "0.00 %"}),
    Way("one front that counts", routed("count"), {0.7: "0.00 %", 0.85: "0.01 %"}),
    Way("one front, in time then least loaded", routed("in_time"), {}),
    Way("2 fronts, each with its machines", routed("count", fronts=2),
        {0.7: "0.01 %", 0.85: "0.14 %"}),
    Way("4 fronts, each with its machines", routed("count", fronts=4),
        {0.7: "0.08 %", 0.85: "0.69 %"}),
    Way("two at random, fresh counts", routed("count", 2, front_ns=0),
        {0.7: "0.01 %", 0.85: "0.45 %"}),
    Way("two at random, fresh work", routed("work", 2, front_ns=0), {0.7: "0.29 %"}),
    Way("any machine, forwarded once, 0.15 ms",
        routed("random", front_ns=0, forwarding=Forwarding(2, 50_000, 100_000)),
        {0.7: "0.14 %", 0.85: "1.12 %"}),
    Way("any machine, forwarded once, 0.75 ms",
        routed("random", front_ns=0, forwarding=Forwarding(2, 150_000, 600_000)),
        {0.7: "0.45 %", 0.85: "1.76 %"}),
    Way("8 fronts for all, each counts its own", routed("count", **ROUTERS), {0.85: "1.9 %"}),
    Way("the same, two at random", routed("count", 2, **ROUTERS), {0.85: "2.7 %"}),
    Way("8 fronts for all, counts each 5 ms, best of all", routed("count", **OLD),
        {0.85: "10.5 %"}),
    Way("the same, best of 4", routed("count", 4, **OLD), {0.85: "3.3 %"}),
    Way("the same, best of 2", routed("count", 2, **OLD), {0.85: "2.0 %"}),
    Way("at random", routed("random"), {0.7: "1.99 %", 0.85: "4.40 %"}),
)  # fmt: skip
#: Name, ρ, and machines of which there are equally many.
UNLIKE = (
    ("1 to 8 cores", 0.85, tuple(MachineModel(cores=cores) for cores in (1, 2, 4, 8))),
    ("half of them half as fast", 0.7, (MachineModel(), MachineModel(pace=0.5))),
)
#: By rule: its name, and what it missed in each of these cases.
RULES = {
    "random": ("at random by weight", "1.95 %", "16.4 %"),
    "count": ("counts", "2.46 %", "11.4 %"),
    "load": ("counts by weight", "0.13 %", "8.0 %"),
    "end": ("ends first", "0.65 %", "5.9 %"),
    "in_time": ("in time, then by weight", "0.13 %", "3.5 %"),
}


def missed(setup: ClusterSetup, requests: list[Offered]) -> float:
    """Return the share of requests that were late or have no result."""
    answers = simulate_cluster(requests, setup)
    return sum(answer.missed for answer in answers) / len(requests)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the tables' rows."""
    two = tuple(MachineModel() for _ in range(options.machines))
    alike = [(way.name, way.setup(two), rho, way.prototype.get(rho, ""))
             for way in ALIKE for rho in options.rhos]  # fmt: skip
    unlike = []
    for at, (name, rho, models) in enumerate(UNLIKE):
        machines = models * (options.machines // len(models))
        for rule, (words, *prototype) in RULES.items():
            unlike.append((name, words, routed(rule)(machines), rho, prototype[at]))
    sizes = [(1, two[:1], "0.59", 0)]
    sizes += [(count, two[:count], "", 150_000) for count in (2, 4, 8) if count < len(two)]
    sizes.append((options.machines, two, "0.97", 150_000))
    with ProcessPoolExecutor(mp_context=get_context("fork")) as workers:
        mean = partial(_mean_missed, options)
        of_alike = workers.map(mean, [row[1] for row in alike], [row[2] for row in alike])
        of_unlike = workers.map(mean, [row[2] for row in unlike], [row[3] for row in unlike])
        best = workers.map(
            partial(_goodput, options),
            [routed("count", front_ns=front_ns)(machines) for _, machines, _, front_ns in sizes],
        )
        return {
            "requests": options.requests, "seeds": options.seeds, "machines": options.machines,
            "mean_solo_ms": MEAN_NS / MS, "spread": SPREAD,
            "alike": [
                {"way": name, "rho": rho, "missed": share, "prototype": prototype}
                for (name, _, rho, prototype), share in zip(alike, of_alike, strict=True)
            ],
            "unlike": [
                {"machines": name, "rho": rho, "way": words, "missed": share, "prototype": proto}
                for (name, words, _, rho, proto), share in zip(unlike, of_unlike, strict=True)
            ],
            "goodput": [
                {"machines": count, "goodput": rho, "prototype": prototype}
                for (count, _, prototype, _), rho in zip(sizes, best, strict=True)
            ],
        }  # fmt: skip


def _mean_missed(options: argparse.Namespace, setup: ClusterSetup, rho: float) -> float:
    cores = sum(machine.cores * machine.pace for machine in setup.machines)
    return fmean(
        missed(setup, offers(cores, rho, options.requests, seed)) for seed in range(options.seeds)
    )


def _goodput(options: argparse.Namespace, setup: ClusterSetup) -> float:
    """Return the highest ρ up to 1.2 with at most 1 % missed, by bisection."""
    low, high = 0.0, 1.2
    for _ in range(options.steps):
        rho = (low + high) / 2
        low, high = (rho, high) if _mean_missed(options, setup, rho) <= 0.01 else (low, rho)
    return low


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
