"""What replays a task of a captured run in one call, for the loop that needs no Python."""

import ctypes
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve.lane.cuda.streams import StreamKind

_log = logging.getLogger(__name__)

#: Any failure of what stands in for a device: CUDA's number for an unknown error.
_FAILED = 999
#: Elements of features by their bytes.
_GATHERED: dict[int, type[np.generic]] = {1: np.uint8, 2: np.float16, 4: np.float32}


class _Copy(ctypes.Structure):
    _fields_ = (("to", ctypes.c_uint64), ("source", ctypes.c_uint64), ("bytes", ctypes.c_int64))


class _Fill(ctypes.Structure):
    _fields_ = (("to", ctypes.c_uint64), ("bytes", ctypes.c_int64), ("value", ctypes.c_int64))


class _Gather(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("table", "ids", "hot", "slot_of", "out")
    ) + tuple(
        (name, ctypes.c_int64) for name in ("rows", "row_bytes", "item_bytes", "most_threads")
    )


class _Replay(ctypes.Structure):
    """``Replay`` of csrc/cuda/copy.hpp."""

    _fields_ = (
        ("stream", ctypes.c_uint64),
        ("graph", ctypes.c_uint64),
        ("up", ctypes.POINTER(_Copy)),
        ("up_count", ctypes.c_int64),
        ("gathers", ctypes.POINTER(_Gather)),
        ("gather_count", ctypes.c_int64),
        ("patches", ctypes.POINTER(_Copy)),
        ("patch_count", ctypes.c_int64),
        ("spare", ctypes.POINTER(_Fill)),
        ("spare_count", ctypes.c_int64),
        ("down", ctypes.POINTER(_Copy)),
        ("down_count", ctypes.c_int64),
    )


_function: Any = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Replay))


@dataclass(frozen=True, slots=True)
class Replayer:
    """A compiled function that replays, and what it needs."""

    #: Address of a ``ReplayTask`` of csrc/cuda/copy.hpp, and its route.
    function: int
    route: int
    #: The stream of each kind, as the function knows it.
    streams: Mapping[StreamKind, int]
    #: Kept for as long as the function may be called.
    kept: object = None


def host_replayer(launch: Callable[[int], None], kinds: Mapping[StreamKind, int]) -> Replayer:
    """Return a replayer whose device is the processor; `launch` takes the number of a capture."""

    def replay(_route: int, pointer: Any) -> int:
        task = pointer.contents
        try:
            for copy in task.up[: task.up_count]:
                ctypes.memmove(copy.to, copy.source, copy.bytes)
            for gather in task.gathers[: task.gather_count]:
                _gathered(gather)
            for copy in task.patches[: task.patch_count]:
                ctypes.memmove(copy.to, copy.source, copy.bytes)
            for fill in task.spare[: task.spare_count]:
                ctypes.memset(fill.to, fill.value, fill.bytes)
            launch(task.graph)
            for copy in task.down[: task.down_count]:
                ctypes.memmove(copy.to, copy.source, copy.bytes)
        except Exception:
            _log.exception("a captured run failed")
            return _FAILED
        return 0

    called = _function(replay)
    address = ctypes.cast(called, ctypes.c_void_p).value
    assert address is not None
    return Replayer(address, 0, kinds, called)


def _gathered(gather: Any) -> None:
    """Do a ``Gather`` of csrc/cuda/copy.hpp on the processor."""
    dtype = _GATHERED[gather.item_bytes]
    ids = _array(gather.ids, np.int64, gather.rows)
    out = _array(gather.out, np.float32, gather.rows * (gather.row_bytes // gather.item_bytes))
    for row, id_ in zip(out.reshape(len(ids), -1), ids.tolist(), strict=True):
        slot = _array(gather.slot_of + 4 * id_, np.int32, 1)[0] if gather.slot_of else -1
        start = gather.table + id_ * gather.row_bytes
        if slot >= 0:
            start = gather.hot + int(slot) * gather.row_bytes
        row[:] = _array(start, dtype, len(row))


def _array(address: int, dtype: type[np.generic], count: int) -> Any:
    """Return the array at that address of this process's memory."""
    bytes_: Any = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(bytes_, dtype)
