"""A lane's loop without Python: compiled code answers the tasks that captured runs serve.

It waits for packets in the lane's thread without the interpreter lock. A task that a captured run
serves it replays and answers (csrc/cuda/lane_loop.cpp); every other packet stays in the socket for
Python, as does one whose run failed or gave values that are no finite numbers.
"""

import ctypes
import logging
import mmap
from collections.abc import Sequence
from typing import Any

import torch

from serve.interface import Interface
from serve.lane.cuda.buckets import served_counts
from serve.lane.cuda.looped_tables import LoopedTables
from serve.lane.cuda.replayer import Replayer
from serve.lane.cuda.replays import FixedRun, RunShape
from serve.lane.cuda.streams import StreamKind
from serve.lane.models.sizing import Sizing
from serve.native_cuda import DEVICE_LIBRARY, required_path

_log = logging.getLogger(__name__)

#: What ``gnnserve_lane_serve`` returns; above are errors of the device.
_IDLE = -1
#: Kinds of streams as csrc/cuda/lane_loop.cpp numbers them.
_KINDS = {StreamKind.ORDINARY: 0, StreamKind.URGENT: 1, StreamKind.BOUNDED: 2}
#: The most axes of a tensor there.
_MOST_AXES = 8
#: All bytes of −1 and of a float that is no number; see ``executors.check.spare_value``.
_ONES = 0xFF


class LoopedRun:
    """A captured run that the loop replays."""

    def __init__(self, loop: "PacketLoop", handle: int) -> None:
        self._loop, self.handle = loop, handle
        self._seen = 0

    def drop(self) -> None:
        """Have the loop replay it no more."""
        if self.handle:
            self._loop.drop(self)

    def used_again(self) -> int:
        """Return how many runs the loop had replayed when it replayed this one last.

        Returns 0 when that was asked before and it was not replayed since.
        """
        used = self._loop.used(self) if self.handle else 0
        if used == self._seen:
            return 0
        self._seen = used
        return used


class PacketLoop:
    """The loop of one lane; its methods are called in the lane's thread."""

    def __init__(
        self,
        channel: int,
        pool: mmap.mmap,
        run_times: "ctypes.Array[ctypes.c_int64]",
        own: int,
        replayer: Replayer,
        tables: LoopedTables | None,
        slab_bytes: int = 0,
    ) -> None:
        """`channel` is the socket's descriptor.

        `run_times` are those of ``device.Urgency``, and `own` is the lane's number in them.
        Features of samples are gathered from `tables`; None where no kernel can. A run gives back
        what others could do much with of `slab_bytes`, the memory that tasks share; nothing where
        it is 0.
        """
        # Not PyDLL: the loop waits without the interpreter lock.
        self._library: Any = ctypes.CDLL(str(required_path(DEVICE_LIBRARY)))
        pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64
        code = ctypes.c_int
        for name, result, arguments in (
            ("open", pointer,
             (code, ctypes.c_uint64, ctypes.c_uint64, pointer, code, code, pointer, pointer, code,
              number, pointer)),
            ("close", None, (pointer,)),
            ("add_run", pointer,
             (pointer, text, code, pointer, pointer, number, code, code, code, number, pointer,
              number)),
            ("add_tensor", None, (pointer, code, text, text, pointer)),
            ("scratch", None, (pointer, ctypes.c_uint64, number)),
            ("drop_run", None, (pointer, pointer)),
            ("used", ctypes.c_uint64, (pointer,)),
            ("serve", code, (pointer, code, pointer)),
        ):  # fmt: skip
            function = getattr(self._library, f"gnnserve_lane_{name}")
            function.restype, function.argtypes = result, arguments
        self._replayer, self._run_times = replayer, run_times
        self._runs: dict[int, LoopedRun] = {}
        self._lane = self._library.gnnserve_lane_open(
            channel, ctypes.addressof(ctypes.c_char.from_buffer(pool)), len(pool),
            run_times, len(run_times), own, replayer.function, replayer.route,
            StreamKind.BOUNDED in replayer.streams, slab_bytes,
            None if tables is None else tables.handle,
        )  # fmt: skip

    def close(self) -> None:
        """Free the loop; it is not used afterwards."""
        self._library.gnnserve_lane_close(self._lane)
        self._lane = None

    def add(
        self,
        shape: RunShape,
        run: FixedRun,
        most: int,
        interface: Interface | None,
        *,
        checked: bool,
        gather_threads: int,
    ) -> LoopedRun | None:
        """Have the loop replay that run; returns None where only Python can.

        `most` is ``Calibration.replay_most``. With `checked`, Python gets what is not finite. A
        model without an interface answers for each node. At most `gather_threads` read a sample's
        features.
        """
        tensors = _tensors_of(shape, run, interface)
        if tensors is None:
            return None
        symbols = run.sizing.symbols
        given = {name: size for name, _, size in shape.inputs}
        rooms = run.sizing.counts(given)
        counts: list[int] = []
        for symbol in symbols:
            room = rooms[symbol]
            counts += served_counts(run.sizing, symbol, room) if shape.is_bucket else (room, room)
        handle = self._library.gnnserve_lane_add_run(
            self._lane, shape.key.encode(), _KINDS[shape.kind],
            self._replayer.streams[shape.kind], run.captured.handle, most, shape.is_bucket,
            interface is not None, checked, gather_threads, _numbers(counts), len(symbols),
        )  # fmt: skip
        for is_output, name, dtype, numbers in tensors:
            self._library.gnnserve_lane_add_tensor(
                handle, is_output, name.encode(), dtype.encode(), _numbers(numbers)
            )
        self._runs[handle] = LoopedRun(self, handle)
        return self._runs[handle]

    def use_scratch(self, place: torch.Tensor | None) -> None:
        """Have the loop put ids of rows to gather there, int64 on the device, until told another.

        With None, samples are Python's.
        """
        address, size_bytes = (0, 0) if place is None else (place.data_ptr(), place.nbytes)
        self._library.gnnserve_lane_scratch(self._lane, address, size_bytes)

    def drop(self, run: LoopedRun) -> None:
        """Forget the run."""
        del self._runs[run.handle]
        self._library.gnnserve_lane_drop_run(self._lane, run.handle)
        run.handle = 0

    def used(self, run: LoopedRun) -> int:
        """See ``LoopedRun.used_again``."""
        return int(self._library.gnnserve_lane_used(run.handle))

    def serve(self, *, until_idle: bool) -> bool:
        """Answer packets until one is Python's or the server is gone.

        With `until_idle`, also until none waits; returns True then.
        """
        failed = ctypes.c_void_p()
        outcome = self._library.gnnserve_lane_serve(self._lane, until_idle, ctypes.byref(failed))
        if outcome > 0:
            _log.warning("a captured run failed (cudaError %d): its like are Python's now", outcome)
            self._runs[failed.value or 0].drop()
        return bool(outcome == _IDLE)


