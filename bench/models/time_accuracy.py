"""Compare estimated with measured run time, on graphs that were not used for calibration.

    python -m bench.models.time_accuracy [--quick] [--data FOLDER]

Each model is calibrated as at load, for each executor, in a process with a lane's allocator. It is
then timed on subgraphs and random graphs of 20 to 20,000 nodes, twice: the second time much later,
so that the difference between the two says how well this machine repeats itself. Errors are
|estimate ÷ measured − 1|, first with the calibration alone, then corrected by these runs one by
one. `recovery_runs` counts the runs until the correction stays within 15 % of where it settles
after every forward pass takes twice as long.
"""

import argparse
import os
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.kit.architectures import load
from bench.kit.as_lane import become_lane
from bench.kit.script import Script, Table
from serve.estimate import ModelEstimator, Overhead
from serve.graphs.datasets import load_dataset
from serve.graphs.subgraphs import subgraphs
from serve.lane.executors import with_executor
from serve.lane.measure.allocator import Allocator
from serve.lane.measure.calibrate import calibrate
from serve.lane.measure.probe_graphs import Shape, probe_graph
from serve.lane.models.loader import LoadedModel
from serve.workload import MODELS

#: Width and depth.
SIZES = {"small": (64, 3), "paper": (256, 8)}
FEATURES, CLASSES = 100, 12
LIMIT_BYTES = 2 << 30
#: Graphs that take longer are left out.
LIMIT_NS = 150_000_000
REPEATS, RECOVERED = 5, 0.15
SCRIPT = Script(
    "time_accuracy",
    full={
        "data": None, "budget": 6.0, "models": MODELS, "executors": ("csr", "eager"),
        "sizes": tuple(SIZES), "graphs": 60,
    },
    quick={"budget": 1.0, "models": ("gcn",), "executors": ("csr",), "sizes": ("small",),
           "graphs": 8},
    tables=[
        Table("Run time: |estimate ÷ measured − 1|, median and p95", "models", {
            "executor": "{executor}", "model": "{model} {size}", "graphs": "{graphs}",
            "calibrated": "{error_median:.1%}, {error_p95:.0%}",
            "corrected": "{corrected_median:.1%}, {corrected_p95:.0%}",
            "machine itself": "{repeat_median:.1%}, {repeat_p95:.0%}",
            "recovery runs": "{recovery_runs}",
        })
    ],
)  # fmt: skip

Inputs = dict[str, torch.Tensor]
#: Nodes and edges [2, E].
Graph = tuple[int, np.ndarray[Any, Any]]


def run_ns(loaded: LoadedModel, inputs: Inputs, passes: int = 1) -> int:
    """Return the wall time of that many passes."""
    started_ns = time.perf_counter_ns()
    for _ in range(passes):
        loaded.run(inputs)
    return time.perf_counter_ns() - started_ns


def median_ns(loaded: LoadedModel, inputs: Inputs) -> float:
    """Return the median time of a pass, after one that is not counted."""
    loaded.run(inputs)
    return float(np.median([run_ns(loaded, inputs) for _ in range(REPEATS)]))


def graphs(data: Path | None, count: int) -> list[Graph]:
    """Return half subgraphs of pubmed and artist, half random graphs."""
    found: list[Graph] = []
    for name in ("pubmed", "artist"):
        dataset = load_dataset(name, folder=data, scale=0.2)
        pool = subgraphs(dataset, count // 4, min_nodes=20, max_nodes=20_000, max_edges=200_000)
        found += [(graph.num_nodes, graph.edge_index) for graph in pool]
    rng = np.random.default_rng(7)
    while len(found) < count:
        nodes = int(10 ** rng.uniform(1.3, 4.3))
        num_edges = int(nodes * 10 ** rng.uniform(0, 1.6))
        if num_edges <= 200_000:
            found.append((nodes, rng.integers(0, nodes, (2, num_edges))))
    return found


def row(
    executor: str, model: str, size: str, edges: list[Graph], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the errors of one model on one executor."""
    hidden, layers = SIZES[size]
    loaded, signature = load(
        model, features=FEATURES, hidden=hidden, classes=CLASSES, layers=layers
    )
    loaded = with_executor(loaded, executor)
    held_by = become_lane("bench.models.time_accuracy").held_by
    started_s = time.perf_counter()
    calibration = calibrate(
        loaded, signature, budget_s=options.budget, max_bytes=LIMIT_BYTES,
        allocator=Allocator(held_by),
    )  # fmt: skip
    took_s = time.perf_counter() - started_s
    estimator = ModelEstimator(calibration, Overhead())
    sizes: list[tuple[int, int]] = [(nodes, pairs.shape[1]) for nodes, pairs in edges]
    kept = [
        i
        for i, at in enumerate(sizes)
        if calibration.time.at(*at) < LIMIT_NS
        and estimator.estimate(*at).reserve_bytes < LIMIT_BYTES
    ]
    order = np.random.default_rng(3).permutation(kept)
    inputs = {
        i: probe_graph(*sizes[i], Shape.PLAIN, loaded.spec.inputs, signature)
        | {"edge_index": torch.from_numpy(edges[i][1])}
        for i in kept
    }
    first = {i: median_ns(loaded, inputs[i]) for i in order}
    again = {i: median_ns(loaded, inputs[i]) for i in order}
    corrected = []
    for i in order:
        nodes, num_edges = sizes[i]
        corrected.append(estimator.estimate(nodes, num_edges).run_ns / first[i])
        estimator.observe_run((nodes, num_edges), int(first[i]))
    above = [again[i] > estimator.describe(*sizes[i]).run_high_ns for i in order]
    return {
        "executor": executor,
        "model": model,
        "size": size,
        "graphs": len(order),
        **errors("error", [calibration.time.at(*sizes[i]) / first[i] for i in order]),
        **errors("corrected", corrected[len(order) // 4 :]),
        **errors("repeat", [again[i] / first[i] for i in order]),
        "above_band": round(float(np.mean(above)), 4),
        "recovery_runs": recovery(loaded, estimator, [(sizes[i], inputs[i]) for i in order][:60]),
        "calibration_s": round(took_s, 2),
        "samples": calibration.time.samples,
        "load_average": round(os.getloadavg()[0], 2),
    }


def recovery(
    loaded: LoadedModel, estimator: ModelEstimator, graphs: list[tuple[tuple[int, int], Inputs]]
) -> int:
    """Return the runs of double length until the factor stays near where it settles."""
    factors = []
    for size, inputs in graphs:
        estimator.observe_run(size, run_ns(loaded, inputs, passes=2))
        factors.append(estimator.time_factor)
    settled = float(np.median(factors[-20:]))
    off = [i for i, factor in enumerate(factors) if abs(factor / settled - 1) > RECOVERED]
    return max(off, default=-1) + 1


def errors(name: str, ratios: list[float]) -> dict[str, float]:
    """Return median and 95th percentile of |ratio − 1|."""
    off = np.abs(np.array(ratios) - 1)
    return {
        f"{name}_median": round(float(np.median(off)), 4),
        f"{name}_p95": round(float(np.quantile(off, 0.95)), 4),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each executor, model and size."""
    data = options.data or os.environ.get("GNNSERVE_DATA")
    edges = graphs(Path(data) if data else None, options.graphs)
    cases = product(options.executors, options.models, options.sizes)
    return {"models": [row(*case, edges, options) for case in cases]}


if __name__ == "__main__":
    become_lane("bench.models.time_accuracy")
    SCRIPT.main(measure, __doc__)
