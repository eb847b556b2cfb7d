"""Capture and replay a model's runs on a lane's queue, and measure whether that pays.

A captured run keeps its addresses, so captures have memory of their own, apart from tasks' buffers.
Between runs it holds nothing but inputs and outputs. Intermediate results of all of a lane's
captures may share one place, as a lane runs one task at a time.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from serve.lane.cuda.arena import LaneMemory
from serve.lane.cuda.buckets import bucket, fill
from serve.lane.cuda.placed_model import PlacedModel
from serve.lane.cuda.queues import Queue
from serve.lane.cuda.replays import FixedRun, NoRoom, RunInput
from serve.lane.cuda.streams import StreamKind
from serve.lane.error_text import told
from serve.lane.measure.probe_graphs import counts_for, inputs_for
from serve.lane.measure.where_measured import Site
from serve.lane.models.loader import LoadedModel
from serve.lane.models.sizing import sizing_of
from serve.models.model_signature import Signature

_log = logging.getLogger(__name__)

#: Nodes and edges of the race, its rounds, and the share of the time that replaying may take.
_SIZES = ((16, 64), (128, 1_024), (1_024, 8_192), (8_192, 65_536))
_ROUNDS = 7
_WORTH = 0.95
_TOLERANCE = 1e-4


class Recorder:
    """Recorder of one lane's runs."""

    def __init__(self, queue: Queue, memory: LaneMemory | None) -> None:
        """`memory` is a permanent buffer (``LaneMemory.hold``); None when torch places memory."""
        self._queue = queue
        self._memory = memory

    def keep(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of so many elements in the memory of captures; raises when it is full."""
        held = nullcontext() if self._memory is None else self._memory.held()
        with held, self._queue.running():
            return torch.empty(count, dtype=dtype, device=self._queue.device)

    def capture(
        self,
        model: LoadedModel,
        inputs: Iterable[RunInput],
        kind: StreamKind = StreamKind.ORDINARY,
    ) -> FixedRun:
        """Capture a run of `model` on inputs of these names, dtypes and shapes; nothing is run.

        Raises NoRoom, ValueError for a model that keeps tensors of a run or whose sizes shapes do
        not tell, and what the model or CUDA raises, as for a model that waits for the device.
        """
        sizing = sizing_of(model.spec.interface)
        memory = self._memory
        refusals = 0 if memory is None else memory.refusals()
        held: AbstractContextManager[None] = nullcontext() if memory is None else memory.held()
        with held, self._queue.running(kind):
            before = 0 if memory is None else memory.live_bytes()
            try:
                places = {
                    name: torch.zeros(size, dtype=getattr(torch, dtype), device=self._queue.device)
                    for name, dtype, size in inputs
                }
                # The zeros must not arrive after the first inputs, which use another stream.
                self._queue.finish()
                captured = self._queue.capture(partial(_forward, model, places))
            except Exception:
                if memory is not None and memory.refusals() > refusals:
                    raise NoRoom("they need more memory than captured runs have") from None
                raise
            if memory is not None:
                held_by = [*places.values(), *captured.outputs]
                storages = [tensor.untyped_storage() for tensor in held_by]
                own = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
                if memory.live_bytes() - before > own:
                    # A replay would find another run's values there.
                    captured.forget()
                    raise ValueError("the model keeps tensors of a run")
        return FixedRun(places, captured, sizing)

    def replay(
        self, run: FixedRun, inputs: Mapping[str, torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, ...]:
        """Return the answers to `inputs`, both on the host, cut to `shapes`; for measuring."""
        with self._queue.running():
            counts = run.sizing.counts({name: value.shape for name, value in inputs.items()})
            fill(self._queue, run.sizing, run.inputs, [inputs], [counts])
            run.captured.launch()
            outputs = [
                output[tuple(slice(size) for size in shape)]
                for output, shape in zip(run.captured.outputs, shapes, strict=True)
            ]
            places = tuple(map(self._queue.landing, outputs))
            self._queue.download(list(zip(outputs, places, strict=True)))
        return places


def _forward(model: LoadedModel, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run the model on the device: also a ``PlacedModel``, without its copies."""
    if model.declared is None:
        return (LoadedModel.run(model, inputs),)
    return LoadedModel.outputs(model, inputs)


def replay_most(
    model: PlacedModel,
    signature: Signature,
    recorder: Recorder,
    site: Site,
    *,
    any_size: bool = False,
) -> tuple[int, str]:
    """Return the sum of nodes and edges up to which replaying saves 5 % or more of launching.

    A race over rising sizes decides; with `any_size`, it is run with the most room to spare. The
    sum is 0, and the text says why, when even the smallest gains nothing, or when runs cannot be
    captured or give other answers.
    """
    most, why, spec = 0, "", model.spec
    for size in _SIZES:
        inputs = site.stage(inputs_for(spec, signature, counts_for(spec, *size)))
        shapes = [
            (name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for name, value in inputs.items()
        ]
        sizing = sizing_of(spec.interface)
        counts = sizing.counts({name: shape for name, _, shape in shapes})
        if any_size:
            more = {symbol: count + 1 for symbol, count in counts.items()}
            shapes = list(bucket(sizing, shapes, more))
        try:
            run = recorder.capture(model, shapes)
        except Exception as error:
            why = told(error)
            _log.info("model %s: runs of %d nodes are not captured: %s", spec.key, size[0], why)
            break
        try:
            expected = model.outputs(inputs)
            answers = [output.shape for output in expected]
            if not all(map(_agree, recorder.replay(run, inputs, answers), expected)):
                _log.warning("model %s: captured runs give other answers", spec.key)
                return 0, "they give other answers"
            times = {"launched": [0] * _ROUNDS, "replayed": [0] * _ROUNDS}
            for number in range(_ROUNDS):
                times["launched"][number] = site.time_ns(partial(model.outputs, inputs))
                times["replayed"][number] = site.time_ns(
                    partial(recorder.replay, run, inputs, answers)
                )
        finally:
            run.captured.forget()
        share = min(times["replayed"]) / max(1, min(times["launched"]))
        _log.info("model %s: replayed runs of %d nodes take %.2f", spec.key, size[0], share)
        if share > _WORTH:
            why = f"they take {share:.2f} of the time of launched ones"
            break
        most = sum(counts.values())
    return most, "" if most else why


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE * scale)
