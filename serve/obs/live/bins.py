"""Counts of values in bins that grow geometrically, as pieces of bytes.

Two pieces joined are a piece of the values of both, so buckets of time add up by joining.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

#: Ratio of a bin's two edges: quantiles are within 2 % of the value at the rank.
_GROWTH = 1.04
_PER_LOG = 1.0 / math.log(_GROWTH)
#: Bin of the value 1; bin 0 holds values that are not positive, and bin 1 all below 1e-6.
_ONE = 353
_BINS = 900
_PAIR = np.dtype([("bin", "<u2"), ("count", "<u4")])


def bin_of(value: float) -> int:
    """Return the bin of a value."""
    if value <= 0:
        return 0
    return min(max(math.floor(math.log(value) * _PER_LOG) + _ONE, 1), _BINS - 1)


def packed(counts: Mapping[int, int]) -> bytes:
    """Return counts by bin as bytes."""
    return np.array(sorted(counts.items()), dtype=_PAIR).tobytes()


def counted(piece: bytes) -> NDArray[np.int64]:
    """Return the count of each bin of one piece, or of several joined."""
    pairs = np.frombuffer(piece, dtype=_PAIR)
    return np.bincount(pairs["bin"], pairs["count"], minlength=_BINS).astype(np.int64)


def shortened(piece: bytes) -> bytes:
    """Return a joined piece with each bin once."""
    counts = counted(piece)
    bins = np.flatnonzero(counts)
    pairs = np.empty(len(bins), dtype=_PAIR)
    pairs["bin"], pairs["count"] = bins, counts[bins]
    return pairs.tobytes()


def quantiles(counts: NDArray[np.int64], shares: tuple[float, ...]) -> list[float | None]:
    """Return the quantile at each of `shares`; None where nothing was counted."""
    upto = np.cumsum(counts)
    total = int(upto[-1])
    if not total:
        return [None] * len(shares)
    ranks = [math.ceil(share * total) if share else 1 for share in shares]
    return [_middle(int(np.searchsorted(upto, rank))) for rank in ranks]


def _middle(position: int) -> float:
    """Return the geometric middle of a bin's edges."""
    return _GROWTH ** (position - _ONE + 0.5) if position else 0.0
