"""The DGTP paper's training speed-ups, simulated: Table III, Figures 8, 10 and 11.

    python -m bench.papers.dgtp [--quick] [--steps 2000]

The paper ("Optimizing Task Placement and Online Scheduling for Distributed GNN Training
Acceleration in Heterogeneous Systems") compares its placement and its sharing of the network with
DistDGL's placement, and with two other ways to share. Here all of them are simulated
(``serve.core.placement``). What the paper does not tell is assumed:

- A graph store takes 16 GB, so that as in the paper two workers are apart from a sampler.
- A run takes 50 ms at a store, 100 ms at a sampler, 200 ms at a worker, half of that on a V100, and
  10 ms at the parameter server.
- A sampler fetches as many different nodes as drawing that many at random of all would meet, times
  `sizes`, as real samples overlap more. `localities` is the share of them in the partition of the
  sampler.
- Which machines come first decides where DistDGL's last workers go: the mean over all orders.
- Stores are at most four iterations ahead of the workers.

A gain is the share of DistDGL's (or another's) time that is saved. DistDGL sends in the order in
which data is ready; `by_placement` is what is saved when it shares the network as DGTP does. The
search begins with DistDGL's placement. Placements are found with one draw of the volumes, and
compared with another.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import permutations
from math import exp
from multiprocessing import get_context
from random import Random
from statistics import fmean
from typing import Any

from bench.kit.script import Script, Table
from serve.core.placement.critical import competitive_ratio, critical_path_s, lower_bound_s
from serve.core.placement.job import (
    Assignment,
    DistributedJob,
    JobMachine,
    JobRole,
    Volumes,
    drawn_volumes,
)
from serve.core.placement.play import played
from serve.core.placement.search import FoundPlacement, SearchParams, search
from serve.core.placement.sharing import Sharing, coflow, equal, fifo, least_left
from serve.core.placement.training import (
    TaskKind,
    TrainingShape,
    TrainingVolumes,
    colocated,
    training_job,
)
from serve.errors import ConfigError

GBIT_S = 1e9 / 8
RESOURCES = ("memory, GB", "cores", "GPUs")
DEMANDS = {
    JobRole.STORE: (16.0, 0.0, 0.0),
    JobRole.SAMPLER: (7.0, 2.0, 0.0),
    JobRole.WORKER: (3.0, 1.0, 1.0),
    JobRole.SERVER: (5.0, 1.0, 0.0),
}
RUN_S = {JobRole.STORE: 0.05, JobRole.SAMPLER: 0.1, JobRole.WORKER: 0.2, JobRole.SERVER: 0.01}
#: Bytes of an index of an edge, and of a feature.
_EDGE_BYTES, _FEATURE_BYTES = 8, 4
#: Of GraphSAGE with three layers of 256, single precision.
_MODEL_BYTES = {"ogbn-products": 0.83e6, "Reddit": 1.9e6, "ogbn-papers100M": 0.9e6}
WINDOW = 4

SCRIPT = Script(
    "dgtp",
    full={
        "steps": 2000, "iterations": 20, "localities": (0.25, 0.8), "sizes": (0.25, 1.0),
        "clusters": 2, "batches": (250, 500, 1000), "ratios": (1.08, 1.5, 1.9), "large_steps": 1000,
        "orders": 6, "data_sets": 2,
    },
    quick={
        "steps": 30, "iterations": 3, "localities": (0.5,), "sizes": (0.25,), "clusters": 1,
        "batches": (250,), "ratios": (1.08,), "large_steps": 3, "orders": 1, "data_sets": 1,
    },
    tables=[
        Table("Time saved beside DistDGL's placement, testbeds", "testbeds", {
            "testbed": "{testbed}", "data": "{data}", "paper": "{paper:.1%}",
            "least": "{least:.1%}", "mean": "{mean:.1%}", "most": "{most:.1%}",
            "of it by placement": "{by_placement:.1%}",
        }),
        Table("Time saved on simulated clusters", "clusters", {
            "data": "{data}", "case": "{case}", "value": "{value:g}",
            "than DistDGL's placement": "{colocated:.1%}", "than OMCoflow": "{coflow:.1%}",
            "than MRTF": "{least_left:.1%}",
        }),
        Table("The search", "search", {
            "testbed": "{testbed}", "steps": "{steps:,}", "s of processor": "{search_s:.1f}",
            "placements run": "{run_count}", "run of one, ms": "{run_ms:.1f}",
        }),
    ],
)  # fmt: skip


@dataclass(frozen=True)
class Data:
    """A data set of the paper's Table II."""

    name: str
    nodes: float
    features: int
    fan_outs: tuple[int, ...]

    def volumes(
        self, batch: int, locality: float, size: float, peak: float = 1.16
    ) -> TrainingVolumes:
        """Return what is sent for `batch` training nodes a sampler; `peak` is max ÷ mean."""
        drawn, layer = float(batch), float(batch)
        for fan_out in self.fan_outs:
            layer *= fan_out
            drawn += layer
        distinct = size * self.nodes * (1 - exp(-drawn / self.nodes))
        features = distinct * self.features * _FEATURE_BYTES
        factors = tuple(1 + (peak - 1) * step for step in (-1, -0.5, 0, 0.5, 1))
        edges = size * (drawn - batch) * _EDGE_BYTES
        return TrainingVolumes(
            features, locality, features + edges, _MODEL_BYTES[self.name], factors
        )


