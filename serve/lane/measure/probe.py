"""A model that can be run on graphs of any size, to measure it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from serve.estimate.calibration import Curve, Linear
from serve.estimate.graph_sizes import COUNTS_ALONE, GraphTerms, graph_sizes
from serve.estimate.memory import (
    MemoryTrace,
    peak_at,
)
from serve.inputs import INPUTS, Size
from serve.ipc.shared_pool import TENSOR_ALIGNMENT_BYTES
from serve.lane.measure.allocator import UNMETERED, Run
from serve.lane.measure.probe_graphs import Batched, Shape, Structure, graphs_in, inputs_for
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
        self, counts: tuple[int, ...], shape: Structure = Shape.PLAIN
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

    def attempt(self, counts: tuple[int, ...], shape: Structure = Shape.PLAIN) -> None:
        """Raise what the model raises for such a graph, where an error is only that."""
        if self.trial is not None:
            self.trial.outputs(self.graph(counts, shape))

    def trace(self, counts: tuple[int, ...], shape: Structure = Shape.PLAIN) -> MemoryTrace:
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
        of_graphs = shape in (Shape.SINGLES, Shape.LOPSIDED, Shape.MANY, Shape.UNEVEN)
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

    def counts(
        self, size: tuple[int, ...], shape: Structure, graphs: GraphTerms
    ) -> tuple[int, ...]:
        """Return the counts of a graph of that size and shape, with what they go on with."""
        if not graphs.of:
            return size
        divided = shape.graphs if isinstance(shape, Batched) else shape
        if not isinstance(divided, Shape):
            divided = Shape.PLAIN
        batches = self.loaded.spec.batches
        arrays = {name: graphs_in(size[position], divided) for name, position in batches}
        return size + graphs.told(graph_sizes(batches, arrays, size))

    def input_bytes(self) -> Linear:
        """Return an upper bound of the staged inputs' bytes, with the gaps between them."""
        largest_gap_bytes = TENSOR_ALIGNMENT_BYTES - 1
        if (interface := self.loaded.spec.interface) is not None:
            per, fixed_bytes = interface.bytes_per(interface.inputs)
            return Linear(per, fixed_bytes + largest_gap_bytes * len(interface.inputs))
        sizes: dict[Size, int] = {
            "F": self.signature.num_features,
            "D": self.signature.edge_dim or 0,
        }
        each_bytes = {"N": 0, "E": 0}
        for name in self.loaded.spec.inputs:
            each_bytes[INPUTS[name].per[0]] += INPUTS[name].bytes_each(sizes)
        gaps_bytes = largest_gap_bytes * len(self.loaded.spec.inputs)
        return Linear((each_bytes["N"], each_bytes["E"]), gaps_bytes)

    def output_bytes(self) -> Linear:
        """Return an upper bound of the output's bytes; each node may be a graph of its own."""
        if (interface := self.loaded.spec.interface) is not None:
            return Linear(*interface.bytes_per(interface.outputs))
        row = 4 * self.signature.num_outputs
        many = self.signature.rows == "node" or "batch" in self.loaded.spec.inputs
        return Linear((row, 0.0), 0.0) if many else Linear((0.0, 0.0), row)


def need_for(
    inputs: Linear,
    planes: tuple[Linear, ...],
    curve: Curve | None = None,
    graphs: GraphTerms = COUNTS_ALONE,
) -> Need:
    """Return the bytes of inputs and activations as a function of a graph's counts."""
    own = len(inputs.per)

    def need(*counts: int) -> float:
        terms = graphs.terms(counts, own)
        live = peak_at(planes, *(terms if graphs.padded else terms[:own]))
        if curve is not None:
            live = max(live, curve.at(*terms))
        return inputs.at(*terms[:own]) + live

    return need
