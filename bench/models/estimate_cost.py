"""What estimating costs: an estimate, a model's first calibration, and one that is kept.

    python -m bench.models.estimate_cost [--quick]

Each demo model on each executor. `first` is loading it into an engine without lanes from an empty
cache, the start of the calibrating process included; `calibration` that without the start, which
the first model of a server pays and the others share with its lanes. `kept` is loading it again
from what the first left: its files hashed, its calibration read. An estimate is memory and time
together, as made for each request; with loops counted when a request was prepared; of a union of
four; and for a request by node id; `learning` is what a finished run is learned from. Each of these
is processor time, the median over sizes from 10 nodes to 100,000. Writes
bench/results/estimate_cost.json unless `--quick`.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kit.result import RESULTS, ROOT, write_result
from serve.commands.configured import calibration_cache, device_of
from serve.config import Config, load_config
from serve.estimate import ModelEstimator
from serve.estimate.sampling import SampleProbe, SampleSizes
from serve.server.engine import Engine

RESULT = RESULTS / "estimate_cost.json"
MODELS = ("gcn", "sage", "gin", "gat")
EXECUTORS = ("eager", "csr")
KEPT_TIMES = 5
#: Calls per size between two looks at the clock, and sizes.
BATCH, SIZES = 200, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one model, a second each; no file")
    arguments = parser.parse_args()
    models = MODELS[:1] if arguments.quick else MODELS
    found = [
        measure(model, executor, 1.0 if arguments.quick else 6.0)
        for executor in EXECUTORS
        for model in models
    ]
    document = {
        "calibration_budget_s": 6.0,
        "models": found,
    }
    if not arguments.quick:
        write_result(RESULT, document)
    show(found)


def measure(model: str, executor: str, budget_s: float) -> dict[str, Any]:
    """Costs of one model on one executor."""
    config = load_config(ROOT / "configs" / "dev.toml")
    with tempfile.TemporaryDirectory() as folder:
        chosen = msgspec.structs.replace(
            config.models, cache=folder, calibration_s=budget_s, executor=executor
        )
        config = msgspec.structs.replace(config, models=chosen)
        steps: list[float] = []
        first_s, estimator = _load(config, model, lambda *_: steps.append(time.perf_counter()))
        kept_s = [_load(config, model, lambda *_: None)[0] for _ in range(KEPT_TIMES)]
    return {
        "model": model,
        "executor": executor,
        "first_s": round(first_s, 2),
        "calibration_s": round(steps[-1] - steps[0], 2),
        "kept_ms": round(1e3 * float(np.median(kept_s)), 2),
        "kept_ms_worst": round(1e3 * max(kept_s), 2),
    } | {name: round(us, 2) for name, us in _estimate_us(estimator).items()}


def _load(
    config: Config, model: str, progress: Callable[[str, float], None]
) -> tuple[float, ModelEstimator]:
    """Seconds until it can be estimated in an engine that has just been made."""
    device = device_of(config)
    engine = Engine(config, device, lambda _: None, calibration_cache(config, device))
    try:
        started = time.perf_counter()
        engine.load_offline(model, progress)
        return time.perf_counter() - started, engine.estimator(model)
    finally:
        engine.stop()


def _estimate_us(estimator: ModelEstimator) -> dict[str, float]:
    """Microseconds of every kind of estimate."""
    sizes = [(int(n), int(8 * n)) for n in np.geomspace(10, 100_000, SIZES)]
    probes = [SampleProbe(k, 40 * k, 90 * k, 50_000) for k in (1, 8, 64, 512)]
    samples = SampleSizes(probes, 1_000_000, 10_000_000)
    ids = {size: max(1, size[0] // 100) for size in sizes}

    def sampled(size: tuple[int, int]) -> None:
        expected = samples.expected(ids[size])
        estimator.times(expected.num_nodes, expected.num_edges)
        estimator.memory(expected.num_nodes_high, expected.num_edges_high)

    kinds: dict[str, Callable[[tuple[int, int]], object]] = {
        "estimate_us": lambda size: estimator.estimate(*size),
        "loops_us": lambda size: estimator.estimate(*size, size[0]),
        "union_us": lambda size: estimator.union([size] * 4),
        "sampled_us": sampled,
        "learning_us": lambda size: estimator.observe_run(*size, 1_000_000, 4096, 4096),
    }
    return {
        name: float(np.median([_each_us(estimate, size) for size in sizes]))
        for name, estimate in kinds.items()
    }


def _each_us(call: Callable[[tuple[int, int]], object], size: tuple[int, int]) -> float:
    started = time.thread_time_ns()
    for _ in range(BATCH):
        call(size)
    return (time.thread_time_ns() - started) / BATCH / 1e3


def show(found: list[dict[str, Any]]) -> None:
    table = Table(title="what estimating costs")
    for name in found[0]:
        table.add_column(name.replace("_", "\n"), justify="right")
    for row in found:
        table.add_row(*map(str, row.values()))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
