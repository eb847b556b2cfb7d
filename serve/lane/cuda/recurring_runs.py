"""Runs of a lane that recur: captured while the lane is idle, replayed from then on."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from serve.interface import Interface
from serve.ipc.messages import GatherRef, Part, RunTask, TaskDone
from serve.lane.cuda.arena import LaneMemory
from serve.lane.cuda.buckets import bucket, fill
from serve.lane.cuda.capturing import Recorder
from serve.lane.cuda.packet_loop import PacketLoop
from serve.lane.cuda.queues import Queue
from serve.lane.cuda.replays import FixedRun, Replays, RunInput, RunShape
from serve.lane.cuda.streams import StreamKind
from serve.lane.models.loader import LoadedModel
from serve.lane.models.sizing import Counts, Sizing, sizing_of
from serve.lane.task import PoolTensors, Wanted
from serve.models.model_signature import Rows
from serve.native_cuda import GATHER_THREADS, CudaError

_log = logging.getLogger(__name__)

#: Uploads what gathering needs; what it returns gathers a sample's features, float32 [N, F].
BeginGather = Callable[[GatherRef], Callable[[], torch.Tensor]]
#: Waits for the kernels of a run that ended in the error; ends the process if the device is lost.
EndFailed = Callable[[RunTask, BaseException], None]


Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Expected:
    """A model whose runs are captured."""

    #: ``Calibration.replay_most`` and ``replay_any_size``.
    most: int
    any_size: bool
    interface: Interface | None
    sizing: Sizing
    #: It answers for each node, or declares its outputs.
    rows_told: bool
    #: See ``Calibration.gather_threads``.
    gather_threads: int


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A captured run that serves a task."""

    run: FixedRun
    shape: RunShape
    sizing: Sizing
    #: Those of each part.
    counts: Sequence[Counts]
    #: The tensors of each part among the captured run's outputs.
    answers: Sequence[Outputs]

    @property
    def copied_bytes(self) -> int:
        """Memory for outputs that must be without gaps before they are downloaded."""
        outputs = (output for part in self.answers for output in part)
        return sum(output.nbytes for output in outputs if not output.is_contiguous())


