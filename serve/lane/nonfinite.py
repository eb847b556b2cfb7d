"""Outputs with values that are no finite numbers: counted, or refused, as the model says.

The check reads the outputs where clients' answers are read from. It covers floats of any precision.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch

from serve.core.types import FailReason
from serve.ipc.messages import Part, RunTask, TaskError, TensorRef
from serve.lane.place import HeldModel
from serve.lane.task import PoolTensors

#: Values that are looked at one by one at a time, which bounds the memory that this takes.
_PIECE = 1 << 16


def nonfinite_counts(
    task: RunTask, rows: tuple[int, ...], columns: int, model: HeldModel, tensors: PoolTensors
) -> tuple[int, ...]:
    """Return the number of such values in each part's outputs; empty when there is none.

    `rows` and `columns` are those of ``TaskDone``. Returns nothing for a model that checks none.
    """
    if model.loaded.spec.check_output == "off":
        return ()
    with torch.inference_mode():
        counts = tuple(
            sum(_count(tensors.of(ref)) for ref in _outputs(part, count, columns))
            for part, count in zip(task.parts, rows, strict=True)
        )
    return counts if any(counts) else ()


def refused(task: RunTask, rows: tuple[int, ...], columns: int, tensors: PoolTensors) -> TaskError:
    """Return the answer that names the first such value of a run that has one."""
    for part, count in zip(task.parts, rows, strict=True):
        for ref in _outputs(part, count, columns):
            output = tensors.of(ref)
            found = _count(output)
            if found:
                at = int(np.flatnonzero(~np.isfinite(output.reshape(-1).numpy()))[0])
                place = ", ".join(str(int(i)) for i in np.unravel_index(at, ref.shape))
                text = (
                    f"output '{ref.name}' [{place}] is {float(output.reshape(-1)[at])}; {found} of "
                    f"{output.numel()} values are not finite (model.check_output)"
                )
                return TaskError(task.task_id, FailReason.NONFINITE.value, text)
    raise ValueError(f"task {task.task_id} has only finite outputs")


def _outputs(part: Part, rows: int, columns: int) -> Iterator[TensorRef]:
    """Yield the places of a part's outputs."""
    if part.outputs:
        yield from part.outputs
    else:
        yield TensorRef("output", "float32", (rows, columns), part.output_offset_bytes)


def _count(output: torch.Tensor) -> int:
    """Return the number of values that are not finite; quick where there is none."""
    if not output.is_floating_point() or not output.numel():
        return 0
    # One such value makes the sum another, and so may many large ones.
    if math.isfinite(output.sum().item()):
        return 0
    pieces = torch.split(output.reshape(-1), _PIECE)
    return sum(int(piece.numel() - torch.isfinite(piece).sum()) for piece in pieces)
