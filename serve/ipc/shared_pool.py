"""The shared pool: one anonymous memory file that the main process and every lane map.

The main process decides what lies where; lanes are told offsets. The file has no name, so
nothing is left behind when the server is killed: the kernel frees it with its last mapping.
"""

import contextlib
import math
import mmap
import os
import threading
from typing import Any

import msgspec
import numpy as np

from serve.native import OffsetAllocator

#: Tensors start at multiples of a cache line, as torch's own allocator has them.
TENSOR_ALIGNMENT_BYTES = 64
#: Mapped in and touched at start, so that ordinary requests cause no page fault.
PREFAULT_BYTES = 32 << 20
#: Behind the pool, two words for each lane: the task to stop, see ``stopping``, and the task whose
#: run it is in, so that a lane at rest between runs is not taken for a run at rest.
_WORDS_BYTES = 1 << 16
LANE_WORDS_BYTES = 16
RUNS_WORD_BYTES = 8


def map_pool(fd: int, capacity_bytes: int) -> mmap.mmap:
    """Map the pool's file, the words behind it too, and touch its first part."""
    view = mmap.mmap(
        fd, capacity_bytes + _WORDS_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
    )
    populate = getattr(mmap, "MADV_POPULATE_WRITE", 23)
    # Linux before 5.14 cannot: there the first requests pay for their page faults.
    with contextlib.suppress(OSError):
        view.madvise(populate, 0, min(PREFAULT_BYTES, capacity_bytes))
    return view


class Block(msgspec.Struct, frozen=True):
    """A part of the pool held by one request."""

    offset_bytes: int
    size_bytes: int


class SharedPool:
    """Hands out blocks of the shared memory file. Thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.fd = os.memfd_create("gnnserve-pool", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, capacity_bytes + _WORDS_BYTES)
        self._map = map_pool(self.fd, capacity_bytes)
        self._view = memoryview(self._map)
        self._allocator = OffsetAllocator(capacity_bytes, TENSOR_ALIGNMENT_BYTES)
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes handed out and not freed."""
        return self._allocator.used_bytes

    def allocate(self, size_bytes: int) -> Block | None:
        """A block of at least `size_bytes`, or None when none is free."""
        with self._lock:
            offset = self._allocator.alloc(max(size_bytes, 1))
        return None if offset < 0 else Block(offset, size_bytes)

    def free(self, block: Block) -> None:
        """Give a block back."""
        with self._lock:
            self._allocator.free(block.offset_bytes)

    def words_offset_bytes(self, number: int) -> int:
        """Where the words of the lane of that number lie, for those who map the file."""
        most = _WORDS_BYTES // LANE_WORDS_BYTES
        if not 0 <= number < most:
            raise ValueError(f"words of lane {number}: there are {most}")
        return self.capacity_bytes + LANE_WORDS_BYTES * number

    def write_stop(self, number: int, task_id: int) -> None:
        """Set the lane's word to stop at, for all who map the file at once; 0 at first."""
        self.array(self.words_offset_bytes(number), "uint64", (1,))[0] = task_id

    def runs(self, number: int) -> int:
        """The task that the lane says to be in the run of; 0: none."""
        offset_bytes = self.words_offset_bytes(number) + RUNS_WORD_BYTES
        return int(self.array(offset_bytes, "uint64", (1,))[0])

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """The bytes at `offset_bytes`."""
        return self._view[offset_bytes : offset_bytes + size_bytes]

    def array(
        self, offset_bytes: int, dtype: str, shape: tuple[int, ...]
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """The memory at `offset_bytes` as an array; shares memory with the pool."""
        count = math.prod(shape)
        if count == 0:
            return np.empty(shape, dtype)
        return np.frombuffer(self._map, dtype, count, offset_bytes).reshape(shape)

    def close(self) -> None:
        """Drop the mapping and the file. Arrays still held keep the memory alive."""
        # An array of a request still being answered keeps the mapping until it goes.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        os.close(self.fd)
