"""Pruning of an on-disk cache to a size, least recently used first.

A running server locks the entries that it may open again, and these stay. The locks are flock
locks, so the kernel releases them however the server ends.
"""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)

#: Younger entries stay: another process may still be writing them.
_YOUNG_S = 3600.0
#: Descriptors with a shared lock, open as long as this process runs.
_held: dict[Path, int] = {}


def hold(path: Path) -> bool:
    """Protect a file or folder from pruning while this process runs; return False if it is gone."""
    if path not in _held:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _held[path] = descriptor
    return path.exists()


def touch(path: Path) -> None:
    """Mark the entry as used now; does nothing when its time cannot be set."""
    with suppress(OSError):
        os.utime(path)


def prune(kept: Iterable[Path], limit_bytes: int) -> int:
    """Delete files and folders, least recently used first, until the rest fits `limit_bytes`.

    Each is deleted as a whole. Entries that are held, young or cannot be deleted stay, so the rest
    may exceed the limit. Returns the bytes freed.
    """
    found = [(path, *_use(path)) for path in kept]
    excess_bytes = sum(size_bytes for _, size_bytes, _ in found) - limit_bytes
    freed_bytes = 0
    for path, size_bytes, used_s in sorted(found, key=lambda one: one[2]):
        if freed_bytes >= excess_bytes or used_s > time.time() - _YOUNG_S:
            break
        if _delete(path):
            freed_bytes += size_bytes
    if freed_bytes:
        _log.info("deleted %d bytes of calibrations, least recently used first", freed_bytes)
    return freed_bytes


def _use(path: Path) -> tuple[int, float]:
    """Return a file's or folder's (bytes on disk, last use in seconds since the epoch)."""
    size_bytes, used_s = 0, 0.0
    for one in (path, *path.rglob("*")):
        with suppress(OSError):  # gone meanwhile
            stat = one.lstat()
            size_bytes += stat.st_blocks * 512
            used_s = max(used_s, stat.st_mtime)
    return size_bytes, used_s


def _delete(path: Path) -> bool:
    """Delete the entry unless a process holds it; return True when it was deleted."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
