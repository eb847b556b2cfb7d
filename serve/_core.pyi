"""Compiled part of gnnserve; use it through serve.native."""

import serve._twin


def stage_indices(src: serve._twin.BytesLike, is_int32: bool, bound: int, dst: serve._twin.BytesLike) -> int: ...

def stage_features(src: serve._twin.BytesLike, dst: serve._twin.BytesLike, check_finite: bool) -> int: ...

class OffsetAllocator:
    """
    Hands out ranges of a region it never touches, such as a shared memory file.

    Best fit: the smallest free range that holds the request, the lowest of equal ones;
    freed ranges merge with their neighbours at once. Not thread-safe.
    """

    def __init__(self, capacity_bytes: int, alignment: int) -> None:
        """
        `alignment` is a power of two; the capacity is rounded down to a multiple of it.
        """

    def alloc(self, size: int) -> int:
        """
        Offset of a range of at least `size` bytes, or -1 when no free range is that long.

        An empty range takes one alignment unit, so that offsets are unique.
        Raises ValueError for a negative size.
        """

    def free(self, offset: int) -> None:
        """
        Give a range back; raises ValueError when none is handed out at `offset`.
        """

    @property
    def capacity_bytes(self) -> int:
        """What it manages."""

    @property
    def used_bytes(self) -> int:
        """Handed out now, each range rounded up to the alignment."""

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that would succeed now."""
