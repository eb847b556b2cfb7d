"""A model on a device with memory of its own, and the site that measures it there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from serve.estimate.memory import MemoryTrace
from serve.lane import clock
from serve.lane.cuda.arena import LaneMemory
from serve.lane.cuda.queues import Queue
from serve.lane.cuda.streams import StreamKind
from serve.lane.executors import CannotRun, kernels, runs_on_csr, with_executor
from serve.lane.measure.where_measured import Run
from serve.lane.models.declared import Sizes
from serve.lane.models.loader import LoadedModel, load_model
from serve.models.repository import ModelSpec
from serve.native_cuda import CUDA_LIBRARY


def load_on(
    spec: ModelSpec,
    device: torch.device,
    executor: str,
    weights: dict[str, torch.Tensor] | None = None,
) -> LoadedModel:
    """Load the model on `device`, with an executor that needs no package.

    `weights` are the tensors of the model's state that modules share, by name. The first to load
    fills an empty dict; the others take theirs from it, and the device holds them once. When this
    returns, all of the model is there for all of the device's streams. Raises CannotRun when the
    executor cannot run it there.
    """
    loaded = load_model(spec)
    if weights:
        loaded.module.load_state_dict(weights, assign=True)
    loaded.module.to(device)
    if weights is not None:
        weights.update(loaded.module.state_dict())
    if runs_on_csr(executor) and device.type not in kernels.devices:
        raise CannotRun(f"{CUDA_LIBRARY}, which has its kernels, is not used")
    # After the move, as an executor may compute tensors from the weights.
    loaded = with_executor(loaded, executor)
    if device.type == "cuda":
        # The copies use the default stream, which no lane's stream waits for.
        torch.cuda.synchronize(device)
    return loaded


@dataclass(frozen=True, slots=True)
class PlacedModel(LoadedModel):
    """A model on a queue's device that takes and returns tensors of the host.

    A run does the work of a lane for a task: upload, forward pass, download.
    """

    queue: Queue
    kind: StreamKind = StreamKind.ORDINARY

    @classmethod
    def of(
        cls, loaded: LoadedModel, queue: Queue, kind: StreamKind = StreamKind.ORDINARY
    ) -> "PlacedModel":
        """Wrap `loaded`, whose weights are on the queue's device."""
        return cls(
            loaded.spec, loaded.module, queue, kind,
            executor=loaded.executor, after_run=loaded.after_run, declared=loaded.declared,
        )  # fmt: skip

    def outputs(
        self, inputs: Mapping[str, torch.Tensor], sizes: Sizes | None = None
    ) -> tuple[torch.Tensor, ...]:
        """See ``LoadedModel.outputs``; inputs that are on the device already are not uploaded."""
        if self.declared is None:
            return (self.run(inputs),)
        if sizes is None:
            sizes = self.declared.sizes(inputs)
        return self._placed(inputs, lambda placed: LoadedModel.outputs(self, placed, sizes))

    def run(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See ``LoadedModel.run``; inputs that are on the device already are not uploaded."""
        (output,) = self._placed(inputs, lambda placed: (LoadedModel.run(self, placed),))
        return output

    def _placed(
        self,
        inputs: Mapping[str, torch.Tensor],
        forward: Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, ...]:
        """Return what `forward` returns of the inputs on the device, on the host."""
        with self.queue.running(self.kind):
            try:
                here = {n: t for n, t in inputs.items() if t.device.type == "cpu"}
                outputs = forward({**inputs, **self.queue.upload(here)})
                places = tuple(map(self.queue.landing, outputs))
                self.queue.download(list(zip(outputs, places, strict=True)))
            except BaseException:
                self.queue.finish()
                raise
        return places


class ArenaSite:
    """The site on a device whose memory a ``DeviceArena`` places."""

    def __init__(self, queue: Queue, memory: LaneMemory) -> None:
        self.name = str(queue.device)
        self._queue = queue
        self._memory = memory

    def place(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Site``."""
        with self._queue.running():
            placed = self._queue.upload(inputs)
            self._queue.finish()
        return placed

    def stage(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Site``."""
        return self._queue.stage(inputs)

    def trace(self, run: Run, module: torch.nn.Module, *counts: int) -> MemoryTrace:
        """Trace requested sizes; ``LaneMemory.held_by`` shows the rounding up by placement."""
        self._memory.insert(self._memory.most_bytes())
        try:
            self._memory.start_trace()
            run()
            events = self._memory.take_trace()
        finally:
            self._memory.clear()
        return MemoryTrace(counts, events, ("",) * len(events))

    def time_ns(self, run: Run) -> int:
        """Return the time of copies, launches and the wait for the last kernel."""
        self._memory.insert(self._memory.most_bytes())
        try:
            started_ns = clock.now_ns()
            run()
            return clock.now_ns() - started_ns
        finally:
            self._memory.clear()
