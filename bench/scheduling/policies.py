"""Every policy under every discipline, the baselines and the bound over a sweep of the load.

    python -m bench.scheduling.policies [--quick] [--seeds 3] [--requests 1000]
        [--workloads gcn,mix] [--out FILE] [--picture FILE]

Simulated (``serve.sim``): the scheduler that serves, on a virtual clock, with the run times
calibrated on this machine for the four models of configs/dev.toml; true times differ from the
estimates by 10 %. Workloads and load as everywhere: 100 tasks a list, Poisson arrivals, ρ = rate ×
mean solo time ÷ cores, targets of 2 × solo; all systems see the same requests at the same times.

Lanes are four for each core, as in a server. Behind a comma stands what is different in a variant
of ours: fewer or more lanes, merging as in a server, windows of fixed length (on the mix only), or
each core a device by itself, which a run never leaves.

A request counts as missed when it is late or refused. Goodput is the highest ρ up to 1.5 with at
most 1 % missed, found by bisection to 0.006. The bound (``bench.scheduling.bound``) is for systems
that do not merge, so the others do not either.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kit.result import write_result
from bench.scheduling.bound import unavoidable_violations
from bench.scheduling.policies_picture import picture
from serve.commands.configured import device_of
from serve.commands.estimate import offline_estimators
from serve.config import Config, load_config
from serve.core.disciplines import DISCIPLINES
from serve.core.params import LANES_PER_CORE
from serve.core.policies import POLICIES
from serve.core.types import Estimate, Nanos
from serve.estimate.estimator import ModelEstimator
from serve.graphs.pool import GraphPool
from serve.resources import configs_path
from serve.sim.device import Offered
from serve.sim.engine import simulate
from serve.sim.report import SimReport
from serve.sim.workload import BASELINES, make_system, mean_solo_ns, offered
from serve.workload import (
    MODELS,
    WORKLOADS,
    PoolSpec,
    TraceHeader,
    build_trace,
    rate_for_rho,
    workload_tasks,
)

RHOS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5)
QUICK_RHOS = (0.1, 0.5, 0.9)
BOUND = "bound"
OURS = "slack+preemptive"
LANES = {f"{count} lanes a core": count for count in (2, 3, 8)}
WINDOWS = {f"windows of {ms} ms": Nanos(int(ms * 1e6)) for ms in (0.5, 1, 2, 5, 10, 20)}
MERGING = "merging"
APART = "a device for each core"
GOODPUT_MISSES = 0.01
GOODPUT_STEPS = 8
QOS_FACTOR = 2.0
#: Figures of a report that are averaged over the seeds.
FIGURES = (
    "latency_over_qt_p50",
    "latency_over_qt_p90",
    "latency_over_qt_p99",
    "jct_over_qt_mean",
    "quet_over_qt_mean",
    "jct_mean_ns",
    "quet_mean_ns",
)


@dataclass(frozen=True)
class Site:
    """What is simulated: a machine and what its models take there."""

    cores: int
    budget_bytes: int
    estimators: dict[str, ModelEstimator]
    pool: GraphPool

    def estimate(self, model: str, num_nodes: int, num_edges: int) -> Estimate:
        return self.estimators[model].estimate(num_nodes, num_edges)

    def union(self, model: str, sizes: Sequence[tuple[int, int]]) -> Estimate | None:
        return self.estimators[model].union(sizes)

    def requests(
        self, workload: str, rho: float, seed: int, count: int, models: Sequence[str] = MODELS
    ) -> list[Offered]:
        tasks = workload_tasks(workload, self.pool.refs, seed, models)
        shapes = [(task.model, task.graph.num_nodes, task.graph.num_edges) for task in tasks]
        solo_s = mean_solo_ns(shapes, self.estimate) / 1e9
        rate_hz = rate_for_rho(rho, solo_s, self.cores)
        header = TraceHeader(workload=workload, seed=seed, rate_hz=rate_hz, rho=rho)
        return offered(build_trace(header, tasks, count=count), self.estimate, QOS_FACTOR)

    def serve(self, system: str, requests: Sequence[Offered]) -> SimReport:
        """`system`: a baseline, or policy+discipline, with a variant behind a comma."""
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

    def missed(self, system: str, requests: Sequence[Offered]) -> float:
        """Share late or refused; for the bound, at least."""
        if system == BOUND:
            return unavoidable_violations(requests, self.cores) / len(requests)
        return missed_share(self.serve(system, requests))


def missed_share(report: SimReport) -> float:
    return (report.violations + report.requests - report.completed) / report.requests


def this_machine() -> Site:
    return site_of(load_config(configs_path() / "dev.toml"), MODELS)


def site_of(config: Config, models: Sequence[str]) -> Site:
    """This machine with those models of the configuration."""
    device = device_of(config)
    estimators = offline_estimators(config, device, models, lambda _stage, _share: None)
    return Site(device.parallelism, device.budget_bytes, estimators, GraphPool(PoolSpec()))


def all_systems(workload: str) -> list[str]:
    # base is fifo under CoGNN's name
    policies = sorted(POLICIES.keys() - {"base"})
    ours = [f"{policy}+{how}" for policy in policies for how in sorted(DISCIPLINES)]
    windows = WINDOWS if workload == "mix" else ()
    variants = [f"{OURS}, {variant}" for variant in (*LANES, MERGING, APART, *windows)]
    return [*ours, *variants, *BASELINES]


def rows_of(
    site: Site, options: argparse.Namespace, case: tuple[str, float]
) -> list[dict[str, Any]]:
    """What every system does with a workload at one load."""
    workload, rho = case
    offers = [site.requests(workload, rho, seed, options.requests) for seed in range(options.seeds)]
    rows = [row(workload, rho, BOUND, [site.missed(BOUND, requests) for requests in offers])]
    for system in all_systems(workload):
        reports = [site.serve(system, requests) for requests in offers]
        made = row(workload, rho, system, [missed_share(report) for report in reports])
        for name in FIGURES:
            made[name] = statistics.fmean(getattr(report, name) for report in reports)
        made["by_cause"] = summed(report.by_cause for report in reports)
        made["without_result"] = summed(report.without_result for report in reports)
        rows.append(made)
    return rows


def row(workload: str, rho: float, system: str, missed: list[float]) -> dict[str, Any]:
    return {
        "workload": workload,
        "rho": rho,
        "system": system,
        "missed": statistics.fmean(missed),
        "missed_by_seed": missed,
    }


def summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def goodput(
    site: Site,
    options: argparse.Namespace,
    workload: str,
    missed: Callable[[Sequence[Offered]], float],
) -> float:
    """Highest ρ at which so little is `missed` of its requests."""
    low, high = 0.0, max(RHOS)
    for _ in range(4 if options.quick else GOODPUT_STEPS):
        rho = (low + high) / 2
        share = statistics.fmean(
            missed(site.requests(workload, rho, seed, options.requests))
            for seed in range(options.seeds)
        )
        low, high = (rho, high) if share <= GOODPUT_MISSES else (low, rho)
    return low


def reach_of(site: Site, options: argparse.Namespace, case: tuple[str, str]) -> float:
    """Goodput of a workload and system."""
    workload, system = case
    return goodput(site, options, workload, partial(site.missed, system))


def tables(result: dict[str, Any], workload: str) -> Iterator[Table]:
    rows = [row for row in result["rows"] if row["workload"] == workload]
    rhos = sorted({row["rho"] for row in rows})
    reach = result["goodput"][workload]
    table = Table(title=f"{workload}: share late or refused by ρ, and goodput")
    table.add_column("system", no_wrap=True)
    for rho in rhos:
        table.add_column(f"{rho:g}", justify="right")
    table.add_column("goodput", justify="right")
    missed = {(row["system"], row["rho"]): row["missed"] for row in rows}
    for system in sorted(reach, key=lambda name: -reach[name]):
        shares = (f"{missed[system, rho]:.1%}" for rho in rhos)
        table.add_row(system, *shares, f"{reach[system]:.2f}")
    yield table
    middle = rhos[len(rhos) // 2 - 1] if len(rhos) > 3 else rhos[1]
    table = Table(title=f"{workload} at ρ {middle:g}: latency ÷ target and mean times")
    for column in ("system", "p50", "p90", "p99", "JCT, ms", "QUET, ms"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for row in rows:
        if row["rho"] == middle and row["system"] != BOUND:
            quantiles = (f"{row[name]:.2f}" for name in FIGURES[:3])
            times = (f"{row[name] / 1e6:.2f}" for name in ("jct_mean_ns", "quet_mean_ns"))
            table.add_row(row["system"], *quantiles, *times)
    yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="mix only, three loads, one seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument(
        "--workloads",
        default=",".join(WORKLOADS),
        help="the others are kept as they are in the file",
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/policies.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/policies.svg"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.requests = 1, min(options.requests, 300)
    site = this_machine()
    workloads = ["mix"] if options.quick else options.workloads.split(",")
    started = time.monotonic()
    loads = QUICK_RHOS if options.quick else RHOS
    cases = [
        (workload, system) for workload in workloads for system in (BOUND, *all_systems(workload))
    ]
    # Forked, as nothing here is timed and the site need not be sent.
    with ProcessPoolExecutor(site.cores, get_context("fork")) as workers:
        made = workers.map(
            partial(rows_of, site, options), [(w, rho) for w in workloads for rho in loads]
        )
        rows = [row for of_one in made for row in of_one]
        reach: dict[str, dict[str, float]] = {workload: {} for workload in workloads}
        found = workers.map(partial(reach_of, site, options), cases)
        for (workload, system), share in zip(cases, found, strict=True):
            reach[workload][system] = share
    result = {
        "cores": site.cores,
        "budget_bytes": site.budget_bytes,
        "seeds": list(range(options.seeds)),
        "requests": options.requests,
        "qos_factor": QOS_FACTOR,
        "graphs": site.pool.sources,
        "solo_ms": {
            model: [site.estimate(model, n, e).solo_ns / 1e6 for n, e in SHAPES] for model in MODELS
        },
        "solo_ms_of": [list(shape) for shape in SHAPES],
        "goodput": reach,
        "rows": rows,
        "took_s": round(time.monotonic() - started, 1),
    }
    console = Console(width=130)
    for workload in workloads:
        for table in tables(result, workload):
            console.print(table)
    if options.quick:
        return
    if len(workloads) < len(WORKLOADS):
        kept = json.loads(options.out.read_text(encoding="utf-8"))
        others = [row for row in kept["rows"] if row["workload"] not in workloads]
        result |= {"goodput": kept["goodput"] | reach, "rows": others + rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(options.out, result)
    options.picture.write_text(picture(result), encoding="utf-8")
    console.print(f"{options.out}, {options.picture}")


#: Graphs (nodes, edges) for which the result notes what each model takes.
SHAPES = ((100, 500), (1_000, 8_000), (8_000, 80_000))


if __name__ == "__main__":
    main()
