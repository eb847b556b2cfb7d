"""Peak memory of a training step: traced estimate, CoGNN's closed form, and what was measured.

    python -m bench.papers.training_pmc [--quick] [--data FOLDER] [--graphs 10] [--layers 4,6,8,10]

A step trains on a whole graph: forward, loss over the labelled half of the nodes, backward, Adam.
It is estimated as forward passes are: small graphs are traced, and each moment gives a plane over
nodes and edges (``serve.estimate.memory``). What stays from step to step, weights and Adam's two
moments, is counted once. Beside it stands the closed form that CoGNN's authors published
(``bench.papers.closed_form``), at their threshold 1 and without weights, as it has none.

`measured` is the peak of tensors with inputs, weights and moments. Errors are estimate ÷ measured
− 1. A run's need adds what kernels took besides; the reserve is the estimate of that × the server's
safety factor. `published` says what the closed form gives for the graph of CoGNN's Figure 15.
"""

import argparse
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.kit.as_lane import become_lane
from bench.kit.script import Script, Table
from bench.models.pmc_accuracy import Graph, pools_of
from bench.papers.closed_form import training_bytes
from serve.estimate.calibration import Linear
from serve.estimate.estimator import SAFETY_FACTOR
from serve.estimate.memory import MemoryTrace, fit_held, fit_planes, peak_at
from serve.graphs.datasets import TABLE_4, load_dataset
from serve.lane.measure.tracing import trace
from serve.models import zoo
from serve.native import Meter

MODELS = ("gcn", "sage", "gin", "gat")
HIDDEN = 64
#: Share of the nodes whose labels count.
LABELLED = 0.5
#: Graphs that are estimated to need more are cut down to what fits.
LIMIT_BYTES = 256 << 20
#: Nodes and edges of traced graphs, both varied independently.
_TRACED = ((60, 150), (60, 600), (90, 150), (130, 900), (200, 400), (60, 40), (200, 120))
_LARGER = tuple((8 * nodes, 8 * edges) for nodes, edges in _TRACED)
#: Edges a node, and bytes, of the graphs on which all that kernels hold is measured.
_HELD_RATIOS = (0.5, 2.0, 8.0, 32.0)
_HELD_BYTES = 12 << 20
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

Inputs = dict[str, Tensor]


class TrainStep:
    """Steps of training on whole graphs; each begins and ends without gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.train()
        self._optimizer = torch.optim.Adam(module.parameters(), lr=0.01)

    def run(self, inputs: Inputs) -> None:
        """Train on `x` [N, F], `edge_index` [2, E] and the first labels `y` [T] once."""
        labels = inputs["y"]
        out = self.module(inputs["x"], inputs["edge_index"])
        torch.autograd.backward(cross_entropy(out[: len(labels)], labels))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def persistent_bytes(self) -> int:
        """Return the bytes of weights, buffers and the optimiser's state, after a first step."""
        states = [
            value
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        kept = [*self.module.parameters(), *self.module.buffers(), *states]
        return sum(tensor.nbytes for tensor in kept)

    def trace(self, inputs: Inputs, num_nodes: int, num_edges: int) -> MemoryTrace:
        """Trace the allocations of one step."""
        return trace(lambda: self.run(inputs), self.module, num_nodes, num_edges)


@dataclass(frozen=True)
class StepFit:
    """What a step of a model is estimated to take."""

    persistent_bytes: int
    inputs: Linear
    planes: tuple[Linear, ...]
    held: tuple[Linear, ...]
    #: Empty when the planes explain all that was traced.
    problem: str

    def tensor_bytes(self, num_nodes: int, num_edges: int) -> float:
        """Return the peak of tensors, inputs and what is persistent included."""
        size = num_nodes, num_edges
        return self.persistent_bytes + self.inputs.at(*size) + peak_at(self.planes, *size)

    def reserve_bytes(self, num_nodes: int, num_edges: int) -> float:
        """Return what a step may take, kernels' own memory included."""
        size = num_nodes, num_edges
        most = max(peak_at(self.planes, *size), peak_at(self.held, *size))
        return SAFETY_FACTOR * (self.persistent_bytes + self.inputs.at(*size) + most)


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
    return TrainStep(build(widths[0], widths[-1], HIDDEN, len(widths) - 1))


def inputs_of(graph: Graph, features: int, classes: int) -> Inputs:
    """Return seeded features and labels, and the graph's own edges."""
    rng = torch.Generator().manual_seed(0)
    labelled = int(np.ceil(LABELLED * graph.num_nodes))
    return {
        "x": torch.randn(graph.num_nodes, features, generator=rng),
        "edge_index": torch.from_numpy(np.ascontiguousarray(graph.edge_index, dtype=np.int64)),
        "y": torch.randint(classes, (labelled,), generator=rng),
    }


def random_graph(num_nodes: int, num_edges: int) -> Graph:
    """Return a graph without loops."""
    rng = np.random.default_rng(num_nodes + num_edges)
    source = rng.integers(0, num_nodes, num_edges)
    target = (source + rng.integers(1, num_nodes, num_edges)) % num_nodes
    return Graph(num_nodes, np.stack([source, target]))


def fit_step(step: TrainStep, features: int, classes: int, meter: Meter | None = None) -> StepFit:
    """Trace small graphs and fit planes; with a meter, measure what kernels hold besides."""

    def made(num_nodes: int, num_edges: int) -> Inputs:
        return inputs_of(random_graph(num_nodes, num_edges), features, classes)

    step.run(made(*_TRACED[0]))  # the optimiser's state appears
    traces = [step.trace(made(*size), *size) for size in (*_TRACED, *_LARGER)]
    planes, problem = fit_planes(traces)
    held: list[tuple[int, int, int]] = []
    for ratio in _HELD_RATIOS if meter is not None else ():
        assert meter is not None
        nodes = 1_000_000
        while peak_at(planes, nodes, int(ratio * nodes)) > _HELD_BYTES:
            nodes = nodes * 7 // 8
        size = nodes, int(ratio * nodes)
        inputs = made(*size)
        held.append((*size, meter.held_by(partial(step.run, inputs))))
    labels = 8 * LABELLED
    return StepFit(
        persistent_bytes=step.persistent_bytes(),
        inputs=Linear((4.0 * features + labels, 16.0), 8.0),
        planes=planes,
        held=fit_held(held) if held else (),
        problem=problem,
    )


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
        while fit.reserve_bytes(graph.num_nodes, graph.num_edges) > LIMIT_BYTES:
            graph = graph.cut(graph.num_nodes * 9 // 10)
        size = graph.num_nodes, graph.num_edges
        inputs = inputs_of(graph, widths[0], widths[-1])
        staged = persistent_bytes + sum(tensor.nbytes for tensor in inputs.values())
        live_bytes = meter.live_bytes()
        need_bytes = staged + meter.held_by(partial(step.run, inputs))
        measured_bytes = staged + meter.peak_bytes() - live_bytes
        yield {
            "model": model, "layers": layers, "dataset": dataset,
            "num_nodes": size[0], "num_edges": size[1], "measured_bytes": measured_bytes,
            "error": round(fit.tensor_bytes(*size) / measured_bytes - 1, 6),
            "need_share": round(need_bytes / fit.reserve_bytes(*size), 6),
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