class RecurringRuns:
    """The captured runs of one lane."""

    def __init__(
        self,
        queue: Queue,
        memory: LaneMemory | None,
        tensors: PoolTensors,
        models: Mapping[str, LoadedModel],
        end_failed: EndFailed,
        capturing: threading.Lock,
        loop: PacketLoop,
    ) -> None:
        """`capturing` is ``CudaDevice.capturing``; `loop` replays without Python what it can.

        `memory` is a permanent buffer for captures (``LaneMemory.hold``).

        It is None when torch places memory. `models` are those that the lane holds, by key.
        """
        self.recorder = Recorder(queue, memory)
        self.replays = Replays(self._capture)
        self._queue, self._tensors = queue, tensors
        self._models, self._end_failed = models, end_failed
        self._capturing = capturing
        #: None where all is Python's, as benches have it.
        self._loop: PacketLoop | None = loop
        self._expected: dict[str, _Expected] = {}
        #: For ids of rows that the loop gathers, int64 on the device.
        self._scratch: torch.Tensor | None = None

    def expect(
        self,
        key: str,
        replay_most: int,
        *,
        any_size: bool = False,
        rows: Rows = "node",
        gather_threads: int = GATHER_THREADS,
    ) -> None:
        """Capture runs of that model up to its ``Calibration.replay_most``.

        With `any_size`, for buckets of sizes. `rows` is what the model has a row of output for.
        """
        interface = self._models[key].spec.interface
        if replay_most:
            told = interface is not None or rows == "node"
            sizing = sizing_of(interface)
            self._expected[key] = _Expected(
                replay_most, any_size, interface, sizing, told, gather_threads
            )

    def wait(self) -> None:
        """Answer by captured runs, without Python, until a packet is Python's."""
        if self._loop is None:
            return
        while self._loop.serve(until_idle=self.replays.is_due) and self.capture_due(lambda: True):
            pass

    def capture_due(self, is_idle: Callable[[], bool]) -> bool:
        """Capture what is due; returns False when another lane captures now.

        Call it between two runs. `is_idle` tells whether no packet waits.
        """
        if not self._capturing.acquire(blocking=False):
            return False
        try:
            self.replays.capture_due(idle=is_idle())
        finally:
            self._capturing.release()
        return True

    def forget(self, key: str) -> None:
        """Free the captured runs of that model."""
        self._expected.pop(key, None)
        self.replays.forget(key)

    def find(self, task: RunTask, wanted: Wanted, kind: StreamKind) -> FoundRun | None:
        """Return the captured run that serves the task; None when it has to be launched."""
        model = self._expected.get(task.key)
        if model is None:
            return None
        counts = [model.sizing.counts(_shapes(part)) for part in task.parts]
        whole = {symbol: sum(own[symbol] for own in counts) for symbol in model.sizing.symbols}
        if sum(whole.values()) > model.most:
            return None
        shape = self._shape_of(task, whole, model, kind)
        run = None if shape is None else self.replays.find(shape)
        if shape is None or run is None:
            return None
        outputs = run.captured.outputs
        answers = (
            _answers(outputs, wanted.shapes, whole["N"] if shape.is_bucket else len(outputs[0]))
            if model.interface is None
            else _declared_answers(outputs, task, model.interface, counts)
        )
        return None if answers is None else FoundRun(run, shape, model.sizing, counts, answers)

    def replay(
        self,
        found: FoundRun,
        task: RunTask,
        graphs: Sequence[Mapping[str, torch.Tensor]],
        wanted: Wanted,
        begin_gather: BeginGather,
    ) -> TaskDone | None:
        """Replay the captured run; returns None when that fails: it is not found again.

        `graphs` are the inputs of each part on the host. Of the task's buffer it takes what is
        gathered, and ``FoundRun.copied_bytes``.
        """
        run = found.run
        try:
            with self._queue.running(found.shape.kind):
                fill(self._queue, found.sizing, run.inputs, graphs, found.counts)
                self._gather(task, run, begin_gather)
                run.captured.launch()
                self._queue.download(self._tensors.places(found.answers, task))
        except CudaError as error:
            self._end_failed(task, error)
            self.replays.give_up(found.shape, error)
            return None
        # Its memory was set aside when it was captured; what it used of the task's buffer says
        # nothing about a run that is launched.
        rows = tuple(rows for rows, _ in wanted.shapes) or (0,) * len(task.parts)
        declared = self._expected[task.key].interface is not None
        columns = 0 if declared else run.captured.outputs[0].shape[1]
        return TaskDone(task.task_id, rows, columns, 0, None, None)

    def _gather(self, task: RunTask, run: FixedRun, begin_gather: BeginGather) -> None:
        """Gather the features of samples to their places."""
        # All is uploaded before the first is gathered: later copies would wait for it.
        begun = [None if part.gather is None else begin_gather(part.gather) for part in task.parts]
        if not any(begun):
            return  # also of a model that has no `x`
        first = 0
        for part, gathered in zip(task.parts, begun, strict=True):
            rows = _shapes(part)["x"][0]
            if gathered is not None:
                run.inputs["x"].narrow(0, first, rows).copy_(gathered())
            first += rows

    def _shape_of(
        self, task: RunTask, whole: Counts, model: "_Expected", kind: StreamKind
    ) -> RunShape | None:
        """Return the shape of a run on a graph with these counts as a whole.

        None for a run that is not captured: where sizes have no buckets, a union or a sample.
        """
        first, *others = (_inputs(part) for part in task.parts)
        if not model.any_size:
            sampled = task.parts[0].gather is not None
            return None if others or sampled else RunShape(task.key, first, kind)
        inputs = bucket(model.sizing, first, whole)
        if any(bucket(model.sizing, other, whole) != inputs for other in others):
            return None  # Some have an input that others lack, or of another dtype.
        return RunShape(task.key, inputs, kind, is_bucket=True)

    def _capture(self, shape: RunShape) -> FixedRun:
        model, expected = self._models[shape.key], self._expected[shape.key]
        run = self.recorder.capture(model, shape.inputs, shape.kind)
        if self._loop is None or not expected.rows_told:
            return run
        checked = model.spec.check_output != "off"
        looped = self._loop.add(
            shape, run, expected.most, expected.interface, checked=checked,
            gather_threads=expected.gather_threads,
        )  # fmt: skip
        if looped is not None and expected.interface is None and shape.is_bucket:
            self._make_scratch(run.inputs["x"].shape[0])
        return replace(run, looped=looped)

    def _make_scratch(self, num_rows: int) -> None:
        """Have memory for ids of so many rows that the loop gathers; without it, Python does."""
        assert self._loop is not None
        if self._scratch is not None and len(self._scratch) >= num_rows:
            return
        self._scratch = None
        self._loop.use_scratch(None)
        try:
            self._scratch = self.recorder.keep(num_rows, torch.int64)
        except Exception as error:
            _log.info("samples are gathered by Python: %s", error)
        self._loop.use_scratch(self._scratch)


def _answers(
    outputs: Outputs, shapes: Sequence[tuple[int, int]], num_rows: int
) -> list[Outputs] | None:
    """Return the rows of each part, of the only output's first `num_rows`.

    Returns None when the parts need others: their `batch` names another number of graphs.
    """
    rows = [each for each, _ in shapes]
    if sum(rows) != num_rows or any(each != outputs[0].shape[1] for _, each in shapes):
        return None
    return [(answer,) for answer in torch.split(outputs[0][:num_rows], rows)]


def _declared_answers(
    outputs: Outputs, task: RunTask, interface: Interface, counts: Sequence[Counts]
) -> list[Outputs] | None:
    """Return the outputs of each part; None when one has not the shape of its place."""
    found = []
    firsts = dict.fromkeys(counts[0], 0)
    for part, own in zip(task.parts, counts, strict=True):
        answers = tuple(
            output.narrow(slot.symbol_axis, firsts[slot.symbols[0]], own[slot.symbols[0]])
            if slot.symbols
            else output
            for slot, output in zip(interface.outputs, outputs, strict=True)
        )
        if any(
            tuple(answer.shape) != ref.shape
            for answer, ref in zip(answers, part.outputs, strict=True)
        ):
            return None
        found.append(answers)
        firsts = {symbol: first + own[symbol] for symbol, first in firsts.items()}
    return found


def _shapes(part: Part) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs that the model gets of the part."""
    return {name: shape for name, _, shape in _inputs(part)}


def _inputs(part: Part) -> tuple[RunInput, ...]:
    """Return the inputs that the model gets of the part; gathered features come first."""
    given = tuple((ref.name, ref.dtype, ref.shape) for ref in part.inputs)
    gather = part.gather
    if gather is None:
        return given
    return ("x", "float32", (gather.rows, gather.table.shape[1])), *given
