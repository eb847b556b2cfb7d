"""Freed memory that a lane's process keeps from run to run, with glibc's help.

Blocks come from the heap, which is more than twice as fast as pages of their own that are returned
when they are freed (bench/models/allocators.py), but takes up to about as much again in holes.
Other C libraries lack these functions; nothing happens there.
"""

import ctypes
import os
import weakref

from serve.ipc.private_memory import parse_statm, private_bytes

_libc = ctypes.CDLL(None)
_mallopt = getattr(_libc, "mallopt", None)
_malloc_trim = getattr(_libc, "malloc_trim", None)
if _malloc_trim is not None:
    _malloc_trim.argtypes = [ctypes.c_size_t]
#: mallopt's number of blocks that may have pages of their own, and glibc's default for it.
_M_MMAP_MAX, _MANY_BLOCKS = -4, 65536


class _HeapFacts(ctypes.Structure):
    """struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


_mallinfo2 = getattr(_libc, "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _HeapFacts


class ProcessHeap:
    """The heap of this process, which keeps `keep_bytes` of freed memory."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._own_pages = False
        #: Kept open, as it is read after every run.
        self._statm_fd = os.open("/proc/self/statm", os.O_RDONLY)
        weakref.finalize(self, os.close, self._statm_fd)
        #: Private memory in use between runs.
        self._base_bytes = 0

    def settle(self) -> None:
        """Count the memory in use now as that of models."""
        free_bytes = 0 if _mallinfo2 is None else _mallinfo2().fordblks
        self._base_bytes = private_bytes() - free_bytes

    def held_bytes(self) -> int:
        """Return the private memory beyond that at the last `settle`."""
        return parse_statm(os.pread(self._statm_fd, 128, 0)) - self._base_bytes

    def use_pages_for(self, need_bytes: int) -> None:
        """Give large blocks pages of their own when a run needs more than may be kept.

        `keep_bytes` covers the holes that smaller runs leave in the heap.
        """
        on = need_bytes > self._keep_bytes
        if on != self._own_pages and _mallopt is not None:
            _mallopt(_M_MMAP_MAX, _MANY_BLOCKS if on else 0)
            self._own_pages = on

    def give_back(self) -> None:
        """Return freed pages to the kernel when there are more than may be kept.

        Otherwise keep them: the C library returns every free page, and getting them anew takes the
        next run, often a short one, as long again as its work.
        """
        if _malloc_trim is not None and self.held_bytes() > self._keep_bytes:
            _malloc_trim(self._keep_bytes)
