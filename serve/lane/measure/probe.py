"""A model that can be run on graphs of any size, to measure it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from serve.estimate.calibration import (
    Curve,
    Linear,
)
from serve.estimate.memory import (
    MemoryTrace,
    peak_at,
)
from serve.inputs import INPUTS, Size
from serve.lane.measure.probe_graphs import Shape, probe_graph
from serve.lane.measure.where_measured import Site
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import Signature

Run = Callable[[], torch.Tensor]
#: Peak bytes for a number of nodes and edges.
Need = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """A model, the site that measures it, and what is known of its inputs."""

    loaded: LoadedModel
    signature: Signature
    site: Site
    trial: LoadedModel | None = None

    def graph(
        self, num_nodes: int, num_edges: int, shape: Shape = Shape.PLAIN
    ) -> dict[str, torch.Tensor]:
        """Return the model's inputs for a graph of that size and shape."""
        return probe_graph(num_nodes, num_edges, shape, self.loaded.spec.inputs, self.signature)

    def runner(self, inputs: dict[str, torch.Tensor]) -> Run:
        """Return a function that runs the model once."""
        return lambda: self.loaded.run(inputs)

    def attempt(self, size: tuple[int, int], shape: Shape = Shape.PLAIN) -> None:
        """Raise what the model raises for such a graph, where an error is only that."""
        if self.trial is not None:
            self.trial.run(self.graph(*size, shape))

    def trace(self, num_nodes: int, num_edges: int, shape: Shape = Shape.PLAIN) -> MemoryTrace:
        """Trace the allocations of one run."""
        run = self.runner(self.site.place(self.graph(num_nodes, num_edges, shape)))
        return self.site.trace(run, self.loaded.module, num_nodes, num_edges)

    def takes(self, shape: Shape) -> bool:
        """Return True when the shape is plain or changes an input of this model."""
        if shape is Shape.PLAIN:
            return True
        needs = "batch" if shape in (Shape.SINGLES, Shape.LOPSIDED) else "edge_index"
        return needs in self.loaded.spec.inputs

    def input_bytes(self) -> Linear:
        """Return the bytes of the staged inputs."""
        sizes: dict[Size, int] = {
            "F": self.signature.num_features,
            "D": self.signature.edge_dim or 0,
        }
        each_bytes = {"N": 0, "E": 0}
        for name in self.loaded.spec.inputs:
            each_bytes[INPUTS[name].per[0]] += INPUTS[name].bytes_each(sizes)
        return Linear(each_bytes["N"], each_bytes["E"], 0.0)

    def output_bytes(self) -> Linear:
        """Return an upper bound of the output's bytes; each node may be a graph of its own."""
        row = 4 * self.signature.num_outputs
        many = self.signature.rows == "node" or "batch" in self.loaded.spec.inputs
        return Linear(row, 0.0, 0.0) if many else Linear(0.0, 0.0, row)


def need_for(inputs: Linear, planes: tuple[Linear, ...], curve: Curve | None = None) -> Need:
    """Return the bytes of inputs and activations as a function of nodes and edges."""

    def need(num_nodes: int, num_edges: int) -> float:
        size = num_nodes, num_edges
        live = max(peak_at(planes, *size), 0.0 if curve is None else curve.at(*size))
        return inputs.at(*size) + live

    return need
