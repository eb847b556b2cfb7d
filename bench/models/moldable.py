"""Compare one thread on one core with two threads on two cores, for one long request alone.

    python -m bench.models.moldable [--quick] [--repeats 7]

The demo's models on each executor, in one process; the two ways alternate, wall clock. Speed-up is
one core's time ÷ two cores' time, as quartiles; two requests at once on a core each would get 2.
First on an idle machine, then beside a process that keeps the second core busy, as the server's own
threads or another request do.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch

from bench.kit.measure import in_turns, quartiles, ratios
from bench.kit.script import Script, Table
from serve.lane.executors import with_executor
from serve.lane.measure.probe_signature import probe_inputs
from serve.lane.models.loader import LoadedModel, load_model
from serve.models.repository import find
from serve.resources import configs_path
from serve.workload import MODELS

FEATURES, EDGES_PER_NODE, EXECUTORS = 32, 10, ("eager", "csr")
COLUMNS = {
    "model": "{model}", "executor": "{executor}", "nodes": "{nodes:,}",
    "one core, ms": "{one_core_ms:.1f}", "speed-up": "{speed_up[1]:.2f}",
}  # fmt: skip
SCRIPT = Script(
    "moldable",
    full={"repeats": 7, "nodes": (3_000, 8_000, 30_000)},
    quick={"repeats": 2, "nodes": (3_000,)},
    tables=[Table("Idle", "idle", COLUMNS), Table("Second core busy", "second_core_busy", COLUMNS)],
)


def wall_ms(model: LoadedModel, inputs: Mapping[str, Any], cores: set[int]) -> float:
    """Return the time of a run with a thread for each of the cores."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    started_ns = time.monotonic_ns()
    model.run(inputs)
    return (time.monotonic_ns() - started_ns) / 1e6


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each model, executor and size."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    found = []
    for name, executor, nodes in product(MODELS, EXECUTORS, options.nodes):
        model = with_executor(load_model(find(configs_path() / "models", name)), executor)
        inputs = probe_inputs(nodes, EDGES_PER_NODE * nodes, 1, FEATURES, None)
        ways = {
            "one": partial(wall_ms, model, inputs, {cores[0]}),
            "two": partial(wall_ms, model, inputs, set(cores)),
        }
        times = in_turns(ways, options.repeats)
        found.append(
            {
                "model": name,
                "executor": executor,
                "nodes": nodes,
                "edges": EDGES_PER_NODE * nodes,
                "speed_up": quartiles(ratios(times["one"], times["two"])),
                "one_core_ms": median(times["one"]),
            }
        )
    os.sched_setaffinity(0, cores)
    return found


@contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Keep another process working on the core while open."""
    work = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", work]) as process:
        try:
            yield
        finally:
            process.kill()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return rows of the idle machine, and of one whose second core is busy."""
    found: dict[str, Any] = {"repeats": options.repeats, "idle": rows(options)}
    with busy_core(sorted(os.sched_getaffinity(0))[-1]):
        return found | {"second_core_busy": rows(options)}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
