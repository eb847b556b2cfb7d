"""Measure what recurs: shapes replayed as CUDA graphs, and nodes gathered from a hot set.

    python -m bench.gpu.recurring [--quick] [--dry]

Through the server's engine, with and without in turns, on the same requests:

- replays: requests of four models at sizes that recur, one at a time: the lane's time with
  `device.cuda_graphs` auto ÷ off, and the size up to which the race at calibration chose replays;
- hot rows: a resident graph whose features take half a gigabyte, asked for nodes by one client: the
  lane's time with `graph.hot_memory` auto (all rows fit) and a tenth of the features ÷ off, and the
  hit rate.

Answers with and without must agree. Needs msgspec.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.gpu.engines import FEATURES, Bench, call, nodes_call
from bench.gpu.kit import MODELS, Result, run, spread
from bench.gpu.serving import LIMIT
from serve.config import GraphConfig
from serve.estimate.calibration import Calibration
from serve.graphs.generate import generate_edges
from serve.server.engine import Engine

#: Each round starts a server for every choice, which takes most of the time.
_ROUNDS = 2
#: Runs of a shape before those that count; the lane captures it within them.
_WARM = 24


def body(result: Result, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.dry, arguments.quick)
        bench.write()
        for name, part in (("replays", replays), ("hot rows", hot_rows)):
            with result.part(name):
                part(result, bench)


def replays(result: Result, bench: Bench) -> None:
    short = bench.quick or bench.dry
    graphs = bench.graphs(4)
    jobs = [(name, index) for name in MODELS for index in range(len(graphs))]
    times: dict[tuple[str, int], dict[str, list[float]]] = {
        job: {"auto": [], "off": []} for job in jobs
    }
    answers: dict[tuple[str, int], Any] = {}
    worst = 0.0
    for _ in range(1 if short else _ROUNDS):
        for choice in ("auto", "off"):
            with bench.engine("slack", "rolling", 1, cuda_graphs=choice) as (engine, _):
                if choice == "auto":
                    result.put("replay_most", {name: calibration(engine, name).replay_most
                                               for name in MODELS})  # fmt: skip
                for job in jobs:
                    name, index = job
                    runs = []
                    for _ in range(_WARM + (5 if short else 40)):
                        found = engine.submit(call(name, graphs[index])).result()
                        runs.append(found.record.run_ns / 1e3)
                    times[job][choice].append(median(runs[_WARM:]))
                    wanted = answers.setdefault(job, found.output)
                    scale = max(float(np.abs(wanted).max()), 1e-6)
                    worst = max(worst, float(np.abs(found.output - wanted).max()) / scale)
    result.check(f"replayed answers within {LIMIT}", worst <= LIMIT, worst)
    result.put("replays", [
        {"model": name, "nodes": len(graphs[index]["x"])}
        | {f"{choice}_us": spread(found) for choice, found in times[name, index].items()}
        | {"auto_to_off": ratios(times[name, index]["auto"], times[name, index]["off"])}
        for name, index in jobs
    ])  # fmt: skip


def hot_rows(result: Result, bench: Bench) -> None:
    short = bench.quick or bench.dry
    nodes = 20_000 if bench.dry else 1_000_000
    rng = np.random.default_rng(0)
    edges = generate_edges(nodes, 15 * nodes, rng).astype(np.int64)
    x = rng.standard_normal((nodes, FEATURES), dtype=np.float32)
    path = bench.folder / "graph.npz"
    np.savez(path, num_nodes=nodes, edge_index=edges, x=x)
    choices = {"off": "off", "a tenth": f"{x.nbytes // 10} B", "auto": "auto"}
    asked = [rng.integers(0, nodes, 256) for _ in range(20 if short else 200)]
    times: dict[str, list[float]] = {name: [] for name in choices}
    shares: dict[str, float] = {}
    answers: list[Any] = []
    worst = 0.0
    for _ in range(1 if short else _ROUNDS):
        for name, memory in choices.items():
            graphs = (GraphConfig(name="g", file=str(path), hot_memory=memory),)
            with bench.engine("slack", "rolling", 1, graphs=graphs) as (engine, _):
                settle(engine)
                runs = []
                for index, ids in enumerate(asked):
                    found = engine.submit(nodes_call(ids, index)).result()
                    runs.append(found.record.run_ns / 1e3)
                    if len(answers) <= index:
                        answers.append(found.output)
                    wanted = answers[index]
                    scale = max(float(np.abs(wanted).max()), 1e-6)
                    worst = max(worst, float(np.abs(found.output - wanted).max()) / scale)
                times[name].append(median(runs))
                rows, hot = engine.snapshot().gathered_rows.get("g", (0, 0))
                shares[name] = round(hot / max(1, rows), 3)
    result.check(f"answers with hot rows within {LIMIT}", worst <= LIMIT, worst)
    result.put("hot_rows", {
        "nodes": nodes, "feature_bytes": x.nbytes, "hit_share": shares,
        "run_us": {name: spread(found) for name, found in times.items()},
        "to_off": {name: ratios(found, times["off"]) for name, found in times.items()},
    })  # fmt: skip


def calibration(engine: Engine, name: str) -> Calibration:
    return engine.estimator(name).calibration


def settle(engine: Engine) -> None:
    """Wait until lanes gather the rows, from the hot set where there is one."""
    give_up = time.monotonic() + 60
    count = 0
    while time.monotonic() < give_up:
        engine.submit(nodes_call(np.arange(64), 0)).result()
        count += 1
        rows = engine.snapshot().gathered_rows
        if count >= _WARM and (not rows or rows["g"][1] > 0):
            return


def ratios(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return the spread of the ratios by round."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    run("recurring", __doc__, body)
