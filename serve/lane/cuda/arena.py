"""Device memory by estimate: each lane's task has a buffer of the size reserved for it.

One arena a process, over one slab; torch allocates from it once ``install`` was called. What a
thread allocates while a lane's task is entered in it belongs to that task; everything else
(weights, workspaces of libraries) is static memory, kept for good.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from serve.native_cuda import DEVICE_LIBRARY, required_path

#: Blocks are placed in multiples of this.
ALIGNMENT_BYTES = 512

# DeviceArena::Usage, see csrc/cuda/torch_entry.cpp.
_LIVE, _PEAK, _REQUESTED, _REQUESTED_PEAK, _BLOCKS_PEAK, _REFUSED, _SPILLS = 1, 2, 3, 4, 6, 7, 8
_REFUSALS = 9
_CAPACITY, _HELD, _HELD_STATIC, _HELD_OUTLIVED = 100, 101, 102, 103
_NOBODY = -1


class DeviceArena:
    """Places the memory of one device for all threads of this process."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        for name in ("open", "add_lane", "insert", "clear", "read", "start_trace", "take_trace"):
            getattr(library, f"gnnserve_device_{name}").restype = ctypes.c_int64
        library.gnnserve_device_open.argtypes = [ctypes.c_uint64, ctypes.c_int64]
        library.gnnserve_device_insert.argtypes = [ctypes.c_int, ctypes.c_int64]
        library.gnnserve_device_take_trace.argtypes = [
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_int64),
            ctypes.c_int64,
        ]
        library.gnnserve_device_bind.restype = None
        library.gnnserve_device_stop_when.restype = None
        library.gnnserve_device_stop_when.argtypes = [ctypes.c_void_p, ctypes.c_uint64]

    @classmethod
    def open(cls, base: int, capacity_bytes: int) -> Self:
        """Place memory in that range from now on; raises ValueError on the second call."""
        # PyDLL keeps the interpreter lock: the calls take less than letting it go.
        library = ctypes.PyDLL(str(required_path(DEVICE_LIBRARY)))
        arena = cls(library)
        if library.gnnserve_device_open(base, capacity_bytes) != 0:
            raise ValueError(f"no arena of {capacity_bytes} bytes at {base:#x}, or a second one")
        return arena

    def install(self) -> None:
        """Have torch allocate from this arena; before anything of torch touches CUDA."""
        import torch

        cuda: Any = torch.cuda
        if cuda.is_initialized():
            raise RuntimeError("CUDA is initialised: torch's allocator can be swapped before only")
        path = str(required_path(DEVICE_LIBRARY))
        allocator = cuda.memory.CUDAPluggableAllocator(
            path, "gnnserve_device_alloc", "gnnserve_device_free"
        )
        cuda.memory.change_current_allocator(allocator)

    def add_lane(self) -> "LaneMemory":
        """Memory of one more lane."""
        return LaneMemory(self._library, int(self._library.gnnserve_device_add_lane()))

    @property
    def capacity_bytes(self) -> int:
        """The whole slab."""
        return self._read(_CAPACITY)

    @property
    def held_bytes(self) -> int:
        """Handed out to tasks, to static memory, and to blocks that outlived their task."""
        return self._read(_HELD)

    @property
    def static_bytes(self) -> int:
        """Static memory: weights and workspaces."""
        return self._read(_HELD_STATIC)

    @property
    def outlived_bytes(self) -> int:
        """Blocks that outlived their task."""
        return self._read(_HELD_OUTLIVED)

    def _read(self, field: int) -> int:
        return int(self._library.gnnserve_device_read(_NOBODY, field))


class LaneMemory:
    """One lane's buffer; what ``serve.native.Meter`` is to a lane in a process of its own.

    `insert` and `clear` are called in the thread that allocates in between.
    """

    def __init__(self, library: ctypes.PyDLL, lane: int) -> None:
        self._library = library
        self._lane = lane

    def insert(self, limit_bytes: int) -> None:
        """Give the lane a buffer; this thread allocates from it until ``clear``.

        Raises MemoryError when the slab has not that much left.
        """
        found = self._library.gnnserve_device_insert(self._lane, limit_bytes)
        if found < 0:
            raise RuntimeError(f"lane {self._lane} still holds the buffer of its last task")
        if found == 0:
            raise MemoryError(f"the device has no {limit_bytes} bytes left for the task's buffer")
        self._library.gnnserve_device_bind(self._lane)

    def hold(self, limit_bytes: int) -> None:
        """Give it a buffer for good, of which a thread allocates inside ``held`` only.

        Raises MemoryError as ``insert`` does.
        """
        self.insert(limit_bytes)
        self._library.gnnserve_device_bind(_NOBODY)

    @contextmanager
    def held(self) -> Iterator[None]:
        """While open, this thread allocates from the buffer of ``hold``."""
        self._library.gnnserve_device_bind(self._lane)
        try:
            yield
        finally:
            self._library.gnnserve_device_bind(_NOBODY)

    def stop_when(self, word_address: int, value: int) -> None:
        """Until ``clear``, refuse whatever is asked for once the 64-bit word holds `value`."""
        self._library.gnnserve_device_stop_when(word_address, value)

    def clear(self) -> int:
        """Give the buffer back, once the task's work has ended; bytes that are still live.

        These are kept from others until they are freed.
        """
        self._library.gnnserve_device_bind(_NOBODY)
        return int(self._library.gnnserve_device_clear(self._lane))

    def most_bytes(self) -> int:
        """The largest buffer there is room for now."""
        return self._read(_CAPACITY) - self._read(_HELD)

    def held_by(self, run: Callable[[], object]) -> int:
        """The most bytes `run` held at once, as placed, with all the room there is."""
        self.insert(self.most_bytes())
        try:
            run()
        finally:
            self.clear()
        return self.held_peak_bytes()

    def live_bytes(self) -> int:
        """Requested bytes allocated and not freed."""
        return self._read(_REQUESTED)

    def peak_bytes(self) -> int:
        """Most requested bytes at once since ``insert``; readable until the next one."""
        return self._read(_REQUESTED_PEAK)

    def held_peak_bytes(self) -> int:
        """The same as placed, in multiples of ALIGNMENT_BYTES."""
        return self._read(_PEAK)

    def blocks_peak(self) -> int:
        """Most blocks at once since ``insert``."""
        return self._read(_BLOCKS_PEAK)

    def refused_bytes(self) -> int:
        """Size of the last block refused between ``insert`` and ``clear``; 0: none was."""
        return self._read(_REFUSED)

    def refusals(self) -> int:
        """How many blocks were refused since ``insert`` or ``hold``."""
        return self._read(_REFUSALS)

    def spills(self) -> int:
        """Blocks that did not fit into the holes of the buffer and were placed beside it."""
        return self._read(_SPILLS)

    def start_trace(self) -> None:
        """Remember every block from now on."""
        self._library.gnnserve_device_start_trace(self._lane)

    def take_trace(self, most: int = 1 << 20) -> tuple[int, ...]:
        """What was remembered: +size for a block handed out, -size for one taken back."""
        events = (ctypes.c_int64 * most)()
        count = int(self._library.gnnserve_device_take_trace(self._lane, events, most))
        if not 0 <= count <= most:
            raise RuntimeError(f"{count} allocations in one run cannot be traced")
        return tuple(events[:count])

    def _read(self, field: int) -> int:
        return int(self._library.gnnserve_device_read(self._lane, field))
