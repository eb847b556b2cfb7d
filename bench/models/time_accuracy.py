"""Estimated against measured run time, on graphs that were not used for calibration.

    python -m bench.models.time_accuracy [--quick] [--data FOLDER] [--budget S]
        [--executors eager,…]

This process has a lane's allocator. Each model is calibrated as at load, for each executor, then
timed on subgraphs and random graphs of 20 to 20,000 nodes, twice: the second time much later, so
that the difference between the two says how well this machine repeats itself, which no estimate can
beat. Errors are |estimate ÷ measured − 1|, first with the calibration alone, then with the
correction learned from these runs one by one.
A slow-down is forced by running every forward pass twice; `recovery` is the number of runs after
which the correction stays within 15 % of where it settles. What estimating costs is in
`bench.models.estimate_cost`. A full run takes about four minutes for each executor; what was
measured of others, with the same settings on the same machine, stays in
bench/results/time_accuracy.json.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.kit.architectures import load
from bench.kit.as_lane import become_lane
from bench.kit.machine import machine_facts
from bench.kit.result import RESULTS, write_result
from serve.estimate import ModelEstimator, Overhead
from serve.graphs.datasets import load_dataset
from serve.graphs.subgraphs import subgraphs
from serve.lane.executors import EXECUTORS, with_executor
from serve.lane.measure.calibrate import Allocator, calibrate
from serve.lane.measure.probe_graphs import Shape, probe_graph
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import Signature
from serve.native import Meter

RESULT = RESULTS / "time_accuracy.json"
SIZES = {"small": (64, 3), "paper": (256, 8)}
FEATURES, CLASSES = 100, 12
LIMIT_BYTES = 2 << 30
#: Graphs that take longer are left out.
LIMIT_NS = 150_000_000
REPEATS = 5
#: How near the correction must be to where it settles.
RECOVERED = 0.15

Inputs = dict[str, torch.Tensor]
Size = tuple[int, int]
#: Nodes and edges [2, E].
Graph = tuple[int, np.ndarray[Any, Any]]
Clock = Callable[[], int]
#: On one thread, processor time is wall time on a core of its own.
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, 32 graphs")
    parser.add_argument("--data", type=Path, default=os.environ.get("GNNSERVE_DATA"))
    parser.add_argument("--budget", type=float, default=6.0, help="seconds to calibrate")
    parser.add_argument("--models", default="gcn,sage,gin,gat")
    parser.add_argument("--executors", default=",".join(EXECUTORS))
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a busy machine")
    arguments = parser.parse_args()
    meter = become_lane("bench.models.time_accuracy")
    edges = _edges(arguments.data, 32 if arguments.quick else 60)
    executors = arguments.executors.split(",")
    results = [
        _measure(executor, model, size, edges, arguments.budget, CLOCKS[arguments.clock], meter)
        for executor in executors
        for size in (("small",) if arguments.quick else tuple(SIZES))
        for model in arguments.models.split(",")
    ]
    document: dict[str, Any] = {
        "clock": arguments.clock,
        "quick": arguments.quick,
    }
    document["models"] = _kept(document, executors) + results
    write_result(RESULT, document)
    show(document)


def _kept(circumstances: dict[str, Any], executors: list[str]) -> list[dict[str, Any]]:
    """Rows of other executors that were measured under the same circumstances."""
    if not RESULT.exists():
        return []
    before = json.loads(RESULT.read_text())
    circumstances = {**circumstances, "machine": machine_facts()}
    if any(before.get(key) != value for key, value in circumstances.items()):
        return []
    return [row for row in before["models"] if row["executor"] not in executors]


def _edges(data: Path | None, count: int) -> list[Graph]:
    """Half subgraphs of pubmed and artist, half random."""
    found: list[Graph] = []
    for name in ("pubmed", "artist"):
        dataset = load_dataset(name, folder=Path(data) if data else None, scale=0.2)
        pool = subgraphs(dataset, count // 4, min_nodes=20, max_nodes=20_000, max_edges=200_000)
        found += [(graph.num_nodes, graph.edge_index) for graph in pool]
    rng = np.random.default_rng(7)
    while len(found) < count:
        nodes = int(10 ** rng.uniform(1.3, 4.3))
        num_edges = int(nodes * 10 ** rng.uniform(0, 1.6))
        if num_edges <= 200_000:
            found.append((nodes, rng.integers(0, nodes, (2, num_edges))))
    return found


def _measure(
    executor: str,
    model: str,
    size: str,
    edges: list[Graph],
    budget_s: float,
    clock: Clock,
    meter: Meter,
) -> dict[str, Any]:
    hidden, layers = SIZES[size]
    loaded, signature = load(
        model, features=FEATURES, hidden=hidden, classes=CLASSES, layers=layers
    )
    loaded = with_executor(loaded, executor)
    started = time.perf_counter()
    found = calibrate(
        loaded, signature, budget_s=budget_s, max_bytes=LIMIT_BYTES,
        allocator=Allocator(meter.held_by),
    )  # fmt: skip
    took_s = time.perf_counter() - started
    estimator = ModelEstimator(found, Overhead())
    sizes: list[Size] = [(nodes, pairs.shape[1]) for nodes, pairs in edges]
    kept = [
        i
        for i, at in enumerate(sizes)
        if found.time.at(*at) < LIMIT_NS and estimator.estimate(*at).reserve_bytes < LIMIT_BYTES
    ]
    order = np.random.default_rng(3).permutation(kept)
    graphs = {i: _inputs(loaded, signature, *edges[i]) for i in kept}
    first = {i: _median_ns(loaded, graphs[i], clock) for i in order}
    again = {i: _median_ns(loaded, graphs[i], clock) for i in order}
    raw = np.array([found.time.at(*sizes[i]) / first[i] for i in order])
    corrected = []
    for i in order:
        nodes, num_edges = sizes[i]
        corrected.append(estimator.estimate(nodes, num_edges).run_ns / first[i])
        estimator.observe_run(nodes, num_edges, int(first[i]))
    above = [again[i] > estimator.describe(*sizes[i]).run_high_ns for i in order]
    repeated = np.array([again[i] / first[i] for i in order])
    return {
        "executor": executor,
        "model": model,
        "size": size,
        "graphs": len(order),
        "error_median": _median_error(raw),
        "error_p95": _p95_error(raw),
        "corrected_median": _median_error(np.array(corrected[len(order) // 4 :])),
        "corrected_p95": _p95_error(np.array(corrected[len(order) // 4 :])),
        "repeat_median": _median_error(repeated),
        "repeat_p95": _p95_error(repeated),
        "above_band": round(float(np.mean(above)), 4),
        "recovery_runs": _recovery(
            loaded, estimator, [(sizes[i], graphs[i]) for i in order][:60], clock
        ),
        "calibration_s": round(took_s, 2),
        "samples": found.time.samples,
        "load_average": round(os.getloadavg()[0], 2),
    }


def _inputs(
    loaded: LoadedModel, signature: Signature, nodes: int, pairs: np.ndarray[Any, Any]
) -> Inputs:
    inputs = probe_graph(nodes, pairs.shape[1], Shape.PLAIN, loaded.spec.inputs, signature)
    return inputs | {"edge_index": torch.from_numpy(pairs)}


def _run_ns(loaded: LoadedModel, inputs: Inputs, clock: Clock, passes: int = 1) -> int:
    started = clock()
    for _ in range(passes):
        loaded.run(inputs)
    return clock() - started


def _median_ns(loaded: LoadedModel, inputs: Inputs, clock: Clock) -> float:
    loaded.run(inputs)
    return float(np.median([_run_ns(loaded, inputs, clock) for _ in range(REPEATS)]))


def _recovery(
    loaded: LoadedModel, estimator: ModelEstimator, graphs: list[tuple[Size, Inputs]], clock: Clock
) -> int:
    """Runs of double length until the factor stays within 15 % of where it settles."""
    factors = []
    for (nodes, num_edges), inputs in graphs:
        estimator.observe_run(nodes, num_edges, _run_ns(loaded, inputs, clock, passes=2))
        factors.append(estimator.time_factor)
    settled = float(np.median(factors[-20:]))
    off = [i for i, factor in enumerate(factors) if abs(factor / settled - 1) > RECOVERED]
    return max(off, default=-1) + 1


def _median_error(ratios: np.ndarray[Any, Any]) -> float:
    return round(float(np.median(np.abs(ratios - 1))), 4)


def _p95_error(ratios: np.ndarray[Any, Any]) -> float:
    return round(float(np.quantile(np.abs(ratios - 1), 0.95)), 4)


def show(document: dict[str, Any]) -> None:
    title = f"run time ({document['clock']}): |estimate ÷ measured − 1| as median, p95"
    table = Table(title=title)
    for column in ("executor", "model", "graphs", "calibrated", "corrected", "machine itself",
                   "above\nband", "recovery\nruns", "calibr.\ns", "load"):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for row in document["models"]:
        pairs = [
            f"{row[f'{kind}_median']:.1%}, {row[f'{kind}_p95']:.0%}"
            for kind in ("error", "corrected", "repeat")
        ]
        facts = ("recovery_runs", "calibration_s", "load_average")
        table.add_row(
            row["executor"],
            f"{row['model']} {row['size']}",
            str(row["graphs"]),
            *pairs,
            f"{row['above_band']:.0%}",
            *(str(row[fact]) for fact in facts),
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