PRODUCTS = Data("ogbn-products", 2.4e6, 100, (5, 10, 15))
REDDIT = Data("Reddit", 0.23e6, 602, (5, 10, 25))
PAPERS = Data("ogbn-papers100M", 111e6, 128, (12, 12, 12))


@dataclass(frozen=True)
class Host:
    """A machine of the paper."""

    gbit_s: float
    memory_gb: float
    cores: float
    gpus: float
    #: How many times as fast as a GTX 1080 Ti it trains.
    speed: float = 1.0


FAST, SLOW = Host(50, 48, 16, 2), Host(10, 48, 16, 2)
V100 = Host(100, 256, 40, 4, 2.0)
#: Name, machines, workers, parameter servers, data, and what the paper saves.
TESTBEDS = (
    ("parameter server", (FAST, FAST, SLOW, SLOW), 6, 1, PRODUCTS, 0.2845),
    ("parameter server", (FAST, FAST, SLOW, SLOW), 6, 1, REDDIT, 0.2654),
    ("ring", (FAST, FAST, SLOW, SLOW), 6, 0, PRODUCTS, 0.2611),
    ("ring", (FAST, FAST, SLOW, SLOW), 6, 0, REDDIT, 0.2400),
    ("unlike GPUs, ring", (V100, V100, SLOW, SLOW), 8, 0, PRODUCTS, 0.48),
)
#: Training nodes of a worker in an iteration, which its samplers share.
BATCH = 2000


def job_on(hosts: Sequence[Host], shape: TrainingShape, volumes: TrainingVolumes) -> DistributedJob:
    """Return the training on these machines."""
    machines = [
        JobMachine(
            f"m{number}", (host.memory_gb, host.cores, host.gpus),
            host.gbit_s * GBIT_S, host.gbit_s * GBIT_S,
        )
        for number, host in enumerate(hosts)
    ]  # fmt: skip
    kinds = {
        role: TaskKind(demand, tuple(
            RUN_S[role] / (host.speed if role is JobRole.WORKER else 1.0) for host in hosts
        ))
        for role, demand in DEMANDS.items()
    }  # fmt: skip
    return training_job(RESOURCES, machines, shape, kinds, volumes)


def run_s(job: DistributedJob, where: Assignment, volumes: Volumes, sharing: Sharing) -> float:
    """Return how long the iterations take."""
    return played(job, where, volumes, sharing, WINDOW).makespan_s


