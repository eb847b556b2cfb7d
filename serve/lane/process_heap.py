"""What a lane's process keeps of freed memory from run to run, with glibc's help.

Blocks come from the heap, which is more than twice as fast as pages of their own that are handed
back when they are freed (bench/models/allocators.py), but takes up to about as much again in holes.
Other C libraries lack these functions; then nothing is done.
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
#: How many blocks may have pages of their own, and the kernel's usual bound for it.
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
    """The heap of this process, which keeps `keep_bytes` of what runs have freed."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._own_pages = False
        #: Kept open, as it is read after every run.
        self._statm_fd = os.open("/proc/self/statm", os.O_RDONLY)
        weakref.finalize(self, os.close, self._statm_fd)
        #: Private memory in use between runs.
        self._base_bytes = 0

    def settle(self) -> None:
        """What is in use now stays: models, not a run's tensors."""
        free_bytes = 0 if _mallinfo2 is None else _mallinfo2().fordblks
        self._base_bytes = private_bytes() - free_bytes

    def held_bytes(self) -> int:
        """Private memory beyond what was in use when it was settled."""
        return parse_statm(os.pread(self._statm_fd, 128, 0)) - self._base_bytes

    def use_pages_for(self, need_bytes: int) -> None:
        """Large blocks of a run that needs more than may be kept get pages of their own.

        What may be kept covers the holes that runs leave which take no more than it.
        """
        on = need_bytes > self._keep_bytes
        if on != self._own_pages and _mallopt is not None:
            _mallopt(_M_MMAP_MAX, _MANY_BLOCKS if on else 0)
            self._own_pages = on

    def give_back(self) -> None:
        """Hand freed pages back if there are more than may be kept.

        Only then: the C library hands back every free page there is, and getting its pages anew
        takes the next run, often a short one, as long again as its work.
        """
        if _malloc_trim is not None and self.held_bytes() > self._keep_bytes:
            _malloc_trim(self._keep_bytes)
