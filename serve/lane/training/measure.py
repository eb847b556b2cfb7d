"""Memory of a training step, known before one runs on the graph.

As for a forward pass, small graphs are traced and give planes over nodes and edges
(``serve.estimate.memory``): a step begins and ends without gradients, so all that a trace takes is
given back. What kernels take besides is measured. What stays from step to step, weights and Adam's
two moments, is counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from serve.estimate.calibration import Linear
from serve.estimate.memory import fit_held, fit_planes, peak_at
from serve.lane.measure.tracing import trace
from serve.lane.training.step import TrainStep
from serve.native import Meter

#: Share of the nodes whose labels count.
LABELLED = 0.5
#: Nodes and edges of traced graphs, both varied independently.
_TRACED = ((60, 150), (60, 600), (90, 150), (130, 900), (200, 400), (60, 40), (200, 120))
_LARGER = tuple((8 * nodes, 8 * edges) for nodes, edges in _TRACED)
#: Edges a node, most bytes, and most and fewest nodes, of the graphs on which all that kernels hold
#: is measured. Where weights are large, they may take a multiple of what a step takes whatever the
#: graph: on smaller ones, that would decide.
_HELD_RATIOS = (0.5, 2.0, 8.0, 32.0)
_HELD_BYTES = 12 << 20
_HELD_CONSTANTS = 3
_HELD_MOST, _HELD_LEAST = 1_000_000, 16
#: Factor on what a step takes, as on requests (``estimator.SAFETY_FACTOR``).
SAFETY_FACTOR = 1.03

Made = tuple[Mapping[str, Tensor], Tensor, Tensor]


@dataclass(frozen=True)
class StepFit:
    """What a step of a model is estimated to take."""

    persistent_bytes: int
    planes: tuple[Linear, ...]
    held: tuple[Linear, ...]
    #: Empty when the planes explain all that was traced.
    problem: str

    def peak_bytes(self, num_nodes: int, num_edges: int) -> float:
        """Return the peak of tensors in a step, without inputs and what is persistent."""
        return peak_at(self.planes, num_nodes, num_edges)

    def step_bytes(self, num_nodes: int, num_edges: int) -> int:
        """Return what a step may take beyond inputs and what is persistent, kernels included."""
        size = num_nodes, num_edges
        return int(SAFETY_FACTOR * max(peak_at(self.planes, *size), peak_at(self.held, *size))) + 1


def graph_bytes(num_nodes: int, num_edges: int, features: int) -> int:
    """Return the bytes of a graph whose nodes all have labels, as a job keeps it."""
    return 4 * num_nodes * features + 16 * num_edges + 16 * num_nodes


def fit_step(
    step: TrainStep,
    features: int,
    classes: int,
    meter: Meter | None = None,
    tell: Callable[[float], None] = lambda share: None,
) -> StepFit:
    """Trace small graphs and fit planes; with a meter, measure what kernels hold besides."""
    step.run(*made_up(*_TRACED[0], features, classes))  # the optimiser's state appears
    sizes = (*_TRACED, *_LARGER)
    traces = []
    for number, size in enumerate(sizes):
        made = made_up(*size, features, classes)
        traces.append(trace(partial(step.run, *made), step.module, *size))
        tell((number + 1) / len(sizes))
    planes, problem = fit_planes(traces)
    held: list[tuple[int, int, int]] = []
    for ratio in _HELD_RATIOS if meter is not None else ():
        assert meter is not None
        size = _measured_size(planes, ratio)
        made = made_up(*size, features, classes)
        held.append((*size, meter.held_by(partial(step.run, *made))))
    return StepFit(step.persistent_bytes(), planes, fit_held(held) if held else (), problem)


def _measured_size(planes: Sequence[Linear], ratio: float) -> tuple[int, int]:
    """Return nodes and edges of a graph on which what kernels hold is measured."""
    most_bytes = max(_HELD_BYTES, _HELD_CONSTANTS * peak_at(planes, 0, 0))
    nodes = _HELD_MOST
    while nodes > _HELD_LEAST and peak_at(planes, nodes, int(ratio * nodes)) > most_bytes:
        nodes = nodes * 7 // 8
    return nodes, int(ratio * nodes)


def made_up(num_nodes: int, num_edges: int, features: int, classes: int) -> Made:
    """Return a seeded graph without loops, half of its nodes, and their labels."""
    rng = np.random.default_rng(num_nodes + num_edges)
    source = rng.integers(0, num_nodes, num_edges)
    target = (source + rng.integers(1, num_nodes, num_edges)) % num_nodes
    return given(np.stack([source, target]), num_nodes, features, classes)


def given(edges: np.ndarray, num_nodes: int, features: int, classes: int) -> Made:
    """Return seeded features and labels for half of the nodes of a graph."""
    rng = torch.Generator().manual_seed(0)
    rows = torch.arange(int(np.ceil(LABELLED * num_nodes)))
    inputs = {
        "x": torch.randn(num_nodes, features, generator=rng),
        "edge_index": torch.from_numpy(np.ascontiguousarray(edges, dtype=np.int64)),
    }
    return inputs, rows, torch.randint(classes, (len(rows),), generator=rng)
