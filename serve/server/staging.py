"""Staging: check a request's content and copy its tensors into the shared pool.

Shapes and dtypes were checked when the request was decoded. Errors in the content (an edge that
points nowhere, a feature that is no number) are found here, in the same pass that copies. Staging
runs in the thread that serves the request and releases the interpreter lock for large copies.
"""

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from serve import native
from serve.errors import InvalidInput, QueueFull
from serve.inputs import INPUTS
from serve.ipc.messages import GatherRef, TableRef, TensorRef
from serve.ipc.shared_pool import TENSOR_ALIGNMENT_BYTES, Block, SharedPool
from serve.server.api import InferCall, Tensor

#: Delay that a client is told when the pool is full: a few typical requests.
_POOL_RETRY_NS = 50_000_000

#: Staged in place of `x` where lanes gather it, see ``messages.GatherRef``; no inputs of a model.
GATHERED_IDS, GATHERED_AT, GATHERED_NEW = "x.ids", "x.at", "x.new"
#: The dtype in which lanes get each tensor of a request.
STAGED_DTYPES = {
    **{name: each.dtype for name, each in INPUTS.items()},
    GATHERED_IDS: "int64",
    GATHERED_AT: "int64",
    GATHERED_NEW: "float32",
}


#: Name and dtype of a staged tensor: narrowed edges are another tensor than wide ones.
TensorKey = tuple[str, str]


class Staged(msgspec.Struct, frozen=True):
    """A request's tensors in the pool."""

    block: Block
    inputs: tuple[TensorRef, ...]
    output_offset_bytes: int
    output_capacity_bytes: int
    #: How lanes gather `x`; None when `x` is in the pool.
    gather: GatherRef | None = None
    #: Other tasks have the same inputs, so that no run may change them.
    is_shared: bool = False

    def gathering(self, table: TableRef) -> "Staged":
        """Return these tensors for lanes that gather `x` from `table` by the staged indices."""
        places = {ref.name: ref for ref in self.inputs}
        ids, at, new = (places.pop(name) for name in (GATHERED_IDS, GATHERED_AT, GATHERED_NEW))
        return replace(self, inputs=tuple(places.values()), gather=GatherRef(table, ids, at, new))


class Layout(msgspec.Struct, frozen=True):
    """Places of the tensors of one request, relative to its block."""

    inputs: tuple[TensorRef, ...]
    input_bytes: int
    output_capacity_bytes: int
    #: Edges are staged as int32.
    narrow_edges: bool = False
    #: Place of the output; None: behind the inputs.
    output_at_bytes: int | None = None

    @property
    def size_bytes(self) -> int:
        """Size of a block for this request alone."""
        return self.input_bytes + self.output_capacity_bytes

    def at(self, block: Block) -> Staged:
        """Return the same places in the pool."""
        start = block.offset_bytes
        refs = [TensorRef(r.name, r.dtype, r.shape, start + r.offset_bytes) for r in self.inputs]
        at_bytes = self.input_bytes if self.output_at_bytes is None else self.output_at_bytes
        return Staged(block, tuple(refs), start + at_bytes, self.output_capacity_bytes)


def plan_layout(
    shapes: Mapping[str, tuple[int, ...]],
    order: tuple[str, ...],
    output_bytes: int,
    *,
    narrow_edges: bool = False,
    dtypes: Mapping[str, str] = STAGED_DTYPES,
) -> Layout:
    """Return places for the tensors named in `order` that have a shape, then for the output.

    `dtypes` are those in which lanes get them. With `narrow_edges`, edges are staged as int32,
    which must be able to hold all node ids.
    """
    offset = 0
    inputs = []
    for name in order:
        shape = shapes.get(name)
        if shape is not None:
            dtype = dtypes[name]
            if narrow_edges and name == "edge_index":
                dtype = "int32"
            ref = TensorRef(name, dtype, shape, offset)
            inputs.append(ref)
            offset += aligned(ref.size_bytes)
    return Layout(tuple(inputs), offset, aligned(output_bytes), narrow_edges)


def key_of(ref: TensorRef) -> TensorKey:
    """Return what makes the inputs of two models one tensor, in one request."""
    return ref.name, ref.dtype