def testbed_case(
    options: argparse.Namespace, number: int, locality: float, size: float
) -> dict[str, Any]:
    """Return what is saved on one testbed, over the orders of its machines."""
    name, hosts, workers, servers, data, paper = TESTBEDS[number]
    shape = TrainingShape(workers, 2, servers)
    params = SearchParams(steps=options.steps, iterations=options.iterations, window=WINDOW)
    gains, placed, found_jobs = [], [], []
    began_s = time.process_time()
    for order in sorted(set(permutations(hosts)), key=str)[: options.orders]:
        job = job_on(order, shape, data.volumes(BATCH // 2, locality, size))
        beside = colocated(job)
        found = search(job, params, first=beside)
        volumes = drawn_volumes(job, options.iterations, Random("compared"))
        beside_s = run_s(job, beside, volumes, fifo)
        gains.append(1 - run_s(job, found.assignment, volumes, equal) / beside_s)
        placed.append(
            1 - run_s(job, found.assignment, volumes, equal) / run_s(job, beside, volumes, equal)
        )
        found_jobs.append((job, found, volumes))
    took_s = (time.process_time() - began_s) / len(gains)
    return {
        "testbed": name, "data": data.name, "paper": paper, "locality": locality, "size": size,
        "mean": fmean(gains), "least": min(gains), "most": max(gains),
        "by_placement": fmean(placed),
        "search_s": took_s,
        **_bounds(*found_jobs[0]),
    }  # fmt: skip


def _bounds(job: DistributedJob, found: FoundPlacement, volumes: Volumes) -> dict[str, Any]:
    """Return how a run compares with what bounds it."""
    where = found.assignment
    began_s = time.process_time()
    took_s = run_s(job, where, volumes, equal)
    return {
        "run_ms": (time.process_time() - began_s) * 1e3, "run_count": found.run_count,
        "iteration_s": took_s / len(volumes[0]),
        "of_most": took_s / critical_path_s(job, where, volumes),
        "of_least": took_s / lower_bound_s(job, where, volumes),
        "competitive_ratio": competitive_ratio(job, where),
    }  # fmt: skip


def drawn_hosts(count: int, rng: Random) -> Iterator[tuple[Host, ...]]:
    """Yield clusters of the paper's simulation for ever; its cores are two logical ones each."""
    while True:
        yield tuple(
            Host(rng.choice((10, 20, 50)), rng.uniform(32, 128), 2 * rng.randint(4, 16),
                 rng.randint(1, 4))
            for _ in range(count)
        )  # fmt: skip


#: Data, machines, workers, samplers of each.
CLUSTERS = ((PRODUCTS, 8, 16, 2), (PAPERS, 16, 20, 4))
CLUSTER_LOCALITY, CLUSTER_SIZE = 0.5, 0.25


def cluster_case(
    options: argparse.Namespace, number: int, batch: int, peak: float
) -> list[dict[str, float]]:
    """Return, by cluster, what is saved beside each of the other ways."""
    data, machines, workers, samplers = CLUSTERS[number]
    rng = Random(f"cluster {number}")
    shape = TrainingShape(workers, samplers, 1)
    volumes = data.volumes(batch, CLUSTER_LOCALITY, CLUSTER_SIZE, peak)
    params = SearchParams(
        steps=options.large_steps, iterations=min(4, options.iterations), window=WINDOW
    )
    rows: list[dict[str, float]] = []
    for hosts in drawn_hosts(machines, rng):
        job = job_on(hosts, shape, volumes)
        try:
            beside = colocated(job)
        except ConfigError:
            continue  # too small for the job
        found = search(job, params, first=beside)
        sent = drawn_volumes(job, params.iterations, Random("compared"))
        took_s = run_s(job, found.assignment, sent, equal)
        others = {
            "colocated": run_s(job, beside, sent, equal),
            "coflow": run_s(job, found.assignment, sent, coflow),
            "least_left": run_s(job, found.assignment, sent, least_left),
        }
        rows.append({name: 1 - took_s / other_s for name, other_s in others.items()})
        if len(rows) == options.clusters:
            return rows
    raise AssertionError  # clusters are drawn for ever


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the tables' rows, and every case of the testbeds."""
    cases = [
        (number, locality, size)
        for number in range(len(TESTBEDS))
        for locality in options.localities
        for size in options.sizes
    ]
    middle = options.batches[len(options.batches) // 2]
    large = [
        (number, name, value, *given)
        for number in range(options.data_sets)
        for name, values in (("batch of a sampler", options.batches), ("peak", options.ratios))
        for value in values
        for given in [(value, 1.16) if name != "peak" else (middle, value)]
    ]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as workers:
        small_found = [workers.submit(testbed_case, options, *case) for case in cases]
        large_found = [
            workers.submit(cluster_case, options, number, int(batch), peak)
            for number, _, _, batch, peak in large
        ]
        rows = [one.result() for one in small_found]
        clusters = [
            {
                "data": CLUSTERS[number][0].name, "case": name, "value": value,
                **{key: fmean(row[key] for row in one.result()) for key in _OTHERS},
            }
            for (number, name, value, *_), one in zip(large, large_found, strict=True)
        ]  # fmt: skip
    return {
        "rows": rows, "testbeds": _by_testbed(rows), "clusters": clusters,
        "search": [{**row, "steps": options.steps} for row in rows[:: len(rows) // len(TESTBEDS)]],
    }  # fmt: skip


_OTHERS = ("colocated", "coflow", "least_left")


def _by_testbed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each testbed and data set: over all that is assumed."""
    found = []
    for name, _, _, _, data, paper in TESTBEDS:
        of_it = [row for row in rows if (row["testbed"], row["data"]) == (name, data.name)]
        found.append({
            "testbed": name, "data": data.name, "paper": paper,
            "least": min(row["mean"] for row in of_it), "mean": fmean(r["mean"] for r in of_it),
            "most": max(row["mean"] for row in of_it),
            "by_placement": fmean(row["by_placement"] for row in of_it),
            "of_most": max(row["of_most"] for row in of_it),
            "of_least": max(row["of_least"] for row in of_it),
        })  # fmt: skip
    return found


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
