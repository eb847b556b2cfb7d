"""The simulated machine of the scheduling benches: calibrated run times, requests, goodput."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from statistics import fmean
from typing import Any

from bench.kit.servers import calibrated_as_asked, usual_graphs
from serve.commands.configured import device_of
from serve.commands.estimate import offline_estimators
from serve.config import Config, load_config
from serve.core.params import LANES_PER_CORE
from serve.core.types import Nanos, TaskEstimate
from serve.estimate.estimator import ModelEstimator
from serve.graphs.pool import GraphPool
from serve.resources import configs_path
from serve.sim.device import Offered
from serve.sim.engine import simulate
from serve.sim.report import SimReport
from serve.sim.workload import make_system, mean_solo_ns, offered
from serve.workload import (
    MODELS,
    PoolSpec,
    TraceHeader,
    build_trace,
    rate_for_rho,
    workload_tasks,
)

OURS = "slack+preemptive"
QOS_FACTOR = 2.0
#: Goodput is the highest ρ up to `HIGHEST_RHO` with at most this share missed.
GOODPUT_MISSES, HIGHEST_RHO = 0.01, 1.5
#: Variants of our system, written behind a comma.
LANES = {f"{count} lanes a core": count for count in (2, 3, 8)}
WINDOWS = {f"windows of {ms} ms": Nanos(int(ms * 1e6)) for ms in (0.5, 1, 2, 5, 10, 20)}
MERGING, APART = "merging", "a device for each core"


@dataclass(frozen=True)
class Site:
    """A machine, and what its models take there."""

    cores: int
    budget_bytes: int
    estimators: dict[str, ModelEstimator]
    pool: GraphPool

    def estimate(self, model: str, num_nodes: int, num_edges: int) -> TaskEstimate:
        """Return the estimate of one request."""
        return self.estimators[model].estimate(num_nodes, num_edges)

    def union(self, model: str, sizes: Sequence[tuple[int, ...]]) -> TaskEstimate | None:
        """Return the estimate of merged requests."""
        return self.estimators[model].union(sizes)

    def requests(
        self, workload: str, rho: float, seed: int, count: int, models: Sequence[str] = MODELS
    ) -> list[Offered]:
        """Return `count` requests at load ρ; their true run times are 10 % off the estimates."""
        tasks = workload_tasks(workload, self.pool.refs, seed, models)
        shapes = [(task.model, task.graph.num_nodes, task.graph.num_edges) for task in tasks]
        solo_s = mean_solo_ns(shapes, self.estimate) / 1e9
        rate_hz = rate_for_rho(rho, solo_s, self.cores)
        header = TraceHeader(workload=workload, seed=seed, rate_hz=rate_hz, rho=rho)
        return offered(build_trace(header, tasks, count=count), self.estimate, QOS_FACTOR)

    def serve(self, system: str, requests: Sequence[Offered]) -> SimReport:
        """Simulate a baseline, or policy+discipline with a variant behind a comma."""
        system, _, variant = system.partition(", ")
        policy, _, discipline = system.partition("+")
        made = make_system(
            policy,
            discipline or "rolling",
            cores=1 if variant == APART else self.cores,
            budget_bytes=self.budget_bytes,
            lanes_per_core=LANES.get(variant, LANES_PER_CORE),
            devices=self.cores if variant == APART else 1,
        )
        params = made.params
        if variant in WINDOWS:
            params = replace(params, window="fixed", window_ns=WINDOWS[variant])
        if variant == MERGING:
            params = replace(params, unions=self.union)
        return simulate(requests, params, made.device)


def site_of(config: Config, models: Sequence[str], graphs: PoolSpec | None = None) -> Site:
    """Return this machine with those models of the configuration, and with the usual graphs."""
    config = calibrated_as_asked(config)
    device = device_of(config)
    estimators = offline_estimators(config, device, models, lambda _stage, _share: None)
    return Site(
        device.parallelism, device.budget_bytes, estimators, GraphPool(graphs or usual_graphs())
    )


def missed_share(report: SimReport) -> float:
    """Return the share of requests that were late or refused."""
    return (report.violations + report.requests - report.completed) / report.requests


def goodput(share_at: Callable[[float], float], steps: int) -> float:
    """Return the highest ρ at which `share_at(ρ)` is small enough, by bisection."""
    low, high = 0.0, HIGHEST_RHO
    for _ in range(steps):
        rho = (low + high) / 2
        low, high = (rho, high) if share_at(rho) <= GOODPUT_MISSES else (low, rho)
    return low


def compared(
    missed: Callable[[Site, str, list[Offered]], float],
    cases: Iterable[tuple[str, str]],
    rhos: Sequence[float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return a row for each (workload, system), where `missed` is the share missed of requests.

    The cases run in forked processes on all cores: nothing simulated is timed.
    """
    site = site_of(load_config(configs_path() / "dev.toml"), MODELS)
    with ProcessPoolExecutor(mp_context=get_context("fork")) as workers:
        rows = list(workers.map(partial(_row, site, missed, rhos, options), cases))
    return {
        "cores": site.cores,
        "seeds": options.seeds,
        "requests": options.requests,
        "graphs": site.pool.sources,
        "rows": rows,
    }


def _row(
    site: Site,
    missed: Callable[[Site, str, list[Offered]], float],
    rhos: Sequence[float],
    options: argparse.Namespace,
    case: tuple[str, str],
) -> dict[str, Any]:
    """Return goodput, and the share missed at each ρ, as means over the seeds."""
    workload, system = case

    def share_at(rho: float) -> float:
        offers = (
            site.requests(workload, rho, seed, options.requests) for seed in range(options.seeds)
        )
        return fmean(missed(site, system, requests) for requests in offers)

    return {
        "workload": workload,
        "system": system,
        "goodput": goodput(share_at, options.steps),
        "missed": {f"{rho:g}": share_at(rho) for rho in rhos},
    }
