"""The shared pool: one anonymous memory file that the main process and every lane map.

The main process allocates blocks and tells lanes the offsets. The file has no name, so a killed
server leaves nothing behind: the kernel frees the memory with its last mapping.
"""

import contextlib
import math
import mmap
import os
from typing import Any

import msgspec
import numpy as np

from serve.native import BlockPool

#: Tensors are aligned to cache lines, as by torch's allocator.
TENSOR_ALIGNMENT_BYTES = 64
#: First part of the pool, faulted in at start so that ordinary requests cause no page faults.
PREFAULT_BYTES = 32 << 20
#: Behind the pool lie two words for each lane: the task to stop, see ``stop_word``, and the task
#: that runs, which tells a lane idle between runs from a run that is stuck.
_WORDS_BYTES = 1 << 18
LANE_WORDS_BYTES = 16
RUNS_WORD_BYTES = 8


def map_pool(fd: int, capacity_bytes: int) -> mmap.mmap:
    """Map the pool's file with the words behind it, and fault its first part in."""
    view = mmap.mmap(
        fd, capacity_bytes + _WORDS_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
    )
    populate = getattr(mmap, "MADV_POPULATE_WRITE", 23)
    # Linux before 5.14 cannot: there the first requests cause the page faults.
    with contextlib.suppress(OSError):
        view.madvise(populate, 0, min(PREFAULT_BYTES, capacity_bytes))
    return view


class Block(msgspec.Struct, frozen=True):
    """A part of the pool that one request holds."""

    offset_bytes: int
    size_bytes: int


class SharedPool:
    """Allocates blocks of the shared memory file. Thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.fd = os.memfd_create("gnnserve-pool", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, capacity_bytes + _WORDS_BYTES)
        self._map = map_pool(self.fd, capacity_bytes)
        self._view = memoryview(self._map)
        #: Allocates in this memory; for the front, which stages requests itself.
        self.blocks = BlockPool(self._view, capacity_bytes, TENSOR_ALIGNMENT_BYTES)

    @property
    def used_bytes(self) -> int:
        """Bytes allocated and not freed; 0 once the pool is closed, also by another thread."""
        with contextlib.suppress(ValueError):
            return self.blocks.used_bytes
        return 0

    def allocate(self, size_bytes: int) -> Block | None:
        """Return a block of at least `size_bytes`, None when no free part is large enough."""
        offset = self.blocks.alloc(max(size_bytes, 1))
        return None if offset < 0 else Block(offset, size_bytes)

    def free(self, block: Block) -> None:
        """Free a block."""
        self.blocks.free(block.offset_bytes)

    @property
    def most_words(self) -> int:
        """Number of pairs of words."""
        return _WORDS_BYTES // LANE_WORDS_BYTES

    def words_offset_bytes(self, number: int) -> int:
        """Return the offset of a lane's words in the file; raises ValueError for too many lanes."""
        if not 0 <= number < self.most_words:
            raise ValueError(f"words {number}: the pool has {self.most_words}")
        return self.capacity_bytes + LANE_WORDS_BYTES * number

    def write_stop(self, number: int, task_id: int) -> None:
        """Write the task to stop, 0 for none, to the lane's stop word."""
        self.array(self.words_offset_bytes(number), "uint64", (1,))[0] = task_id

    def runs(self, number: int) -> int:
        """Return the task that the lane says it runs, 0 for none."""
        offset_bytes = self.words_offset_bytes(number) + RUNS_WORD_BYTES
        return int(self.array(offset_bytes, "uint64", (1,))[0])

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a view of the bytes at `offset_bytes`."""
        return self._view[offset_bytes : offset_bytes + size_bytes]

    def array(
        self, offset_bytes: int, dtype: str, shape: tuple[int, ...]
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """Return an array over the memory at `offset_bytes`; nothing is copied."""
        count = math.prod(shape)
        if count == 0:
            return np.empty(shape, dtype)
        return np.frombuffer(self._map, dtype, count, offset_bytes).reshape(shape)

    def close(self) -> None:
        """Drop the mapping and the file. Arrays still held keep the memory alive."""
        self.blocks.close()
        # Arrays of a request that is being answered keep the mapping.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        os.close(self.fd)
