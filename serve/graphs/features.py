"""Storage of a resident graph's features: in memory or in a file, in the smallest exact dtype.

Features whose values are all whole numbers from 0 to 255, such as bags of words, take a byte each;
others take float32 (or float16, if configured). Features too large for memory stay in a mapped
file, which is read on demand.
"""

import errno
import itertools
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.errors import ConfigError

#: Bytes that are checked or written at once, which bounds temporary memory.
_PART_BYTES = 16 << 20
_KINDS = ("float32", "float16", "uint8")


_numbers = itertools.count(1)


class MemoryFile(mmap.mmap):
    """Memory that other processes can map: an unnamed file, freed with its last mapping."""

    #: Unique in this process.
    number: int
    fd: int

    @classmethod
    def of(cls, size_bytes: int) -> "MemoryFile":
        """Make a file of `size_bytes` zero bytes."""
        number = next(_numbers)
        fd = os.memfd_create(_name(number), os.MFD_CLOEXEC)
        os.ftruncate(fd, max(1, size_bytes))
        found = cls(fd, max(1, size_bytes))
        found.fd, found.number = fd, number
        weakref.finalize(found, os.close, fd)
        return found

    @property
    def path(self) -> str:
        """Path under which processes of the same user can open it while this one holds it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"


def open_memory_file(path: str, number: int) -> int:
    """Open another process's file by path and number; return a descriptor.

    Raises FileNotFoundError once the file is closed there, also when another file has its path: the
    path contains a descriptor's number, and these are reused.
    """
    fd = os.open(path, os.O_RDWR)
    if Path(f"/proc/self/fd/{fd}").readlink().name != f"memfd:{_name(number)} (deleted)":
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return fd


def _name(number: int) -> str:
    return f"gnnserve-{number}"


def memory_file(x: NDArray[Any]) -> MemoryFile | None:
    """Return the memory file that holds exactly these features; None when there is none."""
    return x.base if isinstance(x.base, MemoryFile) else None


class FeatureKeeper:
    """Stores one graph's features [N, F] and rewrites them."""

    def __init__(self, *, dtype: str, folder: Path, shared: bool = False) -> None:
        """Store features as `dtype`, float32 or float16, unless bytes are exact.

        Mapped features that need a new file get one in `folder`. With `shared`, features in memory
        lie in a ``MemoryFile``.
        """
        self._dtype, self._folder, self._shared = dtype, folder, shared

    def kept(self, x: NDArray[Any], where: str, name: str = "x") -> NDArray[Any]:
        """Return `x` [N, F], of any real dtype, as it is to be stored; mapped if `x` is.

        Raises ConfigError, which starts with `where` and names the array, for a wrong shape and for
        values that are not finite, or would not be as they are stored.
        """
        if x.ndim != 2 or x.shape[1] < 1 or x.dtype.kind not in "fiub":
            raise ConfigError(
                f"{where}: array '{name}': numbers [N, F] wanted, got {x.dtype} {list(x.shape)}"
            )
        whole = True
        for start, part in _parts(x):
            if x.dtype.kind == "f" and not np.isfinite(part).all():
                row, column = np.argwhere(~np.isfinite(part))[0].tolist()
                raise ConfigError(
                    f"{where}: array '{name}' [{start + row}, {column}] is {part[row, column]}; "
                    "features must be finite"
                )
            whole = whole and _is_bytes(part)
        mapped = isinstance(x, np.memmap)
        if mapped and x.dtype.name in _KINDS and x.dtype.isnative and x.flags.c_contiguous:
            return x
        kept = self._empty(x.shape, "uint8" if whole else self._dtype, mapped)
        for start, part in _parts(x):
            stored = kept[start : start + len(part)]
            with np.errstate(over="ignore"):
                stored[...] = part
            if x.dtype != kept.dtype and not np.isfinite(stored).all():
                row, column = np.argwhere(~np.isfinite(stored))[0].tolist()
                raise ConfigError(
                    f"{where}: array '{name}' [{start + row}, {column}] is {part[row, column]}; "
                    f"the largest number of {kept.dtype}, as features are stored, is "
                    f"{np.finfo(kept.dtype).max:g}"
                )
        return kept

    def rewritten(
        self, x: NDArray[Any], num_nodes: int, ids: NDArray[np.int64], rows: NDArray[Any]
    ) -> NDArray[Any]:
        """Return a copy of `x`, extended to [num_nodes, ...], with `rows` at the positions `ids`.

        It has the dtype of `x`, or where bytes do not hold `rows`, that of other features, or where
        that does not either, float32.
        """
        dtype = x.dtype.name
        if dtype == "uint8" and rows.dtype != np.uint8 and not _is_bytes(rows):
            dtype = self._dtype
        if dtype == "float16" and np.abs(rows).max(initial=0) > np.finfo(np.float16).max:
            dtype = "float32"
        found = self._empty((num_nodes, *x.shape[1:]), dtype, isinstance(x, np.memmap))
        for start, part in _parts(x):
            found[start : start + len(part)] = part
        found[ids] = rows
        return found

    def _empty(self, shape: tuple[int, ...], dtype: str, mapped: bool) -> NDArray[Any]:
        if not mapped and self._shared:
            file = MemoryFile.of(math.prod(shape) * np.dtype(dtype).itemsize)
            return np.ndarray(shape, dtype, file)
        if not mapped:
            return np.empty(shape, dtype)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder) as on_disk:
            # It has no name, and is freed with its last mapping.
            return np.memmap(on_disk, dtype, "w+", shape=shape)


def _parts(x: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    rows = max(1, _PART_BYTES // max(1, math.prod(x.shape[1:]) * x.dtype.itemsize))
    for start in range(0, len(x), rows):
        yield start, np.asarray(x[start : start + rows])


def _is_bytes(part: NDArray[Any]) -> bool:
    """Return True when every value is a whole number from 0 to 255."""
    return bool(((part >= 0) & (part <= 255)).all()) and bool((part == np.floor(part)).all())
