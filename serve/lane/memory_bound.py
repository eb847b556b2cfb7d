"""Bound of a run's private memory, torch's tensors included, that the kernel keeps.

The limit of a run's tensors is exact and the meter's (``serve.native``). What a model takes of
Python, numpy and other libraries is in no estimate: it may be as much as the tensors, for the holes
in the heap, and `_SPARE_BYTES` more.
"""

import mmap
import os
import resource
import weakref

_TENSORS_FACTOR = 2
_SPARE_BYTES = 512 << 20
#: The limit is moved when it is less than it must be, or by so much more.
_STEP_BYTES = 128 << 20
#: Number of `data` among the fields of /proc/self/statm.
_DATA_FIELD = 5


class MemoryBound:
    """Moves this process's soft limit of private memory, below what confinement allows."""

    def __init__(self) -> None:
        now_bytes, self._most_bytes = resource.getrlimit(resource.RLIMIT_DATA)
        #: Without confinement there is no limit to stay below.
        self._applies = now_bytes != resource.RLIM_INFINITY
        self._limit_bytes = now_bytes
        self._statm_fd = os.open("/proc/self/statm", os.O_RDONLY)
        weakref.finalize(self, os.close, self._statm_fd)
        self._mapped_bytes = 0
        self.note()

    def note(self) -> None:
        """Take note of the memory that is mapped now, between two runs."""
        fields = os.pread(self._statm_fd, 128, 0).split()
        self._mapped_bytes = int(fields[_DATA_FIELD]) * mmap.PAGESIZE

    def expect(self, tensors_bytes: int) -> None:
        """Let a run map what it may need for `tensors_bytes` of tensors, and little more."""
        need_bytes = self._mapped_bytes + _TENSORS_FACTOR * tensors_bytes + _SPARE_BYTES
        need_bytes = min(need_bytes, self._most_bytes)
        if not need_bytes <= self._limit_bytes <= need_bytes + _STEP_BYTES:
            self._set(min(need_bytes + _STEP_BYTES // 2, self._most_bytes))

    def lift(self) -> None:
        """Let this process map all that confinement allows, as a load needs."""
        self._set(self._most_bytes)

    def _set(self, limit_bytes: int) -> None:
        if self._applies:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, self._most_bytes))
            self._limit_bytes = limit_bytes
