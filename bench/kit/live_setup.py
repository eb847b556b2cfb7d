"""Servers by system, and traces with targets, for live benches."""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.kit.servers import ServerProcess, usual_graphs
from bench.kit.solo import Solo, measure_solo
from serve.graphs.pool import GraphPool
from serve.sim.workload import BASELINES
from serve.workload import (
    PoolSpec,
    Trace,
    TraceHeader,
    TraceItem,
    WorkloadTask,
    build_trace,
    rate_for_rho,
    workload_tasks,
)

OURS = "slack+preemptive"
QOS_FACTOR = 2.0
#: It also bounds the freed memory that lanes keep: with little of it every larger run faults its
#: pages in anew.
MEMORY_BUDGET = "8 GiB"


@contextmanager
def live_server(
    folder: Path,
    system: str,
    executor: str = "auto",
    module: str = "bench.kit.live_server",
    *,
    sections: Mapping[str, dict[str, object]] | None = None,
    graphs: tuple[dict[str, object], ...] = (),
) -> Iterator[ServerProcess]:
    """Yield a ready server of `system`: policy+discipline, a baseline, or @ and another checkout.

    `executor` as in the configuration's `models.executor`; `module` runs this checkout's server.
    `sections` are further ones of its configuration, `graphs` those that it holds.
    """
    policy, _, discipline = system.partition("+")
    run = [module]
    checkout = None
    if system.startswith("@"):
        policy, discipline = "slack", "preemptive"
        run, checkout = ["serve", "serve"], Path(system[1:])
    if system in BASELINES:
        policy, discipline = "fifo", "rolling"
        run += ["--at-once", str(BASELINES[system] or 1 << 20)]
    folder.mkdir(parents=True)
    cache = "" if checkout is None else "-of-the-other"
    # One calibration serves all systems.
    models: dict[str, object] = {"cache": str(folder.parent / f"cache{cache}")}
    if executor != "auto":  # another checkout may be older than this key
        models["executor"] = executor
    with ServerProcess(
        folder,
        policy=policy,
        discipline=discipline,
        sections={
            "device": {"memory_budget": MEMORY_BUDGET},
            "models": models,
            # Neither the paper's policies nor its baselines merge.
            "scheduling": {} if system == OURS or checkout else {"merge": False},
            **(sections or {}),
        },
        graphs=graphs,
        module=tuple(run),
        checkout=checkout,
        usual_calibrations=True,
    ) as server:
        yield server


class Traces:
    """Traces by seed and ρ, with targets, saved as files."""

    def __init__(
        self,
        folder: Path,
        workload: str,
        count: int,
        pool: PoolSpec | None = None,
        tasks: Callable[[int], tuple[WorkloadTask, ...]] | None = None,
        *,
        cores: int | None = None,
    ) -> None:
        """`cores` are those of this machine by default."""
        self.pool, self.count = GraphPool(pool or usual_graphs()), count
        self._folder, self._workload = folder, workload
        self.cores = cores or len(os.sched_getaffinity(0))
        #: The tasks that are repeated, by seed.
        self.tasks = tasks or partial(workload_tasks, workload, self.pool.refs)
        self.solo: dict[WorkloadTask, Solo] = {}

    def measure(self, server: ServerProcess, seeds: Sequence[int]) -> None:
        """Measure every request of these seeds alone."""
        tasks = [task for seed in seeds for task in self.tasks(seed)]
        self.solo = measure_solo(server, tasks, self.pool.spec)

    @property
    def solo_ms(self) -> dict[str, float]:
        """Percentiles of the solo times of all requests, in ms."""
        ordered = sorted(solo.solo_ns for solo in self.solo.values())
        return {f"p{q}": ordered[len(ordered) * q // 100] / 1e6 for q in (5, 25, 50, 75, 95, 99)}

    def mean_solo_s(self, seed: int) -> float:
        """Return the mean solo time of the tasks."""
        return statistics.fmean(self.solo[task].solo_ns for task in self.tasks(seed)) / 1e9

    def rate_hz(self, rho: float, seed: int) -> float:
        """Return the rate of arrivals at load ρ."""
        return rate_for_rho(rho, self.mean_solo_s(seed), self.cores)

    def make(self, rho: float, seed: int, count: int | None = None) -> tuple[Trace, Path]:
        """Return the trace, and the file where it is saved."""
        header = TraceHeader(
            workload=self._workload,
            seed=seed,
            rate_hz=self.rate_hz(rho, seed),
            rho=rho,
            mean_solo_s=self.mean_solo_s(seed),
            lanes=self.cores,
            pool=self.pool.spec,
            sources=self.pool.sources,
        )
        # A light load takes long, so it has half as many requests.
        count = count or (self.count if rho >= 0.2 else self.count // 2)
        trace = build_trace(header, self.tasks(seed), count=count).with_targets(
            lambda item: round(QOS_FACTOR * self.solo_of(item).solo_ns / 1000)
        )
        path = self._folder / f"{self._workload}-{rho:g}-{seed}.jsonl"
        trace.save(path)
        return trace, path

    def solo_of(self, item: TraceItem) -> Solo:
        """Return the solo times of the request."""
        return self.solo[WorkloadTask(item.model, item.graph)]
