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

import time
from statistics import median
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from bench.gpu.engines import FEATURES, Bench, call, nodes_call, run_on_engine
from bench.gpu.kit import MODELS, Result, relative_error, spread
from bench.gpu.serving import LIMIT
from bench.kit.measure import ratios
from serve.server.api import InferCall
from serve.server.engine import Engine

#: Each round starts a server for every choice, which takes most of the time.
_ROUNDS = 2
#: Runs of a shape before those that count; the lane captures it within them.
_WARM = 24


class Answers:
    """Answers of servers with and without a feature, which must agree."""

    def __init__(self) -> None:
        self._first: dict[Any, Any] = {}
        self._worst = 0.0

    def run_us(self, engine: Engine, key: Any, request: InferCall) -> float:
        """Return the lane's time for a request in µs; compare the answer with the first one."""
        found = engine.submit(request).result()
        expected = self._first.setdefault(key, found.output)
        self._worst = max(self._worst, relative_error(found.output, expected))
        return float(found.record.run_ns) / 1e3

    def check(self, result: Result, what: str) -> None:
        """Report the largest difference."""
        result.check(f"{what} within {LIMIT}", self._worst <= LIMIT, self._worst)


def body(result: Result, bench: Bench) -> None:
    for name, part in (("replays", replays), ("hot rows", hot_rows)):
        with result.part(name):
            part(result, bench)


def replays(result: Result, bench: Bench) -> None:
    graphs = bench.graphs(4)
    jobs = [(name, index) for name in MODELS for index in range(len(graphs))]
    times = {(job, choice): list[float]() for job in jobs for choice in ("auto", "off")}
    answers = Answers()
    for _ in range(1 if bench.short else _ROUNDS):
        for choice in ("auto", "off"):
            with bench.engine("slack", "rolling", 1, cuda_graphs=choice) as (engine, _):
                if choice == "auto":
                    most = {name: engine.estimator(name).calibration.replay_most for name in MODELS}
                    result.put("replay_most", most)
                for name, index in jobs:
                    runs = [
                        answers.run_us(engine, (name, index), call(name, graphs[index]))
                        for _ in range(_WARM + (5 if bench.short else 40))
                    ]
                    times[(name, index), choice].append(median(runs[_WARM:]))
    answers.check(result, "replayed answers")
    rows = []
    for name, index in jobs:
        auto, off = times[(name, index), "auto"], times[(name, index), "off"]
        row = {"model": name, "nodes": len(graphs[index]["x"])}
        row |= {"auto_us": spread(auto), "off_us": spread(off)}
        rows.append(row | {"auto_to_off": spread(ratios(auto, off))})
    result.put("replays", rows)


def hot_rows(result: Result, bench: Bench) -> None:
    nodes = 20_000 if bench.dry else 1_000_000
    feature_bytes = 4 * FEATURES * nodes
    graph = bench.resident_graph("graph", nodes)
    choices = {"off": "off", "a tenth": f"{feature_bytes // 10} B", "auto": "auto"}
    asked = np.random.default_rng(1).integers(0, nodes, (20 if bench.short else 200, 256))
    times: dict[str, list[float]] = {name: [] for name in choices}
    shares: dict[str, float] = {}
    answers = Answers()
    for _ in range(1 if bench.short else _ROUNDS):
        for name, memory in choices.items():
            graphs = (replace(graph, hot_memory=memory),)
            with bench.engine("slack", "rolling", 1, graphs=graphs) as (engine, _):
                settle(engine)
                runs = [
                    answers.run_us(engine, index, nodes_call(ids, index))
                    for index, ids in enumerate(asked)
                ]
                times[name].append(median(runs))
                rows, hot = engine.snapshot().gathered_rows.get("g", (0, 0))
                shares[name] = round(hot / max(1, rows), 3)
    answers.check(result, "answers with hot rows")
    result.put("hot_rows", {
        "nodes": nodes, "feature_bytes": feature_bytes, "hit_share": shares,
        "run_us": {name: spread(found) for name, found in times.items()},
        "to_off": {name: spread(ratios(found, times["off"])) for name, found in times.items()},
    })  # fmt: skip


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_on_engine("recurring", __doc__, body)
