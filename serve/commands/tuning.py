"""Settings of the server's process, to be made before there are other threads and processes."""

import ctypes
import resource
import sys
from contextlib import suppress

#: While two threads compete for the interpreter lock, it changes hands this often. Python's default
#: of 5 ms is as long as many requests take.
_SWITCH_INTERVAL_S = 0.0002
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def tune_process() -> None:
    """Tune the interpreter, the limit of open files and the C heap for serving.

    Before there are other threads.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # Connections, shared-memory regions and lanes are open files. The soft limit is low to protect
    # programs that use select(); this one does not.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    # Keep freed message buffers: returning their pages and faulting them in again costs more than
    # copying their content. A C library other than glibc may have no mallopt.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # All threads take from one heap: of others' ends, malloc_trim gives nothing back, and each
        # keeps the most that it ever held, up to 64 MiB (``HeapTrimmer``).
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)
