"""One full-graph training step: forward, cross-entropy of the labelled nodes, backward, Adam.

Known layers run over the kernels that serve, where these have gradients; the others are PyG's own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from serve.errors import ModelError
from serve.lane.executors.csr import CannotRun, train_with_csr
from serve.lane.models.loader import build_model, default_input, load_model
from serve.models.repository import ModelSpec

_WEIGHT_DECAY = 5e-4


@dataclass(frozen=True, slots=True)
class TrainingGraph:
    """A graph in tensors, with the labels of two disjoint sets of nodes."""

    #: By name: x float32 [N, F], edge_index int64 [2, E].
    inputs: Mapping[str, Tensor]
    #: Nodes to learn from, int64 [T], and their classes, int64 [T].
    rows: Tensor
    labels: Tensor
    #: Nodes to be judged by, int64 [V], and their classes.
    held_out: Tensor
    held_out_labels: Tensor

    @classmethod
    def read(cls, path: Path) -> "TrainingGraph":
        """Read what ``serve.server.training.job_folder`` writes."""
        found = load_file(path)
        inputs = {"x": found["x"].float(), "edge_index": found["edge_index"]}
        given = (found[key] for key in ("rows", "labels", "held_out", "held_out_labels"))
        return cls(inputs, *given)

    @property
    def size(self) -> tuple[int, int]:
        """Nodes and edges."""
        return len(self.inputs["x"]), self.inputs["edge_index"].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        others = (self.rows, self.labels, self.held_out, self.held_out_labels)
        return sum(tensor.nbytes for tensor in (*self.inputs.values(), *others))


class TrainStep:
    """A module in training with its optimiser; each step begins and ends without gradients."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[str],
        learning_rate: float,
        after_forward: Callable[[], None] = lambda: None,
    ) -> None:
        """`inputs` names what forward takes, by position; `after_forward` ends each pass."""
        self.module = module.train()
        self._after_forward = after_forward
        self._inputs = tuple(inputs)
        self.optimizer = torch.optim.Adam(
            module.parameters(), lr=learning_rate, weight_decay=_WEIGHT_DECAY
        )

    def run(self, inputs: Mapping[str, Tensor], rows: Tensor, labels: Tensor) -> Tensor:
        """Train on the labels [T] of the rows [T] once; returns the loss."""
        loss = cross_entropy(self.output(inputs).index_select(0, rows), labels)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def output(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [N, C]; raises ModelError for anything else."""
        given = (
            inputs[name] if name in inputs else default_input(name, inputs) for name in self._inputs
        )
        try:
            out = self.module(*given)
        finally:
            self._after_forward()
        if not isinstance(out, Tensor) or out.dim() != 2:
            raise ModelError("forward returned no matrix of one row for each node")
        return out

    def accuracy(self, graph: TrainingGraph) -> float:
        """Return the share of held-out nodes that it classifies right, by the weights as they are.

        The state of the random numbers and of the module is as before.
        """
        if not len(graph.held_out):
            return 0.0
        found = self._judged(graph).index_select(0, graph.held_out).argmax(dim=1)
        return float((found == graph.held_out_labels).float().mean())

    def loss(self, graph: TrainingGraph) -> float:
        """Return the loss of the nodes to learn from, by the weights as they are; as `accuracy`."""
        return float(cross_entropy(self._judged(graph).index_select(0, graph.rows), graph.labels))

    def _judged(self, graph: TrainingGraph) -> Tensor:
        self.module.eval()
        try:
            with torch.inference_mode():
                return self.output(graph.inputs)
        finally:
            self.module.train()

    def state_to_come_bytes(self) -> int:
        """Return the bytes of the optimiser's state that the next step makes; 0 once it is there.

        Adam keeps two moments of each parameter, and counts its steps.
        """
        state = self.optimizer.state
        return sum(2 * one.nbytes + 4 for one in self.module.parameters() if one not in state)

    def persistent_bytes(self) -> int:
        """Return the bytes of weights, buffers and the optimiser's state, after a first step."""
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        kept = [*self.module.parameters(), *self.module.buffers(), *states]
        return sum(tensor.nbytes for tensor in kept)


def step_of(
    spec: ModelSpec, learning_rate: float, seed: int, *, fresh: bool, executor: str = "csr"
) -> TrainStep:
    """Return steps of the model from its weights, or `fresh` ones by the seed.

    With the executor `csr` known layers run over our kernels; with `eager` none does.

    Raises ModelError as loading does, and for a model without parameters.
    """
    torch.manual_seed(seed)
    if fresh:
        module = build_model(spec)
    else:
        module = load_model(spec).module
        # Those of the file are mapped, and shared with lanes.
        module.load_state_dict(
            {name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True
        )
        module.requires_grad_(True)
    if not any(True for _ in module.parameters()):
        raise ModelError(f"model {spec.key} has no parameters to train")
    if executor == "csr":
        with suppress(CannotRun):  # PyG's own code then
            after_forward = train_with_csr(module, spec.key)
            return TrainStep(module, spec.inputs, learning_rate, after_forward)
    return TrainStep(module, spec.inputs, learning_rate)
