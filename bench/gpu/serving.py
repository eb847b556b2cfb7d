"""Run the server's engine on the GPU: right answers, a soak, pressure, the paper's figures.

    python -m bench.gpu.serving equality|soak|pressure|figures [--quick] [--dry]

The engine is the server's own, below gRPC: staging, scheduler, lanes, reports. `equality` asks
every policy under `rolling` and every discipline under `slack` and compares answers with this
process's processor. `soak` sends 20,000 requests of four models and checks what is left. `pressure`
has a budget for half of what its lanes could hold and measures how full it runs. `figures` sends
one Poisson trace to the paper's baselines (first in, first out: one, four, sixteen at once) and
policies, at a low and a high load, with the same targets for all: violations, latency ÷ target,
JCT, QUET, memory error and the scheduler's share of the time (Figures 5 to 10). Needs msgspec.
"""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from bench.gpu.engines import Bench, Graphs, call, memory_used_mib, run_on_engine, watch
from bench.gpu.kit import MODELS, Result, relative_error
from serve.core.disciplines import DISCIPLINES
from serve.core.policies import POLICIES
from serve.errors import ServeError
from serve.obs.record import RequestRecord
from serve.server.engine import Engine

#: A model, and the index of a graph.
Job = tuple[str, int]

LIMIT = 1e-4
#: The paper's high load, as a share of what one lane can do.
HIGH = 0.9
SOAK, SOAK_QUICK = 20_000, 5_000
#: Aim for the scheduler's processor time a request.
SCHEDULER_US = 100
_KERNELS_MIB = 64


def submit(engine: Engine, graphs: Graphs, job: Job, **options: Any) -> Any:
    """Return the server's answer to a job."""
    return engine.submit(call(job[0], graphs[job[1]], **options)).result()


def submit_all(engine: Engine, graphs: Graphs, jobs: Iterable[Job], clients: int) -> Counter[str]:
    """Submit the jobs, `clients` at a time; return how many failed, by error."""

    def ask(job: Job) -> str:
        try:
            submit(engine, graphs, job)
        except ServeError as error:
            return f"{type(error).__name__}: {error}"[:200]
        return ""

    with ThreadPoolExecutor(clients) as threads:
        return Counter(filter(None, threads.map(ask, jobs)))


def check_answered(
    result: Result, failures: Counter[str], records: Sequence[RequestRecord], count: int
) -> None:
    """Check that all of `count` requests were answered and recorded."""
    result.check("every request was answered", not failures, dict(failures.most_common(5)))
    result.check("each has one record", len(records) == count, len(records))


def jobs_in_turns(count: int, graphs: Graphs) -> list[Job]:
    """Return jobs that go through models and graphs in turns."""
    return [(list(MODELS)[i % 4], (7 * i) % len(graphs)) for i in range(count)]


def equality(result: Result, bench: Bench) -> None:
    pairs = [(policy, "rolling") for policy in sorted(POLICIES)]
    pairs += [("slack", name) for name in sorted(DISCIPLINES) if name != "rolling"]
    graphs = bench.graphs(3)
    with torch.inference_mode():
        expected = {
            (name, i): bench.reference(name)(g["x"], g["edge_index"])
            for name in MODELS
            for i, g in enumerate(graphs)
        }
    for policy, discipline in pairs[:2] if bench.quick else pairs:
        what = f"{policy}, {discipline}: answers within {LIMIT}"
        with result.part(what), bench.engine(policy, discipline) as (engine, _):

            def error(job: Job, engine: Engine = engine) -> float:
                return relative_error(submit(engine, graphs, job).output, expected[job])

            with ThreadPoolExecutor(12) as threads:
                worst = max(threads.map(error, list(expected) * 3))
            result.check(what, worst <= LIMIT, worst)
            result.aim(1, worst <= LIMIT, {f"{policy}, {discipline}": worst})


