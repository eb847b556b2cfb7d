"""Rows of different lengths in two arrays (CSR), as topology and changes to it are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Row r is `values[starts[r]:starts[r + 1]]`."""

    #: [R + 1], from 0 to the number of values.
    starts: Ids
    #: int32 or int64.
    values: NDArray[np.signedinteger[Any]]

    @property
    def lengths(self) -> Ids:
        """[R]."""
        return np.diff(self.starts)

    @property
    def nbytes(self) -> int:
        """Memory of both arrays."""
        return self.starts.nbytes + self.values.nbytes

    def take(self, rows: Ids) -> "Rows":
        """The rows asked for, in that order."""
        begins = self.starts[rows]
        lengths = self.starts[rows + 1] - begins
        starts = offsets(lengths)
        places = np.repeat(begins - starts[:-1], lengths) + np.arange(starts[-1])
        return Rows(starts, self.values[places])

    def row_numbers(self) -> Ids:
        """For each value, its row."""
        return np.repeat(np.arange(self.starts.size - 1), self.lengths)


NO_ROWS = Rows(np.zeros(1, np.int64), np.empty(0, np.int64))


def offsets(lengths: Ids) -> Ids:
    """[R + 1]: where rows of these lengths start, and where the last ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def grouped(rows: Ids, values: Ids, count: int) -> Rows:
    """Values by row, in their order within it; `rows` are numbers below `count`."""
    order = np.argsort(rows, kind="stable")
    return Rows(offsets(np.bincount(rows, minlength=count)), values[order])


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts one after the other."""
    lengths = np.concatenate([part.lengths for part in parts])
    return Rows(offsets(lengths), np.concatenate([part.values for part in parts]))
