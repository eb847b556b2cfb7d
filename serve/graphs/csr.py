"""Rows of different lengths in two arrays (CSR), for topology and its patches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Row r is `values[starts[r]:starts[r + 1]]`."""

    #: [R + 1], ascending from 0 to the number of values.
    starts: Ids
    #: int32 or int64.
    values: NDArray[np.signedinteger[Any]]

    @property
    def lengths(self) -> Ids:
        """Number of values in each row, [R]."""
        return np.diff(self.starts)

    @property
    def nbytes(self) -> int:
        """Memory of both arrays."""
        return self.starts.nbytes + self.values.nbytes

    def take(self, rows: Ids) -> "Rows":
        """Return the given rows, in that order."""
        begins = self.starts[rows]
        lengths = self.starts[rows + 1] - begins
        starts = offsets(lengths)
        places = np.repeat(begins - starts[:-1], lengths) + np.arange(starts[-1])
        return Rows(starts, self.values[places])

    def row_numbers(self) -> Ids:
        """Return the row of each value."""
        return np.repeat(np.arange(self.starts.size - 1), self.lengths)


NO_ROWS = Rows(np.zeros(1, np.int64), np.empty(0, np.int64))


def offsets(lengths: Ids) -> Ids:
    """Return the starts of rows of these lengths and the end of the last, [R + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def grouped(rows: Ids, values: Ids, count: int) -> Rows:
    """Group values by their rows, which are below `count`; the order within a row is kept."""
    order = np.argsort(rows, kind="stable")
    return Rows(offsets(np.bincount(rows, minlength=count)), values[order])


def joined(parts: Sequence[Rows]) -> Rows:
    """Concatenate the rows of all parts."""
    lengths = np.concatenate([part.lengths for part in parts])
    return Rows(offsets(lengths), np.concatenate([part.values for part in parts]))
