"""A model that can be run on graphs of any size, to measure it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from serve.estimate.calibration import Curve, Linear, with_pairs
from serve.estimate.memory import (
    MemoryTrace,
    peak_at,
)
from serve.inputs import INPUTS, Size
from serve.lane.measure.allocator import UNMETERED, Run
from serve.lane.measure.probe_graphs import OneKind, Shape, inputs_for
from serve.lane.measure.where_measured import Site
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import Signature

#: Peak bytes for a graph's counts.
Need = Callable[..., float]


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """A model, the site that measures it, and what is known of its inputs."""

    loaded: LoadedModel
    signature: Signature
    site: Site
    trial: LoadedModel | None = None
    #: ``Allocator.limited``, for every run.
    limited: Callable[[Run], Run] = UNMETERED.limited

    def graph(
        self, counts: tuple[int, ...], shape: Shape | OneKind = Shape.PLAIN
    ) -> dict[str, torch.Tensor]:
        """Return the model's inputs for a graph with these counts, of that shape."""
        return inputs_for(self.loaded.spec, self.signature, counts, shape)

    def totals(self, counts: tuple[int, ...]) -> tuple[int, int]:
        """Return the number of nodes, and of all other things."""
        interface = self.loaded.spec.interface
        return (counts[0], counts[1]) if interface is None else interface.totals(counts)

    def runner(self, inputs: dict[str, torch.Tensor]) -> Run:
        """Return a function that runs the model once, within the memory of measurements."""
        return self.limited(lambda: self.loaded.outputs(inputs))

    def attempt(self, counts: tuple[int, ...], shape: Shape | OneKind = Shape.PLAIN) -> None:
        """Raise what the model raises for such a graph, where an error is only that."""
        if self.trial is not None:
            self.trial.outputs(self.graph(counts, shape))

    def trace(self, counts: tuple[int, ...], shape: Shape | OneKind = Shape.PLAIN) -> MemoryTrace:
        """Trace the allocations of one run."""
        return self.trace_of(self.graph(counts, shape), counts)

    def trace_of(self, graph: dict[str, torch.Tensor], counts: tuple[int, ...]) -> MemoryTrace:
        """Trace the allocations of one run on these inputs, as one with these counts."""
        run = self.runner(self.site.place(graph))
        return self.site.trace(run, self.loaded.module, *counts)

    def takes(self, shape: Shape) -> bool:
        """Return True when the shape is plain or changes an input of this model."""
        if shape is Shape.PLAIN:
            return True
        of_graphs = shape in (Shape.SINGLES, Shape.LOPSIDED, Shape.MANY)
        of_kinds = shape in (Shape.LOWEST, Shape.HIGHEST)
        if (interface := self.loaded.spec.interface) is not None:
            slots = interface.inputs
            if of_kinds:
                return any(slot.is_kind for slot in slots)
            return bool(interface.graphs) if of_graphs else any(slot.is_links for slot in slots)
        if of_kinds:
            return False
        needs = "batch" if of_graphs else "edge_index"
        return needs in self.loaded.spec.inputs

    def pairs(self, counts: tuple[int, ...], shape: Shape | OneKind) -> tuple[int, ...]:
        """Return the pairs of things in one graph of the inputs with these counts and shape."""
        interface = self.loaded.spec.interface
        if interface is None or not interface.batches:
            return ()
        return interface.pair_counts(self.graph(counts, shape), counts)

    def input_bytes(self) -> Linear:
        """Return the bytes of the staged inputs."""
        if (interface := self.loaded.spec.interface) is not None:
            return Linear(*interface.bytes_per(interface.inputs))
        sizes: dict[Size, int] = {
            "F": self.signature.num_features,
            "D": self.signature.edge_dim or 0,
        }
        each_bytes = {"N": 0, "E": 0}
        for name in self.loaded.spec.inputs:
            each_bytes[INPUTS[name].per[0]] += INPUTS[name].bytes_each(sizes)
        return Linear((each_bytes["N"], each_bytes["E"]), 0.0)

    def output_bytes(self) -> Linear:
        """Return an upper bound of the output's bytes; each node may be a graph of its own."""
        if (interface := self.loaded.spec.interface) is not None:
            return Linear(*interface.bytes_per(interface.outputs))
        row = 4 * self.signature.num_outputs
        many = self.signature.rows == "node" or "batch" in self.loaded.spec.inputs
        return Linear((row, 0.0), 0.0) if many else Linear((0.0, 0.0), row)


def need_for(inputs: Linear, planes: tuple[Linear, ...], curve: Curve | None = None) -> Need:
    """Return the bytes of inputs and activations as a function of a graph's counts."""

    def need(*counts: int) -> float:
        live = peak_at(planes, *counts)
        if curve is not None:
            live = max(live, curve.at(*with_pairs(counts, len(counts), curve.pairs_of)))
        return inputs.at(*counts) + live

    return need
