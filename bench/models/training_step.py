"""Measure a training step over the kernels that serve against one of PyG's own code.

    python -m bench.models.training_step [--quick] [--models gcn,sage,gin,gat] [--rounds 15]

A step is forward, loss of half of the nodes, backward and Adam, on one thread with a lane's
allocator: what a job does again and again (``serve.lane.training.step``). Models are those of
``serve.models.zoo`` with 100 features and 12 classes, graphs random with ten edges a node. Both
ways begin with the same weights and take turns; the ratio is PyG's time ÷ ours of one round.
Sorting the edges, by target and by source, is part of every step.
"""

import argparse
import statistics
from functools import partial
from typing import Any

import torch

from bench.kit.as_lane import become_lane
from bench.kit.measure import elapsed_us, in_turns, ratios, spread
from bench.kit.script import Script, Table
from serve.lane.executors.csr import train_with_csr
from serve.lane.training.measure import made_up
from serve.lane.training.step import TrainStep
from serve.models import zoo

DEGREE, FEATURES, CLASSES = 10, 100, 12
SHAPES = {"small": (64, 3), "paper": (256, 8)}
#: No round of one graph begins after this time.
LONGEST_S = 12.0

SCRIPT = Script(
    "training_step",
    full={
        "models": ("gcn", "sage", "gin", "gat"), "shapes": tuple(SHAPES),
        "nodes": (1_000, 8_000), "rounds": 15,
    },
    quick={"models": ("gcn",), "shapes": ("small",), "nodes": (200,), "rounds": 3},
    tables=[
        Table("A training step, one thread", "rows", {
            "model": "{model} {shape}", "nodes": "{nodes:,}", "PyG, ms": "{pyg_ms:.1f}",
            "csr, ms": "{csr_ms:.1f}",
            "PyG ÷ csr": "{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})",
        })
    ],
)  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each model and size."""
    rows = [
        compared(model, shape, nodes, options.rounds)
        for shape in options.shapes
        for model in options.models
        for nodes in options.nodes
    ]
    return {"threads": 1, "rows": rows}


def compared(model: str, shape: str, nodes: int, rounds: int) -> dict[str, Any]:
    """Return times and ratios of both ways on one graph."""
    hidden, layers = SHAPES[shape]
    made = made_up(nodes, DEGREE * nodes, FEATURES, CLASSES)
    ways = {
        kind: partial(elapsed_us, step_of(model, hidden, layers, kind).run, *made)
        for kind in ("pyg", "csr")
    }
    times = in_turns(ways, rounds, limit_s=LONGEST_S)
    return {
        "model": model, "shape": shape, "nodes": nodes, "edges": DEGREE * nodes,
        **{f"{kind}_ms": round(statistics.median(us) / 1e3, 3) for kind, us in times.items()},
        "ratio": spread(ratios(times["pyg"], times["csr"]), 2),
    }  # fmt: skip


def step_of(model: str, hidden: int, layers: int, kind: str) -> TrainStep:
    """Return seeded steps of a model of the zoo."""
    torch.manual_seed(0)
    module = getattr(zoo, model)(FEATURES, CLASSES, hidden, layers)
    after = train_with_csr(module, model) if kind == "csr" else lambda: None
    return TrainStep(module, ("x", "edge_index"), 0.01, after)


if __name__ == "__main__":
    become_lane("bench.models.training_step")
    SCRIPT.main(measure, __doc__)
