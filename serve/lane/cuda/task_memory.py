"""What a task takes of a device: all of its buffer when it is launched, little when replayed."""

from collections.abc import Callable, Mapping, Sequence

import torch

from serve.ipc.messages import FromLane, GatherRef, RunTask, TakesLess
from serve.ipc.stop_word import StopWord
from serve.lane.cuda.arena import ALIGNMENT_BYTES, LaneMemory

#: A captured run tells of memory that it does not need when that is such a part of the slab: lanes
#: together hold less than half of it by what they do not tell of, and most runs tell nothing.
_MUCH = 64


class TaskMemory:
    """The buffer of one task."""

    def __init__(
        self,
        task: RunTask,
        graphs: Sequence[Mapping[str, torch.Tensor]],
        memory: LaneMemory | None,
        slab_bytes: int,
    ) -> None:
        """`graphs` are the inputs of each part on the host; `slab_bytes` is all that tasks share.

        `memory` is the lane's, None where torch places memory.
        """
        self._task, self._memory, self._slab_bytes = task, memory, slab_bytes
        staged = [tensor.nbytes for graph in graphs for tensor in graph.values()]
        gathers = [part.gather for part in task.parts if part.gather is not None]
        gathered = [size for gather in gathers for size in _gathered_bytes(gather)]
        # Inputs are copied to the device, each in whole units of placement. Gathered rows exist for
        # a moment in the table's dtype too, which is no wider than the model's.
        moment_bytes = max((_gathered_bytes(gather)[0] for gather in gathers), default=0)
        self.inputs_bytes = sum(staged) + sum(gathered)
        self._gathered_bytes = sum(map(_aligned, [*gathered, moment_bytes]))
        self._all_bytes = task.limit_bytes + sum(map(_aligned, staged)) + self._gathered_bytes
        #: The scheduler was told that the run takes less, so that the rest may be another's.
        self.gave_back = False

    def insert(self, stop_word: StopWord) -> None:
        """Insert all of it; raises as ``LaneMemory.insert``."""
        if self._memory is not None:
            self._memory.insert(self._all_bytes)
            self._memory.stop_when(stop_word.address, self._task.task_id)

    def insert_less(self, copied_bytes: int, send: Callable[[FromLane], None]) -> None:
        """Insert what a captured run takes: what it gathers, and `copied_bytes`.

        It tells of the rest where others could do much with that.
        """
        needs_bytes = self._gathered_bytes + _aligned(copied_bytes)
        if self._memory is None:
            return
        if needs_bytes:
            self._memory.insert(needs_bytes)
        if self._all_bytes - needs_bytes >= self._slab_bytes // _MUCH:
            self.gave_back = True
            send(TakesLess(self._task.task_id, needs_bytes))

    def clear(self) -> None:
        """Take what was inserted back from a run that has ended without an answer."""
        if self._memory is not None:
            self._memory.clear()


def _gathered_bytes(gather: GatherRef) -> tuple[int, ...]:
    """Return the bytes of each tensor on the device that stands for a part's features."""
    x_bytes = 4 * gather.rows * gather.table.shape[1]
    return x_bytes, gather.ids.size_bytes, gather.at.size_bytes, gather.new.size_bytes


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
