"""Gives freed memory of the main process back to the kernel when much has gathered.

The C library keeps what messages took, as it is set to (``tune_process``): a few that expand to the
largest allowed size leave many times that. It gives back what is free in its heap, of all threads.
"""

import ctypes
import logging
import threading

from serve.ipc.private_memory import private_bytes
from serve.threads import Thread

_log = logging.getLogger(__name__)

_PERIOD_S = 5.0
#: Growth since the last time from which on freed memory is given back at once.
KEEP_BYTES = 64 << 20
#: Less growth than that, and more than this, waits for so many looks: each return takes some
#: milliseconds, in which no thread gets memory from the C library.
_LITTLE_BYTES, _PATIENCE_LOOKS = 1 << 20, 4
# A C library other than glibc may not have it.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
if _malloc_trim is not None:
    _malloc_trim.argtypes = [ctypes.c_size_t]


class HeapTrimmer:
    """Looks at the private memory every few seconds, on one thread, between `start` and `stop`."""

    def __init__(self, keep_bytes: int = KEEP_BYTES, period_s: float = _PERIOD_S) -> None:
        self._keep_bytes = keep_bytes
        self._period_s = period_s
        #: Private memory after the last time, or less since.
        self._base_bytes = private_bytes()
        #: Looks since the last time.
        self._looks = 0
        self._stopped = threading.Event()
        self._thread = Thread(target=self._follow, name="heap")

    def start(self) -> None:
        """Begin to look; raises RuntimeError when the thread cannot be started."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Give freed memory back when the process has grown by much, or by a little for a while."""
        self._looks += 1
        most_bytes = self._keep_bytes if self._looks < _PATIENCE_LOOKS else _LITTLE_BYTES
        now_bytes = private_bytes()
        if now_bytes > self._base_bytes + most_bytes and _malloc_trim is not None:
            _malloc_trim(0)
            self._looks = 0
            now_bytes = self._base_bytes = private_bytes()
        self._base_bytes = min(self._base_bytes, now_bytes)

    def _follow(self) -> None:
        while not self._stopped.wait(self._period_s):
            try:
                self.look()
            except OSError as error:  # no descriptor to read it with; the next look may have one
                _log.debug("the private memory cannot be read: %s", error)
