"""Prepare: check a request's content and lay its tensors out in the shared pool.

Shapes and dtypes were checked when the request was decoded. What only the content shows
(an edge that points nowhere, a feature that is no number) is checked here, in the same pass
that copies. Runs in the thread that serves the request and lets go of the interpreter lock
for all that is large.
"""

import math
from dataclasses import dataclass
from itertools import chain

import numpy as np

from serve import native
from serve.errors import InvalidInput, QueueFull
from serve.runtime.api import InferCall, Tensor
from serve.runtime.messages import TensorRef
from serve.runtime.shm import TENSOR_ALIGNMENT_BYTES, Block, SharedPool

#: How soon a client may try again when the pool is full: a few typical requests later.
_POOL_RETRY_NS = 50_000_000

#: Bytes of one element of what is staged.
ITEM_BYTES = {"float32": 4, "int64": 8}

#: Input tensor to the dtype lanes get it in.
STAGED_DTYPES = {
    "x": "float32",
    "edge_index": "int64",
    "edge_weight": "float32",
    "edge_attr": "float32",
    "batch": "int64",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor of one request lies, relative to its block."""

    inputs: tuple[tuple[str, str, tuple[int, ...], int], ...]
    input_bytes: int
    output_offset_bytes: int
    output_capacity_bytes: int

    @property
    def size_bytes(self) -> int:
        """The whole block."""
        return self.output_offset_bytes + self.output_capacity_bytes


@dataclass(frozen=True, slots=True)
class Staged:
    """A request's tensors in the pool."""

    block: Block
    inputs: tuple[TensorRef, ...]
    output_offset_bytes: int
    output_capacity_bytes: int


def plan_layout(tensors: dict[str, Tensor], order: tuple[str, ...], output_bytes: int) -> Layout:
    """Places for the tensors named in `order` that the request has, then for the output."""
    offset = 0
    inputs = []
    for name in order:
        tensor = tensors.get(name)
        if tensor is None:
            continue
        dtype = STAGED_DTYPES[name]
        inputs.append((name, dtype, tensor.shape, offset))
        offset += _aligned(math.prod(tensor.shape) * ITEM_BYTES[dtype])
    return Layout(tuple(inputs), offset, offset, _aligned(output_bytes))


def stage(
    call: InferCall, layout: Layout, pool: SharedPool, block: Block, *, check_finite: bool
) -> Staged:
    """Check and copy the tensors of `call` into `block`.

    Raises InvalidInput naming the tensor, the position and the rule.
    """
    num_nodes = call.tensors["x"].shape[0]
    refs = []
    for name, dtype, shape, relative in layout.inputs:
        offset = block.offset_bytes + relative
        source = call.tensors[name]
        target = pool.array(offset, dtype, shape)
        if name == "edge_index":
            _stage_edges(source, target, num_nodes)
        elif name == "batch":
            _stage_batch(source, target, num_nodes)
        else:
            _stage_floats(name, source, target, check_finite=check_finite)
        refs.append(TensorRef(name, dtype, shape, offset))
    return Staged(
        block,
        tuple(refs),
        block.offset_bytes + layout.output_offset_bytes,
        layout.output_capacity_bytes,
    )


def count_loops(staged: Staged, pool: SharedPool) -> int:
    """Self-loops among the staged edges."""
    for ref in staged.inputs:
        if ref.name == "edge_index":
            source, target = pool.array(ref.offset_bytes, ref.dtype, ref.shape)
            return int(np.count_nonzero(source == target))
    return 0


def take_block(pool: SharedPool, layout: Layout) -> Block:
    """A block of the pool for `layout`; raises QueueFull when the pool has no room."""
    block = pool.allocate(layout.size_bytes)
    if block is None:
        raise QueueFull(
            f"staging memory: the request needs {layout.size_bytes} bytes, "
            f"{pool.capacity_bytes - pool.used_bytes} of {pool.capacity_bytes} are free",
            retry_after_ns=_POOL_RETRY_NS,
        )
    return block


def _stage_edges(source: Tensor, target: np.ndarray, num_nodes: int) -> None:
    found = stage_indices(source, target, num_nodes)
    if found is not None:
        row, column = divmod(found[0], source.shape[1])
        raise InvalidInput(
            f"input 'edge_index' [{row}, {column}] is {found[1]}; "
            f"it must be in [0, {num_nodes}), the rows of 'x'"
        )


def _stage_batch(source: Tensor, target: np.ndarray, num_nodes: int) -> None:
    found = stage_indices(source, target, num_nodes)
    if found is not None:
        raise InvalidInput(
            f"input 'batch' [{found[0]}] is {found[1]}; it must be in [0, {num_nodes})"
        )


def stage_indices(source: Tensor, target: np.ndarray, bound: int) -> tuple[int, int] | None:
    """Copy indices as int64; flat position and value of the first not in [0, `bound`)."""
    is_int32 = source.datatype == "INT32"
    flat, start = target.reshape(-1), 0
    for piece in source.pieces():
        end = start + len(piece) // (4 if is_int32 else 8)
        bad = native.stage_indices(piece, is_int32, bound, flat[start:end])
        if bad >= 0:
            return start + bad, int(np.frombuffer(piece, "<i4" if is_int32 else "<i8")[bad])
        start = end
    return None


def _stage_floats(name: str, source: Tensor, target: np.ndarray, *, check_finite: bool) -> None:
    flat, start = target.reshape(-1), 0
    pieces = iter(source.pieces())
    for piece in pieces:
        end = start + len(piece) // 4
        bad = native.stage_features(piece, flat[start:end], check_finite)
        if bad >= 0:
            value = np.frombuffer(piece, "<f4")[bad]
            where = ", ".join(str(int(i)) for i in np.unravel_index(start + bad, source.shape))
            count = sum(_count_nonfinite(part) for part in chain((piece,), pieces))
            raise InvalidInput(
                f"input '{name}' [{where}] is {value}; features must be finite "
                f"({count} of {target.size} are not)"
            )
        start = end


def _count_nonfinite(piece: bytes | memoryview) -> int:
    values = np.frombuffer(piece, "<f4")
    return int(values.size - np.count_nonzero(np.isfinite(values)))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
