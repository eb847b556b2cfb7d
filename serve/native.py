"""The door to the compiled extension ``serve._core`` and to the memory meter.

Covers inference messages, staging (copying a request's tensors to where they are used, checked in
the same pass), sampling and gathering from resident graphs, the allocator of ranges in a region of
memory, and the meter of a process's memory. Where the extension was not built, the numpy twins in
``serve._twin`` do the same, slower; this is logged.

Buffers are any C-contiguous bytes-like objects, aligned or not. `dst` is writable, has exactly the
size that `src` asks for (else ValueError) and does not overlap it. The interpreter lock is let go
for all that is large. A `src` that changes meanwhile does no harm: every element is read once.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from serve._twin import BytesLike
from serve._twin import Infer as Infer
from serve._twin import TensorHead as TensorHead

if TYPE_CHECKING:
    from serve import _core as _impl
    from serve._core import OffsetAllocator as OffsetAllocator
    from serve._core import Sample as Sample
    from serve._core import Topology as Topology
else:
    try:
        from serve import _core as _impl
    except ImportError as error:
        from serve import _twin as _impl

        logging.getLogger(__name__).warning(
            "the compiled extension is missing (%s): its slower numpy twin is used, "
            "and task memory is not measured",
            error,
        )
    OffsetAllocator = _impl.OffsetAllocator
    Sample, Topology = _impl.Sample, _impl.Topology

Ints = np.ndarray[Any, np.dtype[np.int64]]

#: Whether the compiled extension is in use, and not its twin.
COMPILED = _impl.__name__ == "serve._core"
#: The most attention heads that the kernels along edges take.
MOST_HEADS: int = getattr(_impl, "MOST_HEADS", 0)

#: As a fan-out: every in-neighbour.
ALL_NEIGHBOURS = -1

_METER_LIBRARY = "libgnnserve_meter.so"
#: Version of the meter's functions that `Meter` speaks.
_METER_VERSION = 3
_NO_LIMIT = (1 << 63) - 1


def decode_infer(is_request: bool, message: bytes | memoryview) -> Infer | None:
    """A ModelInferRequest, or else a ModelInferResponse, taken apart; raw contents as views of it.

    None unless it is plain: every field known, of its type, and not in several parts. Then, as
    for bytes that are no message and for one beyond the limits of ``serve.wire.protobuf``, the
    protobuf library has the word. Takes microseconds, however large the message.
    """
    return _impl.decode_infer(is_request, message)


def encode_infer(
    is_request: bool,
    model: str,
    version: str,
    id: str,
    parameters: dict[str, Any],
    tensors: Sequence[TensorHead],
    raws: Sequence[memoryview],
) -> bytes | None:
    """The message of those parts, in which each of `raws` is copied once; None sends no parameter.

    None where a text is not Unicode, or a parameter is none of bool, int, str and float.
    """
    return _impl.encode_infer(is_request, model, version, id, parameters, tensors, raws)


def stage_indices(
    src: BytesLike, is_int32: bool, bound: int, dst: BytesLike, narrow: bool = False
) -> int:
    """Copy int32 or int64 indices into `dst` as int64 and check 0 <= index < `bound`.

    With `narrow` int32 indices stay int32; int64 ones may not be given then.

    Returns -1 when all hold, else the flat position of the first that does not; `dst` is then
    unspecified. Raises ValueError when `dst` has another number of elements than `src`.
    """
    return _impl.stage_indices(src, is_int32, bound, dst, narrow)


def stage_features(src: BytesLike, dst: BytesLike, check_finite: bool) -> int:
    """Copy float32 values into `dst`; with `check_finite`, look for NaN and infinities.

    Returns -1 when there is none (or none was looked for), else the flat position of the first;
    `dst` is then unspecified. Raises ValueError when the sizes differ.
    """
    return _impl.stage_features(src, dst, check_finite)


def build_rows(
    edges: np.ndarray[Any, np.dtype[Any]], num_nodes: int
) -> tuple[Ints, np.ndarray[Any, np.dtype[Any]]]:
    """In-neighbours by destination of the edges [2, E] (int32 or int64; sources first).

    Returns `indptr` int64 [N + 1] and `indices` [E], int32 where all ids fit: node v's
    in-neighbours are `indices[indptr[v]:indptr[v + 1]]`, in the order of the edges. Raises
    ValueError naming the place of the first id that is not in [0, `num_nodes`).
    """
    edges = np.ascontiguousarray(edges)
    is_int32, narrow = edges.dtype == np.int32, num_nodes <= 2**31
    indptr = np.empty(num_nodes + 1, np.int64)
    indices = np.empty(edges.shape[1], np.int32 if narrow else np.int64)
    bad = _impl.build_rows(edges, is_int32, num_nodes, indptr, indices, narrow)
    if bad >= 0:
        row, column = divmod(bad, edges.shape[1])
        raise ValueError(f"[{row}, {column}] is {edges[row, column]}; not in [0, {num_nodes})")
    return indptr, indices


def sample_neighbours(topology: Topology, ids: Ints, fanouts: Sequence[int], seed: int) -> Sample:
    """Sample the neighbourhood of `ids` int64 [K] outwards: one fan-out a hop, -1 for all.

    In-neighbours are drawn without replacement. What is drawn for a node depends on `seed` (in
    [0, 2^64)), the hop and the node alone. Asked nodes come first, repeated ones once. Raises
    ValueError for an id that is no node and a fan-out that is neither positive nor -1.
    """
    return _impl.sample_neighbours(topology, ids, fanouts, seed)


def gather_rows(
    rows: np.ndarray[Any, np.dtype[Any]],
    patched: Ints,
    patched_rows: np.ndarray[Any, np.dtype[np.float32]],
    ids: Ints,
    target: BytesLike,
) -> None:
    """Copy the rows of `ids` to `target` float32 [K, F], widened where they are smaller.

    Node v's row is `patched_rows[p]` where `patched[p]`, ascending, is v, else `rows[v]`: float32,
    float16 or uint8 [N, F]. Raises ValueError for an id without a row and sizes that do not fit.
    """
    _impl.gather_rows(rows, rows.dtype.name, rows.shape[1], patched, patched_rows, ids, target)


def define_operators() -> None:
    """Define the kernels along edges as ``torch.ops.gnnserve``; once a process, torch loaded.

    Raises RuntimeError when the extension was not built (they have no twin) and when this version
    of torch does not take them.
    """
    if not COMPILED:
        raise RuntimeError("the compiled extension is missing")
    _impl.define_operators()


def meter_library_path() -> Path | None:
    """The library to put into ``LD_PRELOAD`` of processes with a `Meter`; None if not built."""
    if not COMPILED or _impl.__file__ is None:
        return None
    path = Path(_impl.__file__).with_name(_METER_LIBRARY)
    return path if path.is_file() else None


class Meter:
    """Memory of this process: what its tensors and large blocks take, and a limit for them.

    Tensors are what is allocated by ``posix_memalign`` and its kin with an alignment and a size
    of 64 bytes or more: every CPU tensor of PyTorch's allocator. Held are these and all blocks of
    plain ``malloc`` from 64 KiB, such as kernels sort and scatter with; ``calloc`` and what the
    interpreter maps for itself are not seen. Counts requested bytes, all threads together. A
    forked child measures its own copy.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._insert, self._stop_when, self._clear, self._reset = (
            library.gnnserve_meter_insert,
            library.gnnserve_meter_stop_when,
            library.gnnserve_meter_clear,
            library.gnnserve_meter_reset,
        )
        self._insert.argtypes = [ctypes.c_size_t]
        self._stop_when.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        for procedure in (self._insert, self._stop_when, self._clear, self._reset):
            procedure.restype = None
        self._live, self._peak, self._held, self._held_peak, self._refused, self._untracked = (
            library.gnnserve_meter_live_bytes,
            library.gnnserve_meter_peak_bytes,
            library.gnnserve_meter_held_bytes,
            library.gnnserve_meter_held_peak_bytes,
            library.gnnserve_meter_refused_bytes,
            library.gnnserve_meter_untracked_blocks,
        )
        for function in (
            self._live,
            self._peak,
            self._held,
            self._held_peak,
            self._refused,
            self._untracked,
        ):
            function.restype = ctypes.c_size_t

    @classmethod
    def attach(cls) -> Self | None:
        """The meter of this process, or None when its library was not preloaded into it."""
        # PyDLL keeps the interpreter lock: the calls take nanoseconds.
        library = ctypes.PyDLL(None)
        present = getattr(library, "gnnserve_meter_present", None)
        return cls(library) if present is not None and present() == _METER_VERSION else None

    def insert(self, limit_bytes: int) -> None:
        """From now on allow `limit_bytes` more than is held; peaks start again.

        A tensor beyond that is refused: PyTorch raises its RuntimeError for that, in the thread
        that asked. Other blocks are never refused, and leave that much less for tensors.
        """
        self._insert(limit_bytes)

    def stop_when(self, address: int, value: int) -> None:
        """Until `clear`, refuse every tensor once the uint64 at `address` is `value`."""
        self._stop_when(address, value)

    def clear(self) -> None:
        """End the limit of `insert`, and what `stop_when` asked for."""
        self._clear()

    def reset(self) -> None:
        """Let the peaks start again from what is there now."""
        self._reset()

    def live_bytes(self) -> int:
        """Bytes of tensors allocated and not freed."""
        return int(self._live())

    def peak_bytes(self) -> int:
        """Most bytes of tensors at once since the last reset or insert."""
        return int(self._peak())

    def held_bytes(self) -> int:
        """Bytes of tensors and large blocks allocated and not freed."""
        return int(self._held())

    def held_peak_bytes(self) -> int:
        """The most that was held at once beyond what there was at the last insert."""
        return int(self._held_peak())

    def held_by(self, run: Callable[[], object]) -> int:
        """The most bytes `run` held at once, without a limit."""
        self.insert(_NO_LIMIT)
        try:
            run()
        finally:
            self.clear()
        return self.held_peak_bytes()

    def refused_bytes(self) -> int:
        """Size of the last tensor that was refused since the last insert; 0: none was."""
        return int(self._refused())

    def untracked_blocks(self) -> int:
        """Blocks there was no room to remember; unless 0, what is told of memory is too low."""
        return int(self._untracked())
