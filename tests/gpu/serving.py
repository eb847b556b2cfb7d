"""Run the server's engine on the GPU: right answers, a soak, pressure.

    python -m tests.gpu.serving equality|without_kernels|soak|pressure [--quick] [--dry]

The engine is the server's own, below gRPC: staging, scheduler, lanes, reports. `equality` asks
every policy under `rolling` and every discipline under `slack` and compares answers with this
process's processor. `without_kernels` compares those of a server without `libgnnserve_cuda`, and
how many it gives in a second. `soak` sends 20,000 requests of four models and checks what is left.
`pressure` has a budget for half of what its lanes could hold and measures how full it runs. Needs
msgspec.
"""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from typing import Any

import numpy as np
import torch

from bench.gpu.engines import (
    Bench,
    Graphs,
    Job,
    memory_used_mib,
    pmc_errors,
    run_on_engine,
    submit,
)
from bench.gpu.kit import MODELS, Result, relative_error
from serve.core.disciplines import DISCIPLINES
from serve.core.policies import POLICIES
from serve.errors import ServeError
from serve.obs.record import RequestRecord
from serve.server.engine import Engine

LIMIT = 1e-4
SOAK, SOAK_QUICK = 20_000, 5_000
_KERNELS_MIB = 64


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


def expected_of(bench: Bench, graphs: Graphs) -> dict[Job, torch.Tensor]:
    """Return the processor's answers of every model for every graph."""
    with torch.inference_mode():
        return {
            (name, i): bench.reference(name)(g["x"], g["edge_index"])
            for name in MODELS
            for i, g in enumerate(graphs)
        }


def worst_error(engine: Engine, graphs: Graphs, expected: dict[Job, torch.Tensor]) -> float:
    """Return the largest relative error of answers, each asked for three times."""

    def error(job: Job) -> float:
        return relative_error(submit(engine, graphs, job).output, expected[job])

    with ThreadPoolExecutor(12) as threads:
        return max(threads.map(error, list(expected) * 3))


def without_kernels(result: Result, bench: Bench) -> None:
    graphs = bench.graphs(3)
    expected = expected_of(bench, graphs)
    jobs = jobs_in_turns(100 if bench.short else 2_000, graphs)
    for kernels in (False, True):
        told = "with" if kernels else "without"
        what = f"{told} kernels: answers within {LIMIT}"
        engine_for = bench.engine("slack", "rolling", kernels=kernels)
        with result.part(what), engine_for as (engine, records):
            worst = worst_error(engine, graphs, expected)
            result.check(what, worst <= LIMIT, worst)
            records.clear()
            started = time.monotonic()
            failures = submit_all(engine, graphs, jobs, 12)
            seconds = time.monotonic() - started
            check_answered(result, failures, records, len(jobs))
            result.put(f"requests_per_s, {told} kernels", round(len(jobs) / seconds, 1))


def equality(result: Result, bench: Bench) -> None:
    pairs = [(policy, "rolling") for policy in sorted(POLICIES)]
    pairs += [("slack", name) for name in sorted(DISCIPLINES) if name != "rolling"]
    graphs = bench.graphs(3)
    expected = expected_of(bench, graphs)
    for policy, discipline in pairs[:2] if bench.quick else pairs:
        what = f"{policy}, {discipline}: answers within {LIMIT}"
        with result.part(what), bench.engine(policy, discipline) as (engine, _):
            worst = worst_error(engine, graphs, expected)
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


PARTS = {
    "equality": equality,
    "without_kernels": without_kernels,
    "soak": soak,
    "pressure": pressure,
}


if __name__ == "__main__":
    part = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in PARTS else "equality"
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    run_on_engine(f"serving_{part}", __doc__, PARTS[part])
