"""Device memory by estimate: each lane's task has a buffer of the size reserved for it.

A process has one arena over one slab; torch allocates from it after ``install``. Blocks that a
thread allocates while it runs a lane's task belong to that task. All others (weights, workspaces of
libraries) are static memory, kept for good.
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
    """The memory of one device, placed for all threads of this process."""

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
        """Place memory in that range of addresses; raises ValueError on the second call."""
        # PyDLL keeps the interpreter lock: the calls take less time than releasing it.
        library = ctypes.PyDLL(str(required_path(DEVICE_LIBRARY)))
        arena = cls(library)
        if library.gnnserve_device_open(base, capacity_bytes) != 0:
            raise ValueError(f"no arena of {capacity_bytes} bytes at {base:#x}, or a second one")
        return arena

    def install(self) -> None:
        """Make torch allocate from this arena.

        Raises RuntimeError when torch has already initialised CUDA.
        """
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
        """Add a lane and return its memory."""
        return LaneMemory(self._library, int(self._library.gnnserve_device_add_lane()))

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the slab."""
        return self._read(_CAPACITY)

    @property
    def held_bytes(self) -> int:
        """Bytes of task buffers, static memory, and blocks that outlived their task."""
        return self._read(_HELD)

    @property
    def static_bytes(self) -> int:
        """Bytes of static memory: weights and workspaces."""
        return self._read(_HELD_STATIC)

    @property
    def outlived_bytes(self) -> int:
        """Bytes of blocks that outlived their task."""
        return self._read(_HELD_OUTLIVED)

    def _read(self, field: int) -> int:
        return int(self._library.gnnserve_device_read(_NOBODY, field))


class LaneMemory:
    """One lane's buffer, the counterpart of ``serve.native.Meter`` for a lane on a device.

    The thread that calls `insert` must be the one that allocates and calls `clear`.
    """

    def __init__(self, library: ctypes.PyDLL, lane: int) -> None:
        self._library = library
        self._lane = lane

    def insert(self, limit_bytes: int) -> None:
        """Give the lane a buffer; this thread allocates from it until ``clear``.

        Raises MemoryError when the slab has no room for it.
        """
        found = self._library.gnnserve_device_insert(self._lane, limit_bytes)
        if found < 0:
            raise RuntimeError(f"lane {self._lane} still holds the buffer of its last task")
        if found == 0:
            raise MemoryError(f"the device has no {limit_bytes} bytes left for the task's buffer")
        self._library.gnnserve_device_bind(self._lane)

    def hold(self, limit_bytes: int) -> None:
        """Give the lane a permanent buffer; a thread allocates from it only inside ``held``.

        Raises MemoryError as ``insert`` does.
        """
        self.insert(limit_bytes)
        self._library.gnnserve_device_bind(_NOBODY)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Allocate from the buffer of ``hold`` in this thread while open."""
        self._library.gnnserve_device_bind(self._lane)
        try:
            yield
        finally:
            self._library.gnnserve_device_bind(_NOBODY)

    def stop_when(self, word_address: int, value: int) -> None:
        """Refuse every block while the 64-bit word holds `value`, until ``clear``."""
        self._library.gnnserve_device_stop_when(word_address, value)

    def clear(self) -> int:
        """Free the buffer, once the task's work has ended; returns the bytes that are still live.

        Nobody else gets these until they are freed.
        """
        self._library.gnnserve_device_bind(_NOBODY)
        return int(self._library.gnnserve_device_clear(self._lane))

    def most_bytes(self) -> int:
        """Return the size of the largest buffer that fits now."""
        return self._read(_CAPACITY) - self._read(_HELD)

    def held_by(self, run: Callable[[], object]) -> int:
        """Return the peak of placed bytes while `run` executes in the largest buffer."""
        self.insert(self.most_bytes())
        try:
            run()
        finally:
            self.clear()
        return self.held_peak_bytes()

    def live_bytes(self) -> int:
        """Return the requested bytes that are allocated and not freed."""
        return self._read(_REQUESTED)

    def peak_bytes(self) -> int:
        """Return the peak of requested bytes since ``insert``; readable until the next one."""
        return self._read(_REQUESTED_PEAK)

    def held_peak_bytes(self) -> int:
        """Return the peak of placed bytes, in multiples of ALIGNMENT_BYTES."""
        return self._read(_PEAK)

    def blocks_peak(self) -> int:
        """Return the peak number of blocks since ``insert``."""
        return self._read(_BLOCKS_PEAK)

    def refused_bytes(self) -> int:
        """Return the size of the block refused last since ``insert``; 0 when none was."""
        return self._read(_REFUSED)

    def refusals(self) -> int:
        """Return the number of blocks refused since ``insert`` or ``hold``."""
        return self._read(_REFUSALS)

    def spills(self) -> int:
        """Return the number of blocks that fitted no hole of the buffer and lie beside it."""
        return self._read(_SPILLS)

    def start_trace(self) -> None:
        """Start to record every block."""
        self._library.gnnserve_device_start_trace(self._lane)

    def take_trace(self, most: int = 1 << 20) -> tuple[int, ...]:
        """Return the recorded blocks: +size for an allocation, -size for a free."""
        events = (ctypes.c_int64 * most)()
        count = int(self._library.gnnserve_device_take_trace(self._lane, events, most))
        if not 0 <= count <= most:
            raise RuntimeError(f"{count} allocations in one run cannot be traced")
        return tuple(events[:count])

    def _read(self, field: int) -> int:
        return int(self._library.gnnserve_device_read(self._lane, field))
