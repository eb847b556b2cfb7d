"""Send one Poisson trace to the paper's baselines and policies on the GPU.

    python -m bench.gpu.figures [--quick] [--dry]

The engine is the server's own, below gRPC: staging, scheduler, lanes, reports. Baselines are first
in, first out: one, four, sixteen at once. All have the same targets, at a low and a high load:
violations, latency ÷ target, JCT, QUET, memory error and the scheduler's share of the time (Figures
5 to 10). Needs msgspec.
"""

import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np

from bench.gpu.engines import Bench, Graphs, Job, pmc_errors, run_on_engine, submit, watch
from bench.gpu.kit import MODELS, Result
from serve.errors import ServeError
from serve.obs.record import RequestRecord
from serve.server.engine import Engine

#: The paper's high load, as a share of what one lane can do.
HIGH = 0.9
#: Aim for the scheduler's processor time a request.
SCHEDULER_US = 100


def figures(result: Result, bench: Bench) -> None:
    count = 120 if bench.short else 600
    graphs = bench.graphs(25)
    rng = np.random.default_rng(0)
    jobs = [(list(MODELS)[int(rng.integers(4))], int(rng.integers(25))) for _ in range(count)]
    gaps = rng.exponential(1.0, count)
    with bench.engine("slack", "rolling") as (engine, _):
        solo_ns = {}
        for job in sorted(set(jobs)):
            runs = [submit(engine, graphs, job).record.latency_ns for _ in range(4)]
            solo_ns[job] = median(runs[1:])
    mean_s = float(np.mean([solo_ns[job] for job in jobs])) / 1e9
    result.put("solo_ms", {"mean": 1e3 * mean_s, "max": max(solo_ns.values()) / 1e6})
    systems: dict[str, tuple[str, str, int | None]] = {
        "default": ("fifo", "rolling", 1),
        "mps_base (4 streams)": ("fifo", "rolling", 4),
        "mps_aggr (16 streams)": ("fifo", "rolling", 16),
        "sqtf, barrier": ("sqtf", "barrier", 4),
        "bqt, barrier": ("bqt", "barrier", 4),
        "slack, preemptive": ("slack", "preemptive", 4),
    }
    found: dict[str, Any] = {}
    # ρ is relative to one lane alone, as a GPU has no cores to divide by.
    for rho in (HIGH,) if bench.quick else (0.3, HIGH):
        for name, (policy, discipline, lanes) in systems.items():
            with result.part(f"{name} at {rho}"):
                # Neither the paper's policies nor its baselines merge.
                ours = bench.engine(policy, discipline, lanes, merge=policy == "slack")
                with ours as (engine, records):
                    spent = watch(engine)
                    for job in sorted(set(jobs))[:20]:
                        submit(engine, graphs, job)
                    records.clear()
                    spent.clear()
                    statuses = play(engine, jobs, graphs, gaps * mean_s / rho, solo_ns)
                found[f"{name} at {rho}"] = summary(records, statuses, sum(spent))
                result.put("systems", found)
    aims(result, found, HIGH)


def aims(result: Result, found: dict[str, Any], rho: float) -> None:
    """Report the aims for the paper's high load."""
    names = ("slack, preemptive", "mps_base (4 streams)", "default")
    if not all(f"{name} at {rho}" in found for name in names):
        return
    ours, fixed, default = (found[f"{name} at {rho}"] for name in names)
    rate = ours["violation_rate"]
    result.aim(7, rate == 0, {f"at {rho}": rate})
    tails = [system["latency_over_target"]["p99"] for system in (ours, fixed)]
    less = 1 - tails[0] / tails[1]
    result.aim(8, less >= 0.6, {f"at {rho}": less})
    less = 1 - ours["jct_ms"] / default["jct_ms"]
    result.aim(9, less >= 0.75, {f"at {rho}": less})
    told = {key: value for key, value in ours.items() if key.startswith("scheduler")}
    result.aim(10, told["scheduler_us_a_request"] <= SCHEDULER_US, told)


def play(
    engine: Engine, jobs: list[Job], graphs: Graphs, gaps_s: Any, solo_ns: dict[Job, int]
) -> Counter[str]:
    """Send every job at its time, open loop; return how many ended in each way."""
    started = time.monotonic_ns() + 50_000_000
    due_ns = [started + int(1e9 * offset_s) for offset_s in np.cumsum(gaps_s)]

    def send(job: Job, due_ns: int) -> str:
        try:
            submit(engine, graphs, job, arrived_ns=due_ns, qos_target_ns=2 * solo_ns[job])
        except ServeError as error:
            return type(error).__name__
        return "OK"

    # One thread a request, so that none waits for another's answer.
    with ThreadPoolExecutor(len(jobs)) as threads:
        ends = []
        for job, due in zip(jobs, due_ns, strict=True):
            time.sleep(max(0.0, (due - time.monotonic_ns()) / 1e9))
            ends.append(threads.submit(send, job, due))
        return Counter(end.result() for end in ends)


def summary(records: list[RequestRecord], statuses: Counter[str], scheduler_s: float) -> Any:
    """Return what the paper's figures show of one system, of the requests that were answered."""
    ok = [record for record in records if record.status == "OK"]
    over = np.array([r.latency_ns / r.qos_target_ns for r in ok])
    busy_s = sum(r.run_ns for r in ok) / 1e9
    memory = pmc_errors(ok)
    return {
        "answered": dict(statuses),
        "violation_rate": float(np.mean(over > 1)),
        "latency_over_target": {f"p{p}": float(np.percentile(over, p)) for p in (50, 90, 99)},
        "jct_ms": float(np.mean([r.latency_ns for r in ok])) / 1e6,
        "quet_ms": float(np.mean([r.quet_ns for r in ok])) / 1e6,
        "pmc_error": [min(memory), max(memory)] if memory else None,
        "scheduler_us_a_request": 1e6 * scheduler_s / max(1, len(ok)),
        "scheduler_per_mille_of_run_time": 1e3 * scheduler_s / busy_s,
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    run_on_engine("serving_figures", __doc__, figures)
