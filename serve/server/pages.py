"""Huge pages for what the main process lives in.

A lane runs on the core of the server's threads between their steps, and each step then finds its
translations of addresses gone, as well as its data; in a virtual machine one is two walks through
page tables. The kernel gives huge pages unasked only where that is its administrator's choice.
"""

import ctypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_HUGE_BYTES = 2 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_MAPS = Path("/proc/self/maps")


def use_huge_pages() -> int:
    """Have what the heap holds now lie in huge pages; bytes that do.

    0 where the system has none, or does not collapse pages when asked (Linux before 6.1). Pages
    that the heap has set aside and not touched are taken with the others.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not _MAPS.exists():
        return 0
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    huge_bytes = 0
    for start, end in heap_parts(_MAPS.read_text().splitlines()):
        if end > start and madvise(start, end - start, _MADV_HUGEPAGE) == 0:
            for page in range(start, end, _HUGE_BYTES):
                huge_bytes += _HUGE_BYTES * (madvise(page, _HUGE_BYTES, _MADV_COLLAPSE) == 0)
    return huge_bytes


def heap_parts(maps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Start and end of whole huge pages in private memory without a name, but for stacks.

    `maps` are the lines of /proc/PID/maps. Stacks are made for a thread and not to grow into: what
    lies right after a guard page is one.
    """
    guard_end = None
    for line in maps:
        places, permissions, *_, name = (*line.split(maxsplit=5), "")[:6]
        start, end = (int(place, 16) for place in places.split("-"))
        if permissions == "rw-p" and name.strip() in ("", "[heap]") and start != guard_end:
            first, last = -(-start // _HUGE_BYTES), end // _HUGE_BYTES
            if last > first:
                yield first * _HUGE_BYTES, last * _HUGE_BYTES
        is_guard = permissions == "---p" and end - start == _PAGE_BYTES
        guard_end = end if is_guard else None
