"""One long request alone: one thread on one core beside two threads on two cores.

    python -m bench.models.moldable [--repeats 7]

The demo's models on each executor, in one process; the two ways alternate, wall clock. Speed-up is
one core's time ÷ two cores' time, its quartiles; two requests at once on a core each would get 2.
Once on an idle machine, once beside a process that keeps the second core busy, as the server's own
threads or another request do.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from bench.kit.result import RESULTS, write_result
from serve.lane.executors import EXECUTORS, with_executor
from serve.lane.measure.probe_signature import probe_inputs
from serve.lane.models.loader import LoadedModel, load_model
from serve.models.repository import find
from serve.resources import configs_path
from serve.workload import MODELS

SIZES = ((3_000, 30_000), (8_000, 80_000), (30_000, 300_000))
FEATURES = 32
RESULT = RESULTS / "moldable.json"


def wall_ns(
    model: LoadedModel, inputs: dict[str, torch.Tensor], cores: set[int], threads: int
) -> int:
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    started = time.monotonic_ns()
    model.run(inputs)
    return time.monotonic_ns() - started


def measure(repeats: int) -> list[dict[str, Any]]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    rows: list[dict[str, Any]] = []
    for name, executor, size in product(MODELS, EXECUTORS, SIZES):
        model = with_executor(load_model(find(configs_path() / "models", name)), executor)
        inputs = probe_inputs(*size, 1, FEATURES, None)
        one, two = [], []
        for _ in range(repeats + 1):
            one.append(wall_ns(model, inputs, {cores[0]}, 1))
            two.append(wall_ns(model, inputs, set(cores), 2))
        ratios = statistics.quantiles([a / b for a, b in zip(one[1:], two[1:], strict=True)])
        row = {"model": name, "executor": executor, "nodes": size[0], "edges": size[1]}
        rows.append(row | {"speed_up": ratios, "one_core_ms": statistics.median(one[1:]) / 1e6})
        print(name, executor, size, [round(ratio, 2) for ratio in ratios], flush=True)
    os.sched_setaffinity(0, cores)
    return rows


@contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Another process works on `core` as long as this is open."""
    work = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", work]) as process:
        try:
            yield
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    result: dict[str, Any] = {"repeats": options.repeats}
    result["idle"] = measure(options.repeats)
    with busy_core(sorted(os.sched_getaffinity(0))[1]):
        result["second_core_busy"] = measure(options.repeats)
    write_result(RESULT, result)


if __name__ == "__main__":
    main()
