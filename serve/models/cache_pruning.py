"""Things kept on disk from one start to the next, within a size.

What was used least recently goes first. What a running server may open again is held by it, and
stays; the kernel lets go of what a server held when it ends, however it does.
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

#: Younger things stay: another process may still write them.
_YOUNG_S = 3600.0
#: Held for as long as this process runs.
_held: dict[Path, int] = {}


def hold(path: Path) -> bool:
    """Keep the file or folder from being pruned while this process runs; False if it is gone."""
    if path not in _held:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _held[path] = descriptor
    return path.exists()


def touch(path: Path) -> None:
    """It was used now; does nothing where that cannot be noted."""
    with suppress(OSError):
        os.utime(path)


def prune(kept: Iterable[Path], limit_bytes: int) -> int:
    """Delete of these files and folders until the rest takes `limit_bytes` at most.

    Those used least recently go first, each as a whole. What is held, young, or cannot be deleted
    stays, so that the rest may take more. Returns the bytes freed.
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
        _log.info("deleted %d bytes of calibrations not used for long", freed_bytes)
    return freed_bytes


def _use(path: Path) -> tuple[int, float]:
    """(bytes, when it was used last in seconds since the epoch) of a file or folder."""
    size_bytes, used_s = 0, 0.0
    for one in (path, *path.rglob("*")):
        with suppress(OSError):  # gone meanwhile
            facts = one.lstat()
            size_bytes += facts.st_blocks * 512
            used_s = max(used_s, facts.st_mtime)
    return size_bytes, used_s


def _delete(path: Path) -> bool:
    """Whether it is gone; not while somebody holds it."""
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
