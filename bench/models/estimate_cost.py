"""Measure what estimating costs: an estimate, a first calibration, and one read from the cache.

    python -m bench.models.estimate_cost [--quick]

Each demo model on each executor. `first_s` is loading it into an engine without lanes from an empty
cache, with the start of the calibrating process; `calibration_s` is without that start, which only
a server's first model pays. `kept_ms` is loading it again from the cache: files hashed, calibration
read. The others are processor time in µs, medians over sizes of 10 to 100,000 nodes: memory and
time of one request; with its loops counted; of a union of four; of a request by node id; and
learning from a finished run.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import msgspec
import numpy as np

from bench.kit.result import ROOT
from bench.kit.script import Script, Table
from serve.commands.configured import calibration_cache, device_of
from serve.config import Config, load_config
from serve.estimate import ModelEstimator
from serve.estimate.sampling import SampleProbe, SampleSizes
from serve.server.engine import Engine
from serve.workload import MODELS

#: Calls for each size between two looks at the clock.
BATCH = 200
SCRIPT = Script(
    "estimate_cost",
    full={"models": MODELS, "executors": ("eager", "csr"), "budget": 6.0, "sizes": 60, "kept": 5},
    quick={"models": MODELS[:1], "executors": ("csr",), "budget": 1.0, "sizes": 5, "kept": 1},
    tables=[
        Table("What estimating costs", "models", {
            "model": "{model}", "executor": "{executor}", "first, s": "{first_s}",
            "calibration, s": "{calibration_s}", "cached, ms": "{kept_ms}",
            "estimate, µs": "{estimate_us}", "with loops": "{loops_us}", "union": "{union_us}",
            "by node ids": "{sampled_us}", "learning": "{learning_us}",
        })
    ],
)  # fmt: skip


def row(model: str, executor: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the costs of one model on one executor."""
    config = load_config(ROOT / "configs" / "dev.toml")
    with tempfile.TemporaryDirectory() as folder:
        models = msgspec.structs.replace(
            config.models, cache=folder, calibration_s=options.budget, executor=executor
        )
        config = msgspec.structs.replace(config, models=models)
        steps_s: list[float] = []
        first_s, estimator = load(config, model, lambda *_: steps_s.append(time.perf_counter()))
        kept_s = [load(config, model, lambda *_: None)[0] for _ in range(options.kept)]
    costs_us = {name: round(us, 2) for name, us in estimate_us(estimator, options.sizes).items()}
    return {
        "model": model,
        "executor": executor,
        "first_s": round(first_s, 2),
        "calibration_s": round(steps_s[-1] - steps_s[0], 2),
        "kept_ms": round(1e3 * median(kept_s), 2),
        "kept_ms_worst": round(1e3 * max(kept_s), 2),
        **costs_us,
    }


def load(
    config: Config, model: str, progress: Callable[[str, float], None]
) -> tuple[float, ModelEstimator]:
    """Return the seconds until a new engine can estimate the model, and its estimator."""
    device = device_of(config)
    engine = Engine(config, device, lambda _: None, calibration_cache(config, device))
    try:
        started_s = time.perf_counter()
        engine.load_offline(model, progress)
        return time.perf_counter() - started_s, engine.estimator(model)
    finally:
        engine.stop()


def estimate_us(estimator: ModelEstimator, count: int) -> dict[str, float]:
    """Return the microseconds of every kind of estimate."""
    sizes = [(int(n), int(8 * n)) for n in np.geomspace(10, 100_000, count)]
    probes = [SampleProbe(k, 40 * k, 90 * k, 50_000) for k in (1, 8, 64, 512)]
    samples = SampleSizes(probes, 1_000_000, 10_000_000)

    def sampled(size: tuple[int, int]) -> None:
        expected = samples.expected(max(1, size[0] // 100))
        estimator.times(expected.num_nodes, expected.num_edges)
        estimator.memory(expected.num_nodes_high, expected.num_edges_high)

    def each_us(call: Callable[[tuple[int, int]], object], size: tuple[int, int]) -> float:
        started_ns = time.thread_time_ns()
        for _ in range(BATCH):
            call(size)
        return (time.thread_time_ns() - started_ns) / BATCH / 1e3

    kinds: dict[str, Callable[[tuple[int, int]], object]] = {
        "estimate_us": lambda size: estimator.estimate(*size),
        "loops_us": lambda size: estimator.estimate(*size, size[0]),
        "union_us": lambda size: estimator.union([size] * 4),
        "sampled_us": sampled,
        "learning_us": lambda size: estimator.observe_run(*size, 1_000_000, 4096, 4096),
    }
    return {name: median(each_us(call, size) for size in sizes) for name, call in kinds.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each model and executor."""
    cases = product(options.models, options.executors)
    return {
        "calibration_budget_s": options.budget,
        "models": [row(*case, options) for case in cases],
    }


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
