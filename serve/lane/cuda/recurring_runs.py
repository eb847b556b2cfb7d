"""Runs of a lane that recur: captured while the lane is idle, replayed from then on."""

from collections.abc import Callable, Mapping, Sequence

import torch

from serve.ipc.messages import RunTask, TaskDone
from serve.lane.cuda.arena import LaneMemory
from serve.lane.cuda.capturing import Recorder
from serve.lane.cuda.queues import Queue
from serve.lane.cuda.replays import FixedRun, Replays, RunShape
from serve.lane.models.loader import LoadedModel
from serve.lane.task import PoolTensors
from serve.native_cuda import CudaError

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
        #: ``Calibration.replay_most`` of each model.
        self._most: dict[str, int] = {}

    def expect(self, key: str, replay_most: int) -> None:
        """Capture runs of that model up to its ``Calibration.replay_most``."""
        self._most[key] = replay_most

    def forget(self, key: str) -> None:
        """Free the captured runs of that model."""
        self._most.pop(key, None)
        self.replays.forget(key)

    def replayed(
        self,
        task: RunTask,
        graphs: Sequence[Mapping[str, torch.Tensor]],
        expected: Sequence[tuple[int, int]],
        *,
        urgent: bool,
    ) -> TaskDone | None:
        """Replay the captured run; returns None when the task has to be launched.

        `graphs` are the inputs of each part on the host, `expected` the shapes of their outputs.
        """
        shape = self._shape_of(task, urgent=urgent)
        run = None if shape is None else self.replays.find(shape)
        if shape is None or run is None:
            return None
        output = run.captured.output
        if tuple(output.shape) != expected[0]:
            return None  # Its `batch` names another number of graphs.
        try:
            with self._queue.running(urgent=urgent):
                self._queue.fill(run.inputs, graphs[0])
                run.captured.launch()
                self._tensors.store_rows(output, task.parts[0], self._queue.download)
                if not output.numel():
                    self._queue.finish()
        except CudaError as error:
            self._end_failed(task, error)
            self.replays.give_up(shape, error)
            return None
        # Its memory was set aside when it was captured; it used nothing of the task's buffer.
        return TaskDone(task.task_id, (output.shape[0],), output.shape[1], 0, None, None)

    def _shape_of(self, task: RunTask, *, urgent: bool) -> RunShape | None:
        """Return the run's shape; None for a run too large to capture, a union or a sample."""
        part, most = task.parts[0], self._most.get(task.key, 0)
        if not most or len(task.parts) > 1 or part.gather is not None:
            return None
        shapes = {ref.name: ref.shape for ref in part.inputs}
        if shapes["x"][0] + shapes.get("edge_index", (2, 0))[1] > most:
            return None
        return RunShape(
            task.key, tuple((ref.name, ref.dtype, ref.shape) for ref in part.inputs), urgent
        )

    def _capture(self, shape: RunShape) -> FixedRun:
        return self.recorder.capture(self._models[shape.key], shape.inputs, urgent=shape.urgent)