def stage(
    call: InferCall,
    layout: Layout,
    pool: SharedPool,
    block: Block,
    *,
    check_finite: bool,
    sorted_batch: bool,
    staged_before: set[TensorKey],
) -> Staged:
    """Check and copy the tensors of `call` into `block`.

    Leaves out those `staged_before`, and adds those that it staged. With `sorted_batch` the graphs
    in `batch` must ascend. Raises InvalidInput naming the tensor, the position and the rule.
    """
    staged = layout.at(block)
    num_nodes = call.tensors["x"].shape[0]
    for ref in staged.inputs:
        if key_of(ref) in staged_before:
            continue
        source, target = call.tensors[ref.name], pool.view(ref.offset_bytes, ref.size_bytes)
        if ref.name == "edge_index":
            _stage_edges(source, target, num_nodes, narrow=layout.narrow_edges)
        elif ref.name == "batch":
            _stage_batch(source, target, num_nodes)
        else:
            _stage_floats(ref.name, source, target, check_finite=check_finite)
        staged_before.add(key_of(ref))
    if sorted_batch:
        # Another model's task may have staged it, which takes any order.
        for ref in staged.inputs:
            if ref.name == "batch":
                check_ascending("batch", pool.array(ref.offset_bytes, ref.dtype, ref.shape))
    return staged


def count_loops(staged: Staged, pool: SharedPool) -> int:
    """Return the number of self-loops among the staged edges."""
    for ref in staged.inputs:
        if ref.name == "edge_index":
            source, target = pool.array(ref.offset_bytes, ref.dtype, ref.shape)
            return int(np.count_nonzero(source == target))
    return 0


def take_block(pool: SharedPool, size_bytes: int) -> Block:
    """Allocate a block of the pool; raises QueueFull when the pool has no room."""
    block = pool.allocate(size_bytes)
    if block is None:
        raise QueueFull(
            f"staging memory: the request needs {size_bytes} bytes, "
            f"{pool.capacity_bytes - pool.used_bytes} of {pool.capacity_bytes} are free",
            retry_after_ns=_POOL_RETRY_NS,
        )
    return block


def _stage_edges(source: Tensor, target: memoryview, num_nodes: int, *, narrow: bool) -> None:
    found = stage_indices(source, target, num_nodes, narrow=narrow)
    if found is not None:
        row, column = divmod(found[0], source.shape[1])
        raise InvalidInput(
            f"input 'edge_index' [{row}, {column}] is {found[1]}; "
            f"it must be in [0, {num_nodes}), the rows of 'x'"
        )


def _stage_batch(source: Tensor, target: memoryview, num_nodes: int) -> None:
    found = stage_indices(source, target, num_nodes)
    if found is not None:
        raise InvalidInput(
            f"input 'batch' [{found[0]}] is {found[1]}; it must be in [0, {num_nodes})"
        )


def check_ascending(name: str, graphs: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Raise InvalidInput for the first of the graphs [N] that is less than the one before it."""
    falls = graphs[1:] < graphs[:-1]
    if falls.any():
        at = int(falls.argmax()) + 1
        raise InvalidInput(
            f"input '{name}' [{at}] is {graphs[at]} after {graphs[at - 1]}; it must ascend, as this"
            " model needs the nodes of each graph side by side"
        )


def stage_indices(
    source: Tensor, target: memoryview, bound: int, *, narrow: bool = False
) -> tuple[int, int] | None:
    """Copy indices as int64; with `narrow`, those that came as int32 stay so.

    Returns flat position and value of the first index outside [0, `bound`), None without any.
    """
    width = 4 if narrow else 8
    is_int32 = source.datatype == "INT32"
    item_bytes = 4 if is_int32 else 8
    start = 0
    for piece in source.pieces():
        end = start + len(piece) // item_bytes
        part = target[width * start : width * end]
        bad = native.stage_indices(piece, is_int32, bound, part, narrow)
        if bad >= 0:
            return start + bad, int(np.frombuffer(piece, f"<i{item_bytes}")[bad])
        start = end
    return None


def _stage_floats(name: str, source: Tensor, target: memoryview, *, check_finite: bool) -> None:
    start = 0
    pieces = iter(source.pieces())
    for piece in pieces:
        end = start + len(piece)
        bad = native.stage_features(piece, target[start:end], check_finite)
        if bad >= 0:
            value = np.frombuffer(piece, "<f4")[bad]
            place = np.unravel_index(start // 4 + bad, source.shape)
            where = ", ".join(str(int(i)) for i in place)
            count = sum(_count_nonfinite(part) for part in chain((piece,), pieces))
            raise InvalidInput(
                f"input '{name}' [{where}] is {value}; features must be finite "
                f"({count} of {math.prod(source.shape)} are not)"
            )
        start = end


def _count_nonfinite(piece: bytes | memoryview) -> int:
    values = np.frombuffer(piece, "<f4")
    return int(values.size - np.count_nonzero(np.isfinite(values)))


def aligned(size_bytes: int) -> int:
    """Return the size that a tensor takes in the pool, where each begins at a multiple."""
    return -(-size_bytes // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
