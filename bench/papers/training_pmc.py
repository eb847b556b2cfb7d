"""Peak memory of a training step: traced estimate, CoGNN's closed form, and what was measured.

    python -m bench.papers.training_pmc [--quick] [--data FOLDER] [--graphs 10] [--layers 4,6,8,10]

A step trains on a whole graph: forward, loss over the labelled half of the nodes, backward, Adam.
It is estimated as the server estimates a job's (``serve.lane.training.measure``). Beside it stands
the closed form that CoGNN's authors published (``serve.estimate.closed_form``), at their threshold
1 and without weights, as it has none.

`measured` is the peak of tensors with inputs, weights and moments. Errors are estimate ÷ measured
− 1. A run's need adds what kernels took besides; the reserve is the estimate of that × the server's
safety factor. `published` says what the closed form gives for the graph of CoGNN's Figure 15.
"""

import argparse
import gc
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.kit.as_lane import become_lane
from bench.kit.script import Script, Table
from bench.models.pmc_accuracy import Graph, pools_of
from serve.estimate.closed_form import training_bytes
from serve.graphs.datasets import TABLE_4, load_dataset
from serve.lane.training.measure import LABELLED, SAFETY_FACTOR, Made, fit_step, given
from serve.lane.training.step import TrainStep
from serve.models import zoo
from serve.native import Meter

MODELS = ("gcn", "sage", "gin", "gat")
HIDDEN = 64
#: Graphs that are estimated to need more are cut down to what fits.
LIMIT_BYTES = 256 << 20
#: OVCAR-8H of CoGNN's Table IV: nodes, directed edges, features, classes.
OVCAR = 1_890_931, 3_946_402, 66, 2
#: GiB that Figure 15 shows for eight layers of 64.
FIGURE_15 = {"gcn": 10.7, "sage": 11.8, "gin": 18.6, "gat": 27.4}

SCRIPT = Script(
    "training_pmc",
    full={"data": None, "scale": 0.1, "models": MODELS, "datasets": tuple(TABLE_4),
          "layers": (4, 6, 8, 10), "graphs": 10},
    quick={"models": ("gcn",), "datasets": ("pubmed",), "layers": (4,), "graphs": 2,
           "scale": 0.02},
    tables=[
        Table("Peak memory of a training step: estimate ÷ measured − 1", "models", {
            "model": "{model}", "runs": "{runs}", "traced": "{low:+.2%} to {high:+.2%}",
            "need ÷ reserve, at most": "{need_share:.3f}",
            "closed form": "{closed_low:+.0%} to {closed_high:+.0%}", "below": "{closed_below}",
        }),
        Table("The closed form on OVCAR-8H, GiB", "published", {
            "model": "{model}", "closed form": "{closed_gib:.2f}", "Figure 15": "{paper_gib:.1f}",
            "error": "{error:+.1%}",
        }),
    ],
)  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return every run, and what they come to."""
    meter = become_lane("bench.papers.training_pmc")
    data = options.data or os.environ.get("GNNSERVE_DATA")
    rows: list[dict[str, Any]] = []
    sources = {}
    for name in options.datasets:
        dataset = load_dataset(name, folder=Path(data) if data else None, scale=options.scale)
        sources[name] = dataset.source
        graphs = pools_of(dataset, options.graphs)["to_largest"]
        for model, layers in product(options.models, options.layers):
            rows += runs(model, layers, name, graphs, meter)
    return {
        "safety_factor": SAFETY_FACTOR, "labelled": LABELLED, "hidden": HIDDEN,
        "datasets": sources,
        "models": [summary(model, rows) for model in options.models],
        "published": list(published()),
        "rows": rows,
    }  # fmt: skip


def step_of(model: str, widths: Sequence[int]) -> TrainStep:
    """Return steps of a model of the zoo with layers of these widths."""
    torch.manual_seed(0)
    build = getattr(zoo, model)
    module = build(widths[0], widths[-1], HIDDEN, len(widths) - 1)
    return TrainStep(module, ("x", "edge_index"), 0.01)


def staged_bytes(made: Made) -> int:
    """Return the bytes of a step's inputs."""
    inputs, rows, labels = made
    return sum(tensor.nbytes for tensor in (*inputs.values(), rows, labels))


def runs(
    model: str, layers: int, dataset: str, graphs: Sequence[Graph], meter: Meter
) -> Iterator[dict[str, Any]]:
    """Yield what a step was estimated to take and took, on each graph."""
    spec = TABLE_4[dataset]
    widths = [spec.num_features, *[HIDDEN] * (layers - 1), spec.num_classes]
    gc.collect()
    before_bytes = meter.live_bytes()
    step = step_of(model, widths)
    fit = fit_step(step, widths[0], widths[-1], meter)
    gc.collect()
    persistent_bytes = meter.live_bytes() - before_bytes
    for whole in graphs:
        graph = whole
        while fit.step_bytes(graph.num_nodes, graph.num_edges) > LIMIT_BYTES:
            graph = graph.cut(graph.num_nodes * 9 // 10)
        size = graph.num_nodes, graph.num_edges
        made = given(graph.edge_index, graph.num_nodes, widths[0], widths[-1])
        staged = persistent_bytes + staged_bytes(made)
        live_bytes = meter.live_bytes()
        need_bytes = staged + meter.held_by(partial(step.run, *made))
        measured_bytes = staged + meter.peak_bytes() - live_bytes
        yield {
            "model": model, "layers": layers, "dataset": dataset,
            "num_nodes": size[0], "num_edges": size[1], "measured_bytes": measured_bytes,
            "error": round((staged + fit.peak_bytes(*size)) / measured_bytes - 1, 6),
            "need_share": round(need_bytes / (staged + fit.step_bytes(*size)), 6),
            "closed_error": round(training_bytes(model, widths, *size) / measured_bytes - 1, 6),
            "problem": fit.problem,
        }  # fmt: skip


def summary(model: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the extremes of one model's runs."""
    its = [row for row in rows if row["model"] == model]
    errors, closed = ([row[name] for row in its] for name in ("error", "closed_error"))
    return {
        "model": model, "runs": len(its), "low": min(errors), "high": max(errors),
        "need_share": max(row["need_share"] for row in its),
        "closed_low": min(closed), "closed_high": max(closed),
        "closed_below": sum(error < 0 for error in closed),
        "problems": sorted({row["problem"] for row in its} - {""}),
    }  # fmt: skip


def published() -> Iterator[dict[str, Any]]:
    """Yield the closed form of eight layers on OVCAR-8H beside the paper's measurements."""
    nodes, edges, features, classes = OVCAR
    widths = [features, *[HIDDEN] * 7, classes]
    for model, paper_gib in FIGURE_15.items():
        closed_gib = training_bytes(model, widths, nodes, edges) / (1 << 30)
        yield {
            "model": model, "closed_gib": closed_gib, "paper_gib": paper_gib,
            "error": closed_gib / paper_gib - 1,
        }  # fmt: skip


if __name__ == "__main__":
    become_lane("bench.papers.training_pmc")
    SCRIPT.main(measure, __doc__)
