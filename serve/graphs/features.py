"""How the features of a resident graph are kept: in memory or in a file, as small as is exact.

Features whose values all are whole numbers of 0 to 255, such as bags of words, take a byte each;
others keep float32 (or float16, where the configuration allows that). What is larger than
memory allows stays in a file that is mapped and read as it is needed.
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

#: Rows looked at or written at once: some megabytes.
_PART_BYTES = 16 << 20
_KINDS = ("float32", "float16", "uint8")


_numbers = itertools.count(1)


class MemoryFile(mmap.mmap):
    """Memory that other processes can map, by a file without a name; gone with its last reader."""

    #: No other has it, in this process.
    number: int
    fd: int

    @classmethod
    def of(cls, size_bytes: int) -> "MemoryFile":
        """So many bytes, 0 at first."""
        number = next(_numbers)
        fd = os.memfd_create(_name(number), os.MFD_CLOEXEC)
        os.ftruncate(fd, max(1, size_bytes))
        found = cls(fd, max(1, size_bytes))
        found.fd, found.number = fd, number
        weakref.finalize(found, os.close, fd)
        return found

    @property
    def path(self) -> str:
        """Where other processes of the same user find it as long as this one has it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"


def open_memory_file(path: str, number: int) -> int:
    """A descriptor of another process's file; FileNotFoundError once it is gone there.

    Also when another has taken its place: a path is the number of a descriptor, and those are used
    again.
    """
    fd = os.open(path, os.O_RDWR)
    if Path(f"/proc/self/fd/{fd}").readlink().name != f"memfd:{_name(number)} (deleted)":
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return fd


def _name(number: int) -> str:
    return f"gnnserve-{number}"


def memory_file(x: NDArray[Any]) -> MemoryFile | None:
    """The file that kept features lie in, all of them and nothing else, if it is in memory."""
    return x.base if isinstance(x.base, MemoryFile) else None


class FeatureKeeper:
    """Keeps one graph's features [N, F], and makes other ones of them."""

    def __init__(self, *, dtype: str, folder: Path, shared: bool = False) -> None:
        """`dtype`, float32 or float16, is for what is no small whole number.

        Files that mapped features need anew are made in `folder`. With `shared`, those in memory
        lie in a ``MemoryFile`` each.
        """
        self._dtype, self._folder, self._shared = dtype, folder, shared

    def kept(self, x: NDArray[Any], where: str) -> NDArray[Any]:
        """`x` [N, F] of any real dtype as it is kept; mapped if it is mapped.

        Raises ConfigError that starts with `where` for a shape or a value that cannot be.
        """
        if x.ndim != 2 or x.shape[1] < 1 or x.dtype.kind not in "fiub":
            raise ConfigError(
                f"{where}: array 'x': numbers [N, F] wanted, got {x.dtype} {list(x.shape)}"
            )
        whole = True
        for start, part in _parts(x):
            if x.dtype.kind == "f" and not np.isfinite(part).all():
                row, column = np.argwhere(~np.isfinite(part))[0].tolist()
                raise ConfigError(
                    f"{where}: array 'x' [{start + row}, {column}] is {part[row, column]}; "
                    "features must be finite"
                )
            whole = whole and _is_bytes(part)
        mapped = isinstance(x, np.memmap)
        if mapped and x.dtype.name in _KINDS and x.flags.c_contiguous:
            return x
        kept = self._empty(x.shape, "uint8" if whole else self._dtype, mapped)
        for start, part in _parts(x):
            kept[start : start + len(part)] = part
        return kept

    def rewritten(
        self, x: NDArray[Any], num_nodes: int, ids: NDArray[np.int64], rows: NDArray[np.float32]
    ) -> NDArray[Any]:
        """Features [num_nodes, F] like `x` with `rows` in the places `ids`; `x` stays as it is."""
        dtype = x.dtype.name
        if dtype == "uint8" and not _is_bytes(rows):
            dtype = self._dtype
        found = self._empty((num_nodes, x.shape[1]), dtype, isinstance(x, np.memmap))
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
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder) as on_disk:
            # It has no name, and is gone with its last reader.
            return np.memmap(on_disk, dtype, "w+", shape=shape)


def _parts(x: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    rows = max(1, _PART_BYTES // max(1, x.shape[1] * x.dtype.itemsize))
    for start in range(0, len(x), rows):
        yield start, np.asarray(x[start : start + rows])


def _is_bytes(part: NDArray[Any]) -> bool:
    """Whether every value is a whole number of 0 to 255."""
    return bool(((part >= 0) & (part <= 255)).all()) and bool((part == np.floor(part)).all())
