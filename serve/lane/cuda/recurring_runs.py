"""Runs of a lane that recur: captured while the lane is idle, replayed from then on."""

from collections.abc import Callable, Mapping, Sequence

import torch

from serve.ipc.messages import GatherRef, Part, RunTask, TaskDone
from serve.lane.cuda.arena import LaneMemory
from serve.lane.cuda.buckets import Counts, bucket, fill
from serve.lane.cuda.capturing import Recorder
from serve.lane.cuda.queues import Queue
from serve.lane.cuda.replays import FixedRun, Replays, RunInput, RunShape
from serve.lane.cuda.streams import StreamKind
from serve.lane.models.loader import LoadedModel
from serve.lane.task import PoolTensors
from serve.native_cuda import CudaError

#: Uploads what gathering needs; what it returns gathers a sample's features, float32 [N, F].
BeginGather = Callable[[GatherRef], Callable[[], torch.Tensor]]
#: Waits for the kernels of a run that ended in the error; ends the process if the device is lost.
EndFailed = Callable[[RunTask, BaseException], None]


class RecurringRuns:
    """The captured runs of one lane."""

    def __init__(
        self,
        queue: Queue,
        memory: LaneMemory | None,
        tensors: PoolTensors,
        models: Mapping[str, LoadedModel],
        end_failed: EndFailed,
    ) -> None:
        """`memory` is a permanent buffer for captures (``LaneMemory.hold``).

        It is None when torch places memory. `models` are those that the lane holds, by key.
        """
        self.recorder = Recorder(queue, memory)
        self.replays = Replays(self._capture)
        self._queue, self._tensors = queue, tensors
        self._models, self._end_failed = models, end_failed
        #: ``Calibration.replay_most`` and ``replay_any_size`` of each model.
        self._most: dict[str, tuple[int, bool]] = {}

    def expect(self, key: str, replay_most: int, *, any_size: bool = False) -> None:
        """Capture runs of that model up to its ``Calibration.replay_most``.

        With `any_size`, for buckets of sizes.
        """
        self._most[key] = replay_most, any_size

    def forget(self, key: str) -> None:
        """Free the captured runs of that model."""
        self._most.pop(key, None)
        self.replays.forget(key)

    def replayed(
        self,
        task: RunTask,
        graphs: Sequence[Mapping[str, torch.Tensor]],
        expected: Sequence[tuple[int, int]],
        begin_gather: BeginGather,
        kind: StreamKind,
    ) -> TaskDone | None:
        """Replay the captured run; returns None when the task has to be launched.

        `graphs` are the inputs of each part on the host, `expected` the shapes of their outputs.
        """
        most, any_size = self._most.get(task.key, (0, False))
        if not most:
            return None
        counts = [_counts(part) for part in task.parts]
        whole = sum(nodes for nodes, _ in counts), sum(edges for _, edges in counts)
        shape = self._shape_of(task, whole, any_size, kind) if sum(whole) <= most else None
        run = None if shape is None else self.replays.find(shape)
        if shape is None or run is None:
            return None
        output = run.captured.output
        rows, columns = tuple(each for each, _ in expected), output.shape[1]
        if any(each != columns for _, each in expected):
            return None
        if sum(rows) != (whole[0] if shape.is_bucket else len(output)):
            return None  # Its `batch` names another number of graphs.
        try:
            with self._queue.running(kind):
                fill(self._queue, run.inputs, graphs, counts)
                self._gather(task, run, begin_gather)
                run.captured.launch()
                answers = torch.split(output[: sum(rows)], list(rows))
                self._queue.download(
                    [
                        (answer, self._tensors.place_of_rows(answer, part))
                        for answer, part in zip(answers, task.parts, strict=True)
                    ]
                )
        except CudaError as error:
            self._end_failed(task, error)
            self.replays.give_up(shape, error)
            return None
        # Its memory was set aside when it was captured; it used nothing of the task's buffer.
        return TaskDone(task.task_id, rows, columns, 0, None, None)

    def _gather(self, task: RunTask, run: FixedRun, begin_gather: BeginGather) -> None:
        """Gather the features of samples to their places."""
        # All is uploaded before the first is gathered: later copies would wait for it.
        begun = [None if part.gather is None else begin_gather(part.gather) for part in task.parts]
        first = 0
        for part, gathered in zip(task.parts, begun, strict=True):
            rows, _ = _counts(part)
            if gathered is not None:
                run.inputs["x"].narrow(0, first, rows).copy_(gathered())
            first += rows

    def _shape_of(
        self, task: RunTask, whole: Counts, any_size: bool, kind: StreamKind
    ) -> RunShape | None:
        """Return the shape of a run on a graph of so many nodes and edges as a whole.

        None for a run that is not captured: where sizes have no buckets, a union or a sample.
        """
        first, *others = (_inputs(part) for part in task.parts)
        if not any_size:
            sampled = task.parts[0].gather is not None
            return None if others or sampled else RunShape(task.key, first, kind)
        inputs = bucket(first, whole)
        if any(bucket(other, whole) != inputs for other in others):
            return None  # Some have an input that others lack, or of another dtype.
        return RunShape(task.key, inputs, kind, is_bucket=True)

    def _capture(self, shape: RunShape) -> FixedRun:
        return self.recorder.capture(self._models[shape.key], shape.inputs, shape.kind)


def _counts(part: Part) -> Counts:
    """Return the part's nodes and edges."""
    shapes = {ref.name: ref.shape for ref in part.inputs}
    nodes = shapes["x"][0] if part.gather is None else part.gather.rows
    return nodes, shapes.get("edge_index", (2, 0))[1]


def _inputs(part: Part) -> tuple[RunInput, ...]:
    """Return the inputs that the model gets of the part; gathered features come first."""
    given = tuple((ref.name, ref.dtype, ref.shape) for ref in part.inputs)
    gather = part.gather
    if gather is None:
        return given
    return ("x", "float32", (gather.rows, gather.table.shape[1])), *given
