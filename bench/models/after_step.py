"""Measure a forward pass right after a training step on the same core.

    python -m bench.models.after_step [--quick] [--models gcn,sage,gin,gat] [--rounds 40]

Another process, on the same core, trains for one step, computes without memory of its own for as
long, or sleeps for as long. Then the forward pass begins at once. Step ÷ compute is what the step
leaves behind in caches: above 1 where it pushes out what the forward pass needs, below 1 where both
use the same. Models are the demo's, over the kernels that serve; the step is that of a GCN as wide
on 2,000 nodes, about the demo's own graph.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.kit.as_lane import become_lane
from bench.kit.measure import elapsed_us, in_turns
from bench.kit.result import ROOT
from bench.kit.script import Script, Table
from serve.lane.executors.csr import train_with_csr, with_csr
from serve.lane.models.loader import load_model
from serve.lane.training.measure import made_up
from serve.lane.training.step import TrainStep
from serve.models import zoo
from serve.models.repository import find

REPOSITORY = ROOT / "configs" / "models"
DEGREE, FEATURES, CLASSES = 10, 32, 5
TRAINED_NODES, HIDDEN, LAYERS = 2_000, 64, 3
BEFORE = ("sleep", "compute", "step")

SCRIPT = Script(
    "after_step",
    full={"models": ("gcn", "sage", "gin", "gat"), "nodes": (100, 1_000, 10_000), "rounds": 40},
    quick={"models": ("gcn",), "nodes": (100,), "rounds": 3},
    tables=[
        Table("A forward pass by what its core did before, µs", "rows", {
            "model": "{model}", "nodes": "{nodes:,}",
            **{name: f"{{{name}_us:,.0f}}" for name in BEFORE},
            "step ÷ compute": "{step_over_compute:.2f}",
            "sleep ÷ compute": "{sleep_over_compute:.2f}",
        })
    ],
)  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each model and size."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with neighbour() as other:
        rows = [
            after_each(other, model, nodes, options.rounds)
            for model in options.models
            for nodes in options.nodes
        ]
    return {"threads": 1, "rows": rows}


def after_each(other: Connection, model: str, nodes: int, rounds: int) -> dict[str, Any]:
    """Return the medians of one model on one graph."""
    loaded = with_csr(load_model(find(REPOSITORY, model)))
    inputs, _, _ = made_up(nodes, DEGREE * nodes, FEATURES, CLASSES)

    def after(what: str) -> float:
        other.send(what)
        other.recv()
        return elapsed_us(loaded.run, inputs)

    times = in_turns({name: partial(after, name) for name in BEFORE}, rounds, warm_up=3)
    us = {name: statistics.median(found) for name, found in times.items()}
    return {
        "model": model, "nodes": nodes, **{f"{name}_us": us[name] for name in BEFORE},
        **{f"{name}_over_compute": us[name] / us["compute"] for name in ("step", "sleep")},
    }  # fmt: skip


@contextmanager
def neighbour() -> Iterator[Connection]:
    """Yield a connection to a process on this core, which does what it is told and says so."""
    ours, theirs = Pipe()
    process = Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.terminate()
        process.join()


def _work(told: Connection) -> None:
    torch.manual_seed(0)
    module = zoo.gcn(FEATURES, CLASSES, HIDDEN, LAYERS)
    step = TrainStep(module, ("x", "edge_index"), 0.01, train_with_csr(module, "gcn"))
    train = partial(step.run, *made_up(TRAINED_NODES, DEGREE * TRAINED_NODES, FEATURES, CLASSES))
    long_s = statistics.median(elapsed_us(train) for _ in range(10)) / 1e6
    while True:
        what = told.recv()
        if what == "step":
            train()
        elif what == "sleep":
            time.sleep(long_s)
        else:
            until = time.perf_counter() + long_s
            while time.perf_counter() < until:
                pass
        told.send(what)


if __name__ == "__main__":
    become_lane("bench.models.after_step")
    SCRIPT.main(measure, __doc__)
