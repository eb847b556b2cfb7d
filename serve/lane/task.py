"""Parts of a task's run that are the same at every place: its tensors, its checks, its errors."""

import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from serve.core.types import FailReason
from serve.errors import ModelError, ServeError
from serve.interface import DTYPES
from serve.ipc.messages import Part, RunTask, TaskError, TensorRef
from serve.lane.error_text import told, traced
from serve.lane.models.declared import Sizes
from serve.lane.models.union import rows_wanted, run_parts, run_union
from serve.lane.place import HeldModel

_log = logging.getLogger(__name__)

_TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES.values()}

#: Linux's flag for a mapping whose copies count only once they are made.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class PoolTensors:
    """Tensors over the shared pool, where requests and answers lie."""

    def __init__(self, pool: mmap.mmap, pool_fd: int | None = None) -> None:
        """`pool_fd` is the pool's file, where models run on the inputs in the pool itself."""
        self._pool = pool
        self._pool_fd = pool_fd

    def of(self, ref: TensorRef) -> torch.Tensor:
        """Return the tensor at `ref`, which shares the pool's memory."""
        return _tensor(self._pool, ref, ref.offset_bytes)

    def inputs(self, task: RunTask) -> list[dict[str, torch.Tensor]]:
        """Return the inputs of each part of the task by name."""
        return [
            self._private(part)
            if part.shares_inputs and self._pool_fd is not None
            else {ref.name: self.of(ref) for ref in part.inputs}
            for part in task.parts
        ]

    def _private(self, part: Part) -> dict[str, torch.Tensor]:
        """Return inputs that other runs read too; what a model writes there is its own copy.

        The kernel copies the pages that are written to, and no others.
        """
        assert self._pool_fd is not None
        first = min(ref.offset_bytes for ref in part.inputs)
        first -= first % mmap.ALLOCATIONGRANULARITY
        size_bytes = max(ref.offset_bytes + ref.size_bytes for ref in part.inputs) - first
        if not size_bytes:
            return {ref.name: self.of(ref) for ref in part.inputs}
        flags, access = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        # Tensors keep the mapping for as long as they live.
        view = mmap.mmap(self._pool_fd, size_bytes, flags, access, offset=first)
        return {ref.name: _tensor(view, ref, ref.offset_bytes - first) for ref in part.inputs}

    def places(
        self, outputs: Sequence[tuple[torch.Tensor, ...]], task: RunTask
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the outputs of each part, each with its place.

        Raises ServeError when one does not fit. Those that a model declares have the shapes of
        their places.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for found, part in zip(outputs, task.parts, strict=True):
            if part.outputs:
                pairs += zip(found, map(self.of, part.outputs), strict=True)
            else:
                pairs.append((found[0], self.place_of_rows(found[0], part)))
        return pairs

    def place_of_rows(self, output: torch.Tensor, part: Part) -> torch.Tensor:
        """Return the place of a part's only output likewise."""
        if output.nbytes > part.output_capacity_bytes:
            raise ServeError(
                f"the output has shape {tuple(output.shape)}, {output.nbytes} bytes; "
                f"{part.output_capacity_bytes} were expected for a graph of this size"
            )
        shape = tuple(output.shape)
        return self.of(TensorRef("output", "float32", shape, part.output_offset_bytes))


def _tensor(memory: mmap.mmap, ref: TensorRef, offset_bytes: int) -> torch.Tensor:
    """Return the tensor of `ref` at that offset of `memory`, which it shares."""
    dtype = _TORCH_DTYPES[ref.dtype]
    count = prod(ref.shape)
    if count == 0:
        return torch.empty(ref.shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset_bytes)
    return flat.view(ref.shape)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run must return, as the inputs of its parts tell."""

    #: Rows and columns of each part's output; empty for a model that declares its outputs.
    shapes: Sequence[tuple[int, int]] = ()
    #: Of such a model, each symbol's count in each part.
    sizes: Sequence[Sizes] = ()


@dataclass(frozen=True, slots=True)
class RunOutputs:
    """What a run has returned."""

    #: Outputs of each part.
    parts: Sequence[tuple[torch.Tensor, ...]]
    #: What ``TaskDone`` tells of them.
    rows: tuple[int, ...]
    columns: int


def wanted_of(task: RunTask, graphs: Sequence[dict[str, torch.Tensor]], model: HeldModel) -> Wanted:
    """Return what a run must return. Call it before the model gets the graphs and changes them."""
    if (declared := model.loaded.declared) is not None:
        return Wanted(sizes=[declared.sizes(graph) for graph in graphs])
    signature = model.signature
    return Wanted(
        [
            (
                rows_wanted(graph, signature.rows) if part.gather is None else part.gather.rows,
                signature.num_outputs,
            )
            for graph, part in zip(graphs, task.parts, strict=True)
        ]
    )


def run_model(
    task: RunTask, graphs: Sequence[dict[str, torch.Tensor]], model: HeldModel, wanted: Wanted
) -> RunOutputs:
    """Run a model on the parts of a task; raises ModelError for outputs that are not wanted."""
    rows = model.signature.rows
    if model.loaded.declared is not None:
        parts = run_parts(model.loaded, graphs, rows, wanted.sizes)
        _check_declared(task, model, parts)
        return RunOutputs(parts, (0,) * len(parts), 0)
    outputs = run_union(model.loaded, graphs, rows)
    check_shapes(model, outputs, wanted.shapes)
    told = tuple(output.shape[0] for output in outputs)
    return RunOutputs([(output,) for output in outputs], told, outputs[0].shape[1])


def _check_declared(
    task: RunTask, model: HeldModel, parts: Sequence[tuple[torch.Tensor, ...]]
) -> None:
    """Raise ModelError unless outputs have the shapes of their places."""
    for found, part in zip(parts, task.parts, strict=True):
        for output, ref in zip(found, part.outputs, strict=True):
            if tuple(output.shape) != ref.shape:
                raise ModelError(
                    f"model {model.loaded.spec.key}: output '{ref.name}' has shape"
                    f" {list(output.shape)}; it must have {list(ref.shape)}"
                )


def check_shapes(
    model: HeldModel, outputs: Sequence[torch.Tensor], expected: Sequence[tuple[int, int]]
) -> None:
    """Raise ModelError unless every output has its expected shape."""
    for output, shape in zip(outputs, expected, strict=True):
        if tuple(output.shape) != shape:
            raise ModelError(
                f"model {model.loaded.spec.key}: the output has {_size(output.shape)}; it must "
                f"have {_size(shape)}, one row for each {model.signature.rows}"
            )


def _size(shape: Sequence[int]) -> str:
    rows, columns = shape
    return f"{rows} rows of {columns}"


def stopped(task: RunTask) -> TaskError:
    """Return the answer for a run that the server has ended."""
    return TaskError(task.task_id, FailReason.STOPPED.value, "nobody waits for it any more")


def failed(task: RunTask, error: BaseException, *, refused_bytes: int) -> TaskError:
    """Return the answer for a run that ended in `error`.

    `refused_bytes` is the size of the last tensor beyond the run's limit, 0 when there was none.
    """
    if refused_bytes:
        # The cause, whatever the model made of it.
        text = f"a tensor of {refused_bytes} bytes would pass its limit of "
        text += f"{task.limit_bytes} bytes"
        return TaskError(task.task_id, FailReason.OUT_OF_MEMORY.value, text)
    text = told(error)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        text = "there is no more memory for the run" if text == "MemoryError" else text
        return TaskError(task.task_id, FailReason.OUT_OF_MEMORY.value, text)
    if not isinstance(error, ServeError):
        _log.error("model %s raised\n%s", task.key, traced(error))
    return TaskError(task.task_id, FailReason.MODEL_ERROR.value, text)
