"""A few rows that stand for many."""

import numpy as np

from serve.obs.frame import Column

#: Most points that a picture shows.
MAX_POINTS = 2500
_EXTREME = MAX_POINTS // 5
_EVEN = MAX_POINTS - _EXTREME


class Thinning:
    """Keeps the rows with the largest values, and rows at even distances among all."""

    def __init__(self) -> None:
        self._seen = 0
        self._stride = 1
        self._even = np.zeros(0, np.int64)
        self._largest = (np.zeros(0), np.zeros(0, np.int64))

    def add(self, values: Column, row_ids: Column) -> None:
        """Add rows, of any number."""
        offset = -self._seen % self._stride
        self._seen += len(row_ids)
        self._even = np.concatenate([self._even, row_ids[offset :: self._stride]])
        while len(self._even) > 2 * MAX_POINTS:
            self._even = self._even[::2]
            self._stride *= 2
        self._largest = with_largest(self._largest, values, row_ids, _EXTREME)

    def chosen(self) -> Column:
        """Return the ids of at most MAX_POINTS rows; of all, where there are no more."""
        if self._seen <= MAX_POINTS:
            return self._even
        at = np.linspace(0, len(self._even) - 1, _EVEN).astype(np.int64)
        return np.union1d(self._even[at], self._largest[1])


def with_largest(
    largest: tuple[Column, Column], values: Column, row_ids: Column, most: int
) -> tuple[Column, Column]:
    """Return the `most` largest values, the first of equal ones, with their rows, in order.

    `largest` are those of earlier rows.
    """
    if len(largest[0]) == most:
        # Few of many values are larger, and only these need to be sorted.
        larger = np.flatnonzero(values > largest[0][-1])
        values, row_ids = values[larger], row_ids[larger]
    values = np.concatenate([largest[0], values])
    row_ids = np.concatenate([largest[1], row_ids])
    order = np.argsort(-values, kind="stable")[:most]
    return values[order], row_ids[order]
