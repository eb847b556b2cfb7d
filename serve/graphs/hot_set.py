"""The hot set of a graph: the feature rows that a device keeps a copy of, and its hit rate.

A lane that gathers features over the bus reads the rows of the hot set from the device's memory. A
table never changes: newer features of a node lie in the version's patch, which is written over
what was gathered, so a copy stays valid as long as its table is used. Rows are chosen by degree at
first, as in PaGraph (Lin et al. 2020), then by how often requests ask for them.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serve.graphs.csr import Ids
from serve.graphs.features import MemoryFile, memory_file
from serve.graphs.snapshot import Snapshot

#: Granularity of static memory in the arena, and alignment of a block in it.
_SEGMENT_BYTES, _BLOCK_BYTES = 2 << 20, 512
#: Share of a device's budget for the hot sets of all graphs without a configured size.
_SHARE = 1 / 8
#: One request in 8 is counted.
_COUNTED_EVERY = 8
#: The hot set is reconsidered once the counted rows are as many as it holds, and at least this
#: many. A candidate replaces it when its hit rate over the next such interval is higher by `_GAIN`.
_LEAST_COUNTED = 1 << 16
_GAIN = 0.02
#: Edges whose degrees are counted at once, which bounds temporary memory.
_PART_EDGES = 1 << 22


def slots_bytes(num_rows: int) -> int:
    """Return the size of the index from a table's rows to their copies: int32 per row."""
    return -(-4 * num_rows // _BLOCK_BYTES) * _BLOCK_BYTES


def most_rows(memory_bytes: int, num_rows: int, row_bytes: int) -> int:
    """Return how many of a table's rows, with their index, fit in `memory_bytes`."""
    return max(0, min(num_rows, (memory_bytes - slots_bytes(num_rows)) // max(1, row_bytes)))


def share_memory(
    tables: Sequence[tuple[int, int]], wanted_bytes: Sequence[int | None], budget_bytes: int
) -> list[int]:
    """Return the bytes for the hot set of each table, given as (rows, bytes of a row).

    `wanted_bytes` holds an upper bound per table, 0 for no hot set. Tables with None share 1/8 of
    the budget in proportion to their sizes. No table gets more than all of its rows need.
    """
    whole = [slots_bytes(rows) + rows * row_bytes for rows, row_bytes in tables]
    open_bytes = sum(size for size, asked in zip(whole, wanted_bytes, strict=True) if asked is None)
    fit = min(1.0, budget_bytes * _SHARE / max(1, open_bytes))
    found = []
    for (rows, row_bytes), size, asked in zip(tables, whole, wanted_bytes, strict=True):
        limit = int(fit * size) if asked is None else min(asked, size)
        found.append(_segments(limit) if most_rows(limit, rows, row_bytes) else 0)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class HotSetRows:
    """The rows of one table that were chosen for the hot set."""

    #: Number of the table's memory file; no two tables share one.
    table: int
    #: Row numbers, int64 [H] ascending, in a file that the device's process maps. Its number is
    #: unique too, so it identifies this choice of rows.
    file: MemoryFile
    #: H.
    count: int
    #: bool [rows of the table]: True for a row of the hot set.
    inside: NDArray[np.bool_]


class HotSet:
    """Chooses the hot set of one graph and counts its hits. Any thread."""

    def __init__(self, memory_bytes: int) -> None:
        #: Memory for it on each device, constant while the server runs.
        self.memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._requests = itertools.count()
        self._rows: HotSetRows | None = None
        #: bool by row: a candidate that is on trial.
        self._candidate: NDArray[np.bool_] | None = None
        self._held: int | None = None
        #: By row: its in-degree ÷ the mean, and how often requests asked for it, decaying.
        self._prior: NDArray[np.float32] = np.empty(0, np.float32)
        self._asked: NDArray[np.uint32] = np.empty(0, np.uint32)
        #: Rows counted since the last choice or candidate: all, hits, hits of the candidate.
        self._since = self._hits = self._candidate_hits = 0
        #: Since the start: rows gathered by counted requests, and how many a device held.
        self._gathered = self._served = 0

    @property
    def gathered(self) -> tuple[int, int]:
        """Rows gathered by one request in 8 since the start, and how many a device held."""
        return self._gathered, self._served

    def rows(self, snapshot: Snapshot) -> HotSetRows | None:
        """Return the hot set for the version's table, choosing it if the table is new.

        Returns None when not a single row fits.
        """
        with self._lock:
            file = memory_file(snapshot.x)
            assert file is not None
            if self._rows is None or self._rows.table != file.number:
                self._meet(snapshot)
                self._rows = self._choose(snapshot, file.number, self._best(snapshot))
            return self._rows if self._rows.count else None

    def held(self, number: int | None) -> None:
        """Take note that a device holds the rows of that file; None when it cannot."""
        self._held = number

    def count(self, table: int, ids: Ids) -> None:
        """Count the rows that a request gathers, each once, from the table of that number."""
        # No request waits for rows to be chosen.
        if next(self._requests) % _COUNTED_EVERY or not self._lock.acquire(blocking=False):
            return
        try:
            rows = self._rows
            if rows is None or rows.table != table:
                return
            hits = int(np.count_nonzero(rows.inside[ids]))
            self._gathered += ids.size
            self._served += hits if self._held == rows.file.number else 0
            if rows.count == rows.inside.size:
                return  # all rows are hot: nothing to choose
            self._asked[ids] += 1
            self._since += ids.size
            self._hits += hits
            if self._candidate is not None:
                self._candidate_hits += int(np.count_nonzero(self._candidate[ids]))
        finally:
            self._lock.release()

    def reconsider(self, snapshot: Snapshot) -> bool:
        """Choose again if that is due; return True when the hot set has other rows now.

        The rows asked for most become a candidate, which is judged on the requests that follow: on
        the requests it was chosen by, any candidate would look better than it is.
        """
        rows = self._rows
        if rows is None or self._since < max(_LEAST_COUNTED, rows.count):
            return False
        with self._lock:
            file = memory_file(snapshot.x)
            if file is None or rows is not self._rows or rows.table != file.number:
                return False
            candidate = self._candidate
            better = self._candidate_hits - self._hits > _GAIN * self._since
            if candidate is not None and better:
                self._rows = self._choose(snapshot, file.number, np.flatnonzero(candidate))
                self._candidate = None
                return True
            self._candidate = np.zeros(len(snapshot.x), bool)
            self._candidate[self._best(snapshot)] = True
            # Old counts decay, so that the hot set follows what is popular now.
            self._asked >>= 1
            self._since = self._hits = self._candidate_hits = 0
            return False

    def _meet(self, snapshot: Snapshot) -> None:
        """Start with a new table, which has other degrees and perhaps more nodes."""
        rows = len(snapshot.x)
        values = snapshot.base.values
        degree = np.ones(rows, np.int64)
        for start in range(0, values.size, _PART_EDGES):
            part = np.bincount(values[start : start + _PART_EDGES], minlength=rows)
            degree += part[:rows]
        # The prior weighs as much as one request for every row, distributed by degree.
        self._prior = (degree / degree.mean()).astype(np.float32)
        self._asked = np.pad(self._asked, (0, rows - self._asked.size))
        self._candidate = None

    def _best(self, snapshot: Snapshot) -> Ids:
        """Return the rows with the highest score that fit, ascending."""
        rows, row_bytes = len(snapshot.x), snapshot.num_features * snapshot.x.itemsize
        count = most_rows(self.memory_bytes, rows, row_bytes)
        if count in (0, rows):
            return np.arange(count)
        score = self._prior + self._asked
        return np.sort(np.argpartition(score, rows - count)[rows - count :])

    def _choose(self, snapshot: Snapshot, table: int, ids: Ids) -> HotSetRows:
        file = MemoryFile.of(8 * ids.size)
        np.ndarray(ids.shape, np.int64, file)[:] = ids
        inside = np.zeros(len(snapshot.x), bool)
        inside[ids] = True
        self._since = self._hits = self._candidate_hits = 0
        return HotSetRows(table, file, ids.size, inside)


def _segments(size_bytes: int) -> int:
    """Return the size rounded up to whole segments of the arena."""
    return -(-size_bytes // _SEGMENT_BYTES) * _SEGMENT_BYTES