def soak(result: Result, bench: Bench) -> None:
    count = 400 if bench.dry else SOAK_QUICK if bench.quick else SOAK
    graphs = bench.graphs(24)
    before_start = memory_used_mib()
    jobs = jobs_in_turns(count, graphs)
    with bench.engine("slack", "rolling") as (engine, records):
        submit_all(engine, graphs, jobs[:200], 32)
        warm = memory_used_mib()
        records.clear()
        started = time.monotonic()
        failures = submit_all(engine, graphs, jobs, 32)
        seconds = time.monotonic() - started
        after = memory_used_mib()
        snapshot = engine.snapshot()
        result.put("requests_per_s", round(count / seconds, 1))
        check_answered(result, failures, records, count)
        result.check("nothing stays reserved", snapshot.reserved_bytes == 0)
        result.check("no lane was lost", snapshot.lane_restarts == 0, snapshot.lane_restarts)
        # The warm-up need not have loaded all kernels.
        same = warm is None or after is None or abs(after - warm) <= _KERNELS_MIB
        result.check("device memory is as after the warm-up", same, [warm, after])
        if errors := pmc_errors(records):
            result.put("pmc_error", {"min": min(errors), "max": max(errors), "runs": len(errors)})
    time.sleep(2.0)
    found = memory_used_mib()
    result.put("device_memory_mib", {"before": before_start, "warm": warm, "after": found})
    if count >= SOAK:
        memory = sum(failure.startswith("TooBig") for failure in failures.elements())
        told = f"{count} requests, {memory} out of memory, {sum(failures.values())} failed"
        reached = not failures and before_start == found
        result.aim(2, reached, f"{told}, {before_start} and {found} MiB in use")


def pressure(result: Result, bench: Bench) -> None:
    count = 100 if bench.short else 1_000
    lanes = 8 if bench.dry else 16
    # Large graphs, so that requests wait for memory; no merging, which makes new sizes; and first
    # in, first out, as `slack` runs fewer at once where runs slow one another.
    graphs = bench.graphs(24, 500, 16_000)
    jobs = jobs_in_turns(count, graphs)
    with bench.engine("fifo", "rolling", lanes, merge=False) as (engine, _):
        sizes = [(g["x"].shape[0], g["edge_index"].shape[1]) for g in graphs]
        reserves = [engine.estimate(name, "", *sizes[i]).reserve_bytes for name, i in jobs]
        weights_bytes = sum(engine.estimate(name, "", *sizes[0]).weights_bytes for name in MODELS)
    tasks_bytes = tight(reserves, lanes)
    budget = bench.budget_for(tasks_bytes + weights_bytes, lanes)
    result.put("budget", {"of the device": budget, "of tasks_bytes": tasks_bytes})
    with bench.engine("fifo", "rolling", lanes, budget, merge=False) as (engine, records):
        #: Reserved ÷ budget at all moments, and while a request waits to be launched.
        shares: list[float] = []
        waiting: list[float] = []
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(0.005):
                now = engine.snapshot()
                shares.append(now.reserved_bytes / now.budget_bytes)
                if sum(now.pending.values()):
                    waiting.append(shares[-1])

        sampler = threading.Thread(target=sample)
        sampler.start()
        failures = submit_all(engine, graphs, jobs, 64)
        ended.set()
        sampler.join()
        check_answered(result, failures, records, count)
    fullness(result, shares, waiting)


def tight(reserves: Sequence[int], lanes: int) -> int:
    """Return half of the bytes that tasks on all lanes need, and at least those of the largest.

    With that budget tasks wait for memory, not for a lane.
    """
    return max(*reserves, int(mean(reserves) * lanes / 2))


def fullness(result: Result, shares: list[float], waiting: list[float]) -> None:
    """Report how full the budget ran, at all times and while a request waited for it."""
    most = max(shares, default=0.0)
    result.check("the budget is never overrun", most <= 1, most)
    found: dict[str, Any] = {"most": most, "waiting": f"{len(waiting)} of {len(shares)} samples"}
    for name, of in (("all", shares), ("waiting", waiting)):
        parts = {f"p{p}": round(float(np.percentile(of, p)), 3) for p in (10, 50, 90)} if of else {}
        result.put(f"reserved_of_budget, {name}", parts | {"samples": len(of)})
        found |= parts
    if waiting:
        result.aim(6, most <= 1 and found["p50"] >= 0.8, found)


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


def pmc_errors(records: Iterable[RequestRecord]) -> list[float]:
    """Return estimate ÷ measured − 1 of the peak memory of each run that has a measured one."""
    return [
        r.pmc_estimate_bytes / r.pmc_measured_bytes - 1 for r in records if r.pmc_measured_bytes
    ]


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


PARTS = {"equality": equality, "soak": soak, "pressure": pressure, "figures": figures}


if __name__ == "__main__":
    part = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in PARTS else "equality"
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    run_on_engine(f"serving_{part}", __doc__, PARTS[part])
