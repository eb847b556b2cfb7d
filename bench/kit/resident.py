"""The rise of this process's resident memory in a run, by the kernel's account.

The high-water mark sees all memory, in pages. It works on Linux with glibc only.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: glibc's mallopt parameters.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_PR_SET_THP_DISABLE = 41
_OWN_PAGES_BYTES = 64 << 10
#: Where glibc's own adaptation ends on 64 bits; setting one turns the adaptation off.
_USUAL_TRIM_BYTES, _USUAL_MMAP_BYTES, _USUAL_MMAP_COUNT = 64 << 20, 32 << 20, 65536


@contextmanager
def exact_pages() -> Iterator[bool]:
    """Give every large block pages of its own while open, returned to the kernel when freed.

    This makes the high-water mark of the process exact. Yields False where that is impossible.
    Afterwards glibc's thresholds are those of the environment, or glibc's usual ones.
    """
    if not os.access("/proc/self/clear_refs", os.W_OK) or platform.libc_ver()[0] != "glibc":
        yield False
        return
    # The library's own functions, whatever is preloaded in front of them.
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallopt(_M_MMAP_MAX, _USUAL_MMAP_COUNT)
    libc.mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _OWN_PAGES_BYTES)
    # Huge pages would round every block up to 2 MiB.
    libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    plugs = _plug_heap(libc)
    try:
        yield True
    finally:
        for plug in plugs:
            libc.free(plug)
        libc.prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)
        libc.mallopt(_M_MMAP_THRESHOLD, _told("MALLOC_MMAP_THRESHOLD_", _USUAL_MMAP_BYTES))
        libc.mallopt(_M_MMAP_MAX, _told("MALLOC_MMAP_MAX_", _USUAL_MMAP_COUNT))
        libc.mallopt(_M_TRIM_THRESHOLD, _told("MALLOC_TRIM_THRESHOLD_", _USUAL_TRIM_BYTES))


def _told(name: str, usual: int) -> int:
    """Return the setting of the environment, as far as glibc's mallopt can take it."""
    return min(int(os.environ.get(name, usual)), (1 << 31) - 1)


def _plug_heap(libc: ctypes.CDLL) -> list[int]:
    """Allocate every large hole in the heap, without touching its pages.

    glibc would use a hole before it asks the kernel, and a hole stays resident when freed.
    """
    plugs: list[int] = []
    size = _USUAL_MMAP_BYTES
    while size >= _OWN_PAGES_BYTES:
        block = libc.malloc(size)
        if block is None:
            break
        # The word before a block holds its size; bit 1 of it says that the block is mapped.
        if ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & 2:
            libc.free(block)
            size //= 2
        else:
            plugs.append(block)
    return plugs


def resident_bytes(run: Callable[[], object]) -> int | None:
    """Return the highest rise of resident memory during `run()`; call it inside ``exact_pages``.

    It is the lower of two tries, as disturbances only add. Returns None where the kernel does not
    let the mark be reset.
    """
    libc = ctypes.CDLL(None)
    run()
    tries = []
    try:
        for _ in range(2):
            libc.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before = status_bytes("VmRSS")
            run()
            tries.append(status_bytes("VmHWM") - before)
    except OSError:
        return None
    return max(0, min(tries))


def status_bytes(field: str) -> int:
    """Return a field of /proc/self/status; raises OSError where it is missing."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
