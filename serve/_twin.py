"""What ``serve._core`` does, in numpy: the fallback where it was not built, and its test oracle.

Written to be plainly right, not fast. Reached only through ``serve.native``.
"""

from typing import Any

import numpy as np

BytesLike = bytes | bytearray | memoryview | np.ndarray[Any, np.dtype[Any]]


def stage_indices(src: BytesLike, is_int32: bool, bound: int, dst: BytesLike) -> int:
    """See ``serve.native.stage_indices``."""
    if bound < 0:
        raise ValueError("bound must be at least 0")
    source, target = _flat(src, "i4" if is_int32 else "i8"), _flat(dst, "i8")
    _require_sizes(source.size == target.size, "stage_indices", source, target)
    target[:] = source
    return _first((target < 0) | (target >= bound))


def stage_features(src: BytesLike, dst: BytesLike, check_finite: bool) -> int:
    """See ``serve.native.stage_features``."""
    source, target = _flat(src, "f4"), _flat(dst, "f4")
    _require_sizes(source.size == target.size, "stage_features", source, target)
    # As integers, so that a signalling NaN is copied bit by bit.
    target.view("i4")[:] = source.view("i4")
    return _first(~np.isfinite(target)) if check_finite else -1


class OffsetAllocator:
    """See ``serve.native.OffsetAllocator``."""

    def __init__(self, capacity_bytes: int, alignment: int) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment must be a power of two, got {alignment}")
        if capacity_bytes < alignment:
            raise ValueError(
                f"capacity {capacity_bytes} is below one alignment unit of {alignment}"
            )
        self._alignment = alignment
        self.capacity_bytes = capacity_bytes - capacity_bytes % alignment
        self.used_bytes = 0
        self._taken: dict[int, int] = {}
        self._free: dict[int, int] = {0: self.capacity_bytes}

    def alloc(self, size: int) -> int:
        """Offset of a range, or -1."""
        if size < 0:
            raise ValueError(f"size must be at least 0, got {size}")
        rounded = max(1, -(-size // self._alignment)) * self._alignment
        fits = [(free, offset) for offset, free in self._free.items() if free >= rounded]
        if not fits:
            return -1
        free, offset = min(fits)
        del self._free[offset]
        if free > rounded:
            self._free[offset + rounded] = free - rounded
        self._taken[offset] = rounded
        self.used_bytes += rounded
        return offset

    def free(self, offset: int) -> None:
        """Give a range back."""
        if offset not in self._taken:
            raise ValueError(f"no range is handed out at offset {offset}")
        size = self._taken.pop(offset)
        self.used_bytes -= size
        size += self._free.pop(offset + size, 0)
        for before, free in self._free.items():
            if before + free == offset:
                self._free[before] += size
                return
        self._free[offset] = size

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that would succeed now."""
        return max(self._free.values(), default=0)


def _flat(buffer: Any, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("the buffer is not C-contiguous")
    if view.nbytes == 0:
        return np.empty(0, dtype)
    return np.frombuffer(view, dtype=np.uint8).view(dtype)


def _require_sizes(right: bool, what: str, source: Any, target: Any) -> None:
    if not right:
        raise ValueError(f"{what}: source has {source.nbytes} bytes, target {target.nbytes}")


def _first(bad: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    position = int(bad.argmax()) if bad.size else 0
    return position if bad.size and bad[position] else -1