#: Whether it is an output, its name and dtype, and numbers for ``gnnserve_lane_add_tensor``.
_Told = tuple[bool, str, str, list[int]]


def _tensors_of(shape: RunShape, run: FixedRun, interface: Interface | None) -> list[_Told] | None:
    """Return inputs and outputs of a captured run; None where only Python can replay it."""
    told: list[_Told] = []
    for name, dtype, _ in shape.inputs:
        place, sized = run.inputs[name], run.sizing.inputs.get(name)
        if sized is None:
            told.append((False, name, dtype, _told(place)))
            continue
        many = len(sized.points_to) > 1
        if many and (sized.axis != 1 or len(sized.points_to) != place.shape[0]):
            return None
        if sized.points_to and dtype not in ("int32", "int64"):
            return None
        ones = bool(sized.points_to) or place.dtype.is_floating_point
        numbers = _told(
            place, run.sizing, sized.axis, sized.symbol, _ONES if ones else 0, sized.points_to
        )
        told.append((False, name, dtype, numbers))
    outputs = run.captured.outputs
    if interface is None:
        (output,) = outputs
        if output.dim() != 2 or output.dtype != torch.float32:
            return None
        told.append((True, "output", "float32", _told(output, run.sizing, 0, "N")))
    else:
        for slot, output in zip(interface.outputs, outputs, strict=True):
            dtype = str(output.dtype).removeprefix("torch.")
            if slot.symbols and slot.symbols[0] not in run.sizing.symbols:
                return None
            axis, symbol = (slot.symbol_axis, slot.symbols[0]) if slot.symbols else (-1, "")
            told.append((True, slot.name, dtype, _told(output, run.sizing, axis, symbol)))
    places = [*run.inputs.values(), *outputs]
    ours = all(each.is_contiguous() and each.dim() <= _MOST_AXES for each in places)
    return told if ours and outputs else None


def _told(
    tensor: torch.Tensor,
    sizing: Sizing | None = None,
    axis: int = -1,
    symbol: str = "",
    spare: int = 0,
    points_to: Sequence[str] = (),
) -> list[int]:
    """Return numbers for ``gnnserve_lane_add_tensor``."""
    symbols = () if sizing is None else sizing.symbols
    return [
        tensor.data_ptr(), tensor.element_size(), axis,
        symbols.index(symbol) if symbol else -1, spare, tensor.dim(), len(points_to),
        *tensor.shape, *map(symbols.index, points_to),
    ]  # fmt: skip


def _numbers(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    return (ctypes.c_int64 * max(1, len(values)))(*values)
