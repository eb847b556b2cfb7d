"""DGTP for serving: what placing stores, samplers and lanes gains beside servers that are alike.

    python -m bench.papers.dgtp_serving [--quick] [--instances 6]

Servers that are alike each hold a part of the graph and prepare what their own lanes run. Beside
them stands the placement that ``serve.sim.serving_plan`` finds. Both are simulated with the same
arrivals: the load that one carries is the highest at which at most 1 % of the requests are late.

Machines, requests and their times are drawn, a cluster of four machines for each instance. The
cases differ in what is unlike and in what a request sends and takes:

- unlike networks: two machines of 10 and two of 1 Gbit/s; a request takes 0.8 to 1.6 MB of rows, as
  it does in all cases but one;
- unlike devices: two machines with a GPU and four cores, two with 16 cores; all have 25 Gbit/s;
- three in which there should be little to gain: machines that are alike; unlike networks and 12 KB
  of rows; unlike devices and little to prepare.

By pairs: what servers that are alike gain when samplers may prepare for lanes of other machines.
The order of costs: how well what the search goes by ranks placements, beside the simulated share of
late requests (Spearman's rank correlation, over placements drawn at random).
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from math import sqrt
from multiprocessing import get_context
from random import Random
from statistics import fmean
from typing import Any

from bench.kit.script import Script, Table
from serve.core.placement.feasible import first_placement
from serve.core.placement.job import Assignment, JobMachine, JobRole
from serve.core.placement.queueing import foreseen
from serve.core.placement.search import SearchParams, cheapest
from serve.core.placement.serving import RequestClass, Serving, ServingKind, serving
from serve.sim.flows import served
from serve.sim.serving_plan import plan_serving

GBIT_S = 1e9 / 8
RESOURCES = ("memory, GB", "cores", "GPUs")
MEMORY_GB, PART_GB, PARTS = 64.0, 20.0, 4
ROUND_S = 0.0003
#: A target is this many times what a request takes alone on the slowest machine.
TARGET_FACTOR = 2.0
CASES = (
    "unlike networks", "unlike devices", "alike", "unlike networks, 12 KB",
    "unlike devices, little to prepare",
)  # fmt: skip

SCRIPT = Script(
    "dgtp_serving",
    full={"instances": 6, "requests": 3000, "steps": 1500, "placements": 20},
    quick={"instances": 1, "requests": 100, "steps": 40, "placements": 4},
    tables=[
        Table("Load at ≤ 1 % late ÷ that of servers that are alike", "rows", {
            "case": "{case}", "mean": "{mean:.2f}", "least": "{least:.2f}", "most": "{most:.2f}",
            "by pairs": "{by_pairs:.2f}",
            "order of costs, mean": "{order:.2f}", "least ": "{least_order:.2f}",
        }),
    ],
)  # fmt: skip


def drawn(case: str, number: int) -> Serving:
    """Return one instance of a case."""
    rng = Random(f"{case} {number}")
    networks = (10, 10, 1, 1) if "networks" in case else (25,) * 4
    devices = "devices" in case
    cores = (4, 4, 16, 16) if devices else (12, 12, 12, 12)
    machines = [
        JobMachine(
            f"m{at}", (MEMORY_GB, float(cores[at]), float(devices and at < 2)),
            networks[at] * GBIT_S, networks[at] * GBIT_S,
        )
        for at in range(4)
    ]  # fmt: skip
    rows_bytes = 12e3 if "KB" in case else rng.uniform(0.8e6, 1.6e6)
    prepare_s = rng.uniform(0.004, 0.010)
    if "little" in case:
        prepare_s /= 20
    run_s = rng.uniform(0.010, 0.020)
    alone_s = rows_bytes / GBIT_S / min(networks) + prepare_s + run_s
    request = RequestClass(
        "ids", 100.0, rows_bytes, 1.1 * rows_bytes, prepare_s, run_s, TARGET_FACTOR * alone_s
    )
    cpu = ServingKind("lane", JobRole.LANE, 8 if devices else 16, (0.0, 1.0, 0.0), (1.0,) * 4)
    gpu = ServingKind("GPU lane", JobRole.LANE, 2, (0.0, 0.0, 1.0), (rng.uniform(0.03, 0.08),) * 4)
    samplers = ServingKind("sampler", JobRole.SAMPLER, 24, (0.0, 1.0, 0.0), (1.0,) * 4)
    kinds = [samplers, gpu, cpu] if devices else [samplers, cpu]
    return serving(
        RESOURCES, machines, PARTS, 1, (PART_GB, 0.0, 0.0), kinds, [request], ROUND_S
    )  # fmt: skip


def instance(options: argparse.Namespace, case: str, number: int) -> dict[str, Any]:
    """Return what is gained on one instance, and how well costs rank its placements."""
    problem = drawn(case, number)
    found = plan_serving(problem, steps=options.steps, count=options.requests, seed=number)
    if found.colocated is None or found.unpaired is None or found.gain is None:
        raise AssertionError(f"{case} {number}: servers that are alike must fit")
    load = found.colocated.load
    return {
        "case": case, "number": number, "gain": found.gain, "colocated": load,
        "by_pairs": found.unpaired.load / load, "order": order(options, problem, number, load),
    }  # fmt: skip


def order(options: argparse.Namespace, problem: Serving, number: int, load: float) -> float:
    """Return the rank correlation of cost and simulated share of late requests."""
    rng = Random(number)
    wheres = placements(problem, options.placements, rng)
    costs = [foreseen(problem, where, load).cost for where in wheres]
    late = [
        served(problem, where, load, options.requests, seed=number).late_share for where in wheres
    ]
    return rank_correlation(costs, late)


def placements(problem: Serving, count: int, rng: Random) -> list[Assignment]:
    """Return placements that fit, drawn by a walk that knows no costs."""
    found = [
        cheapest(
            problem.job, lambda where: 1.0, SearchParams(steps=200, seed=rng.randrange(2**30)),
            first_placement(problem.job, rng), 200,
        )
        for _ in range(count)
    ]  # fmt: skip
    return [rng.choice(each) for each in found]


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's correlation, equals at their mean rank; 1 where all of a side are equal."""
    a, b = _ranks(left), _ranks(right)
    mean = (len(a) - 1) / 2
    spread = sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    if not spread:
        return 1.0
    return sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True)) / spread


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < one for other in values) + (sum(other == one for other in values) - 1) / 2
        for one in values
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each case, and every instance."""
    with ProcessPoolExecutor(mp_context=get_context("fork")) as workers:
        waiting = [
            workers.submit(instance, options, case, number)
            for case in CASES
            for number in range(options.instances)
        ]
        found = [one.result() for one in waiting]
    rows = []
    for case in CASES:
        of_it = [one for one in found if one["case"] == case]
        gains = [one["gain"] for one in of_it]
        orders = [one["order"] for one in of_it]
        rows.append({
            "case": case, "mean": fmean(gains), "least": min(gains), "most": max(gains),
            "by_pairs": fmean(one["by_pairs"] for one in of_it),
            "order": fmean(orders), "least_order": min(orders),
        })  # fmt: skip
    return {"rows": rows, "instances": found}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
