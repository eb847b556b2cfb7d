"""The door to the compiled module ``serve._core`` and to the memory meter.

It covers inference messages, staging (copying a request's tensors to where they are used, checked
in the same pass), sampling and gathering from resident graphs, the allocator of ranges in a region
of memory, the sender of loads, and the meter of a process's memory.

Buffers are any C-contiguous bytes-like objects, aligned or not. `dst` is writable, has exactly the
size that `src` requires (else ValueError) and does not overlap it. Every long call releases the
interpreter lock. A `src` that changes meanwhile does no harm: every element is read once.
"""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

try:
    from serve import _core
except ImportError as error:
    raise ImportError(
        f"the compiled module serve._core cannot be imported ({error}); build it with "
        "`make setup` in a checkout, or with `pip install .`"
    ) from error

BlockPool = _core.BlockPool
Front = _core.Front
LoadSender = _core.LoadSender
Message = _core.Message
OffsetAllocator = _core.OffsetAllocator
PlainModel = _core.PlainModel
PlainRequest = _core.PlainRequest
Sample = _core.Sample
TlsContext = _core.TlsContext
Topology = _core.Topology
TypedSample = _core.TypedSample

BytesLike = bytes | bytearray | memoryview | np.ndarray[Any, np.dtype[Any]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Parameters = dict[str, Any]
#: Name, datatype, shape, parameters and `InferTensorContents` (not written) of a tensor.
TensorHead = tuple[str, str, tuple[int, ...], Parameters, Any]
#: Model, version, id, parameters, tensors, requested outputs (of requests), raw contents.
Infer = tuple[
    str, str, str, Parameters, list[TensorHead], list[tuple[str, Parameters]], list[memoryview]
]

#: Returns why the native front cannot run on this machine, empty when it can.
front_lacks = _core.front_lacks
#: Returns why it cannot encrypt on this machine, empty when it can.
tls_lacks = _core.tls_lacks

#: Upper bound of the attention heads that the kernels along edges take.
MOST_HEADS = _core.MOST_HEADS

#: Fan-out that takes every in-neighbour.
ALL_NEIGHBOURS = -1

_METER_LIBRARY = "libgnnserve_meter.so"
#: Version of the meter's functions that `Meter` calls.
_METER_VERSION = 3
_NO_LIMIT = (1 << 63) - 1


def decode_infer(is_request: bool, message: bytes | memoryview) -> Infer | None:
    """Decode a ModelInferRequest or ModelInferResponse; its raw contents become views of it.

    Returns None unless the message is plain: every field known, of its type and in one part. It
    also returns None for bytes that are no message, and for a message beyond the limits of
    ``serve.wire.protobuf``. The caller then uses the protobuf library. Takes microseconds, however
    large the message.
    """
    return _core.decode_infer(is_request, message)


def encode_infer(
    is_request: bool,
    model: str,
    version: str,
    id: str,
    parameters: dict[str, Any],
    tensors: Sequence[TensorHead],
    raws: Sequence[memoryview],
) -> bytes | None:
    """Encode a message from its parts; each of `raws` is copied once.

    A parameter whose value is None is left out. Returns None when a text is not Unicode, or a
    parameter is none of bool, int, str and float.
    """
    return _core.encode_infer(is_request, model, version, id, parameters, tensors, raws)


def cut_json_lists(
    document: BytesLike, depth: int, key: str = ""
) -> tuple[bytes, list[tuple[int, int]]]:
    """Cut the long lists out of a JSON document, without reading them.

    Args:
        document: JSON text. Text that is not JSON is cut at most in part, and its rest is not JSON
            either.
        depth: Nesting of the objects whose lists are cut; 1: the document itself.
        key: Key whose lists are cut; empty: every key's. A list of objects is never cut.

    Returns:
        The document with `[k]` in place of the k-th list, and the begin and end of each list.
    """
    return _core.cut_json_lists(document, depth, key)


def shape_of_json_list(text: BytesLike, most: int) -> list[int]:
    """Return the sizes of a nested JSON list, as the first list of each depth shows them.

    Raises ValueError for lists that are nested more than `most` deep.
    """
    return _core.shape_of_json_list(text, most)


def read_json_list(
    text: BytesLike, dtype: np.dtype[Any], shape: Sequence[int], dst: BytesLike
) -> None:
    """Read a JSON list of numbers, nested by `shape` or flat, into `dst`, row-major.

    `dtype` is bool, an integer, float32 or float64. Raises ValueError for other nesting or count,
    text that is not JSON, and a value that the dtype cannot hold.
    """
    _core.read_json_list(text, dtype.str[1:], shape, dst)


def write_json_list(src: BytesLike, dtype: np.dtype[Any], shape: Sequence[int]) -> bytes:
    """Return elements as a JSON list, nested by `shape`; see ``read_json_list``.

    Floats have the fewest digits that read back to the same value. Raises ValueError for NaN and
    infinity, which JSON cannot hold.
    """
    return _core.write_json_list(src, dtype.str[1:], shape)


def sqlite_version() -> str:
    """Return the version of the SQLite that ``sql_rows`` uses; empty where it has none.

    It is the shared library that this process has loaded already.
    """
    return _core.sqlite_version()


def sql_rows(path: str, query: str, values: Sequence[str | int], texts: int) -> "_core.SqlRows":
    """Run a query on a connection of its own, for its rows as columns of integers.

    The first `texts` columns hold texts: `read` gives the position of each in `names`, and -1 for
    NULL. `read` fills a buffer of int64, one column after the other, and returns how many rows
    there were: fewer than fit only at the end. Raises RuntimeError with SQLite's reason.
    """
    return _core.SqlRows(path, query, list(values), texts)


def read_arriving(socket: int, dst: BytesLike) -> tuple[int, bool]:
    """Read from a socket that does not block into the begin of `dst`, as long as bytes keep coming.

    Returns how many bytes came, and True when the peer sends no more. `socket` is its descriptor.
    A pause of 2 ms, or less than 1 MiB in 20 ms, ends the call. Raises OSError.
    """
    return _core.read_arriving(socket, dst)


def stage_indices(
    src: BytesLike, is_int32: bool, bound: int, dst: BytesLike, narrow: bool = False
) -> int:
    """Copy int32 or int64 indices into `dst` as int64 and check 0 <= index < `bound`.

    With `narrow`, int32 indices stay int32, and int64 indices are a ValueError.

    Returns -1 when all indices are within bounds, else the flat position of the first that is not;
    `dst` is then unspecified. Raises ValueError when `dst` and `src` differ in length.
    """
    return _core.stage_indices(src, is_int32, bound, dst, narrow)


def stage_features(src: BytesLike, dst: BytesLike, check_finite: bool) -> int:
    """Copy float32 values into `dst`; with `check_finite`, look for NaN and infinities.

    Returns -1 when there is none (or the check is off), else the flat position of the first; `dst`
    is then unspecified. Raises ValueError when the sizes differ.
    """
    return _core.stage_features(src, dst, check_finite)


def build_rows(
    edges: np.ndarray[Any, np.dtype[Any]], num_nodes: int, num_sources: int | None = None
) -> tuple[Ints, np.ndarray[Any, np.dtype[Any]]]:
    """Build compressed sparse rows of in-neighbours from edges [2, E] (int32 or int64).

    Row 0 of `edges` holds sources, row 1 destinations. Returns `indptr` int64 [N + 1] and `indices`
    [E], int32 where all ids fit: node v's in-neighbours are `indices[indptr[v]:indptr[v + 1]]`, in
    the order of the edges. Sources are nodes of a type with `num_sources` nodes; None: of the same.
    Raises ValueError naming the position of the first id that is no node.
    """
    edges = np.ascontiguousarray(edges)
    num_sources = num_nodes if num_sources is None else num_sources
    is_int32, narrow = edges.dtype == np.int32, num_sources <= 2**31
    indptr = np.empty(num_nodes + 1, np.int64)
    indices = np.empty(edges.shape[1], np.int32 if narrow else np.int64)
    bad = _core.build_rows(edges, is_int32, num_sources, num_nodes, indptr, indices, narrow)
    if bad >= 0:
        row, column = divmod(bad, edges.shape[1])
        bound = num_nodes if row else num_sources
        raise ValueError(f"[{row}, {column}] is {edges[row, column]}; not in [0, {bound})")
    return indptr, indices


def sample_neighbours(topology: Topology, ids: Ints, fanouts: Sequence[int], seed: int) -> Sample:
    """Sample the neighbourhood of `ids` int64 [K], with one fan-out per hop; -1 takes all.

    In-neighbours are drawn without replacement. The draw for a node depends on `seed` (in
    [0, 2^64)), the hop and the node alone. The nodes of `ids` come first, each once. Raises
    ValueError for an id that is no node and for a fan-out that is neither positive nor -1.
    """
    return _core.sample_neighbours(topology, ids, fanouts, seed)


def sample_typed(
    rows: Sequence[Topology],
    ends: Sequence[tuple[int, int]],
    keys: Sequence[int],
    num_nodes: Sequence[int],
    node_type: int,
    ids: Ints,
    fanouts: Sequence[int],
    seed: int,
) -> TypedSample:
    """Sample along relations between several types of nodes; see ``sample_neighbours``.

    Args:
        rows: In-neighbours of each relation.
        ends: Source and target type of each, by position in `num_nodes`.
        keys: Number of each, in [0, 2^64), which sets its draws apart. With one type, and one
            relation of number 0, the sample is that of ``sample_neighbours``.
        num_nodes: Nodes of each type.
        node_type: Type of `ids`.
        ids: int64 [K].
        fanouts: One number for each relation, hop after hop; -1 takes all, 0 none.
        seed: In [0, 2^64).

    Raises ValueError for an id that is no node, and for arguments that do not fit together.
    """
    return _core.sample_typed(rows, ends, keys, num_nodes, node_type, ids, fanouts, seed)


def gather_rows(
    rows: np.ndarray[Any, np.dtype[Any]],
    patched: Ints,
    patched_rows: np.ndarray[Any, np.dtype[np.float32]],
    ids: Ints,
    target: BytesLike,
) -> None:
    """Copy the rows of `ids` int64 [K] to `target` float32 [K, F], widened from `rows`' dtype.

    `rows` is float32, float16 or uint8 [N, F]. `patched`, ascending node ids, names rows that were
    replaced: node v's row is `patched_rows[p]` where `patched[p]` is v, else `rows[v]`. Raises
    ValueError for an id without a row and for sizes that do not fit.
    """
    _core.gather_rows(rows, rows.dtype.name, rows.shape[1], patched, patched_rows, ids, target)


def define_operators() -> None:
    """Define the kernels along edges as ``torch.ops.gnnserve``.

    Call it once per process, after torch is loaded. Raises RuntimeError when this version of torch
    does not take them.
    """
    _core.define_operators()


def use_device_operators(path: str) -> None:
    """Have ``torch.ops.gnnserve`` take tensors of CUDA, by the library at `path`.

    Raises RuntimeError when it is not the library, or when this version of torch does not take
    them.
    """
    _core.use_device_operators(path)


def define_simulated_operators(path: str, namespace: str) -> None:
    """Define the same operators in another namespace of ``torch.ops``, for tests.

    They run the device's code on the processor, by the library at `path`; the last path given
    counts for all namespaces. Raises RuntimeError as above.
    """
    _core.define_simulated_operators(path, namespace)


def meter_library_path() -> Path | None:
    """Return the library that ``LD_PRELOAD`` must name in processes with a `Meter`.

    Returns None when it was not built.
    """
    path = Path(_core.__file__).with_name(_METER_LIBRARY)
    return path if path.is_file() else None


class Meter:
    """Memory of this process's tensors and large blocks, and a limit for them.

    A *tensor* is a block from ``posix_memalign`` and its kin with an alignment and a size of
    64 bytes or more: every CPU tensor of PyTorch's allocator. *Held* memory adds all blocks of
    plain ``malloc`` from 64 KiB on, such as the scratch space of kernels that sort and scatter.
    The meter does not see ``calloc``, nor what the interpreter maps for itself. It counts requested
    bytes, all threads together. A forked child measures its own copy.
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
        """Return the meter of this process; None when its library was not preloaded."""
        # PyDLL keeps the interpreter lock: the calls take nanoseconds.
        library = ctypes.PyDLL(None)
        present = getattr(library, "gnnserve_meter_present", None)
        return cls(library) if present is not None and present() == _METER_VERSION else None

    def insert(self, limit_bytes: int) -> None:
        """Allow `limit_bytes` more than is held now, and restart the peaks.

        A tensor beyond that is refused: PyTorch raises its RuntimeError in the thread that asked.
        Other blocks are never refused, but count towards the limit.
        """
        self._insert(limit_bytes)

    def stop_when(self, address: int, value: int) -> None:
        """Refuse every tensor while the uint64 at `address` is `value`, until `clear`."""
        self._stop_when(address, value)

    def clear(self) -> None:
        """Lift the limit of `insert` and the condition of `stop_when`."""
        self._clear()

    def reset(self) -> None:
        """Restart the peaks from the current values."""
        self._reset()

    def live_bytes(self) -> int:
        """Return the bytes of tensors allocated and not freed."""
        return int(self._live())

    def peak_bytes(self) -> int:
        """Return the peak of `live_bytes` since the last `reset` or `insert`."""
        return int(self._peak())

    def held_bytes(self) -> int:
        """Return the bytes of tensors and large blocks allocated and not freed."""
        return int(self._held())

    def held_peak_bytes(self) -> int:
        """Return the peak of `held_bytes` beyond its value at the last `insert`."""
        return int(self._held_peak())

    def held_by(self, run: Callable[[], object]) -> int:
        """Return the peak of held bytes while `run` executes without a limit."""
        self.insert(_NO_LIMIT)
        try:
            run()
        finally:
            self.clear()
        return self.held_peak_bytes()

    def refused_bytes(self) -> int:
        """Return the size of the tensor refused last since `insert`; 0 when none was."""
        return int(self._refused())

    def untracked_blocks(self) -> int:
        """Return the number of blocks the meter could not record.

        Unless it is 0, the other figures are too low.
        """
        return int(self._untracked())
