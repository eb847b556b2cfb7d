"""Which rows of a graph's features are kept beside the lanes of a device, and how often they serve.

A lane that gathers features over the bus takes the hot rows from a copy in the device's memory. A
table is never changed: newer features of a node lie in the version's patch, which goes over
whatever was gathered, so the copy of a table is right as long as the table is used. Rows are
chosen by degree at first, as in PaGraph (Lin et al. 2020), then by what requests ask for.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serve.graphs.features import MemoryFile, memory_file
from serve.graphs.rows import Ids
from serve.graphs.snapshot import Snapshot

#: The arena takes static memory in multiples of this; blocks start at multiples of the other.
_SEGMENT_BYTES, _BLOCK_BYTES = 2 << 20, 512
#: Of a device's budget, for the hot rows of all graphs that do not say how much.
_SHARE = 1 / 8
#: One request in so many is counted.
_COUNTED_EVERY = 8
#: Rows are chosen again after as many counted ones as are hot, and at least so many; and others
#: take their place when, of the next as many, they would have served so much more.
_LEAST_COUNTED = 1 << 16
_GAIN = 0.02
#: Edges looked at at once.
_PART_EDGES = 1 << 22


def slots_bytes(num_rows: int) -> int:
    """What finding the hot rows of a table takes beside them: int32 for each row of it."""
    return -(-4 * num_rows // _BLOCK_BYTES) * _BLOCK_BYTES


def most_rows(memory_bytes: int, num_rows: int, row_bytes: int) -> int:
    """How many of a table's rows can be hot in so much memory."""
    return max(0, min(num_rows, (memory_bytes - slots_bytes(num_rows)) // max(1, row_bytes)))


def share_memory(
    tables: Sequence[tuple[int, int]], wanted: Sequence[int | None], budget_bytes: int
) -> list[int]:
    """Bytes for the hot rows of each table, given as (rows, bytes of a row).

    `wanted`: at most so much, 0 for nothing; None: a part of 1/8 of the budget, by size. None gets
    more than all of its rows need.
    """
    whole = [slots_bytes(rows) + rows * row_bytes for rows, row_bytes in tables]
    open_bytes = sum(size for size, asked in zip(whole, wanted, strict=True) if asked is None)
    fit = min(1.0, budget_bytes * _SHARE / max(1, open_bytes))
    found = []
    for (rows, row_bytes), size, asked in zip(tables, whole, wanted, strict=True):
        limit = int(fit * size) if asked is None else min(asked, size)
        found.append(_segments(limit) if most_rows(limit, rows, row_bytes) else 0)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Rows of one table that are to be hot."""

    #: The table's number; none has a number twice, nor has a choice.
    table: int
    #: Their numbers, int64 [H] ascending, in a file for the device's process.
    file: MemoryFile
    count: int
    #: By row of the table.
    inside: NDArray[np.bool_]


class HotSet:
    """The hot rows of one graph, as chosen; used by any thread."""

    def __init__(self, memory_bytes: int) -> None:
        #: On each device, for as long as the server runs.
        self.memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._requests = itertools.count()
        self._choice: Choice | None = None
        #: Perhaps better, which the next requests tell.
        self._candidate: NDArray[np.bool_] | None = None
        self._held: int | None = None
        self._prior: NDArray[np.float32] = np.empty(0, np.float32)
        self._asked: NDArray[np.uint32] = np.empty(0, np.uint32)
        #: Counted since rows were last chosen: all, those hot, those that the candidate has.
        self._since = self._hits = self._candidate_hits = 0
        #: Since the start: rows gathered by counted requests, and those a device had.
        self._gathered = self._served = 0

    @property
    def gathered(self) -> tuple[int, int]:
        """Rows gathered by every eighth request since the start, and those a device had."""
        return self._gathered, self._served

    def choice(self, snapshot: Snapshot) -> Choice | None:
        """For the version's table, chosen now if none was; None when not a row fits."""
        with self._lock:
            file = memory_file(snapshot.x)
            assert file is not None
            if self._choice is None or self._choice.table != file.number:
                self._meet(snapshot)
                self._choice = self._choose(snapshot, file.number, self._best(snapshot))
            return self._choice if self._choice.count else None

    def held(self, number: int | None) -> None:
        """A device has the rows of the choice with that file's number; None: it cannot."""
        self._held = number

    def count(self, table: int, ids: Ids) -> None:
        """A request gathers these rows, each once, of the table of that number."""
        # No request waits for rows to be chosen.
        if next(self._requests) % _COUNTED_EVERY or not self._lock.acquire(blocking=False):
            return
        try:
            choice = self._choice
            if choice is None or choice.table != table:
                return
            hits = int(np.count_nonzero(choice.inside[ids]))
            self._gathered += ids.size
            self._served += hits if self._held == choice.file.number else 0
            if choice.count == choice.inside.size:
                return
            self._asked[ids] += 1
            self._since += ids.size
            self._hits += hits
            if self._candidate is not None:
                self._candidate_hits += int(np.count_nonzero(self._candidate[ids]))
        finally:
            self._lock.release()

    def reconsider(self, snapshot: Snapshot) -> bool:
        """Choose again if that is due; True when other rows are hot now.

        What is asked for most makes a candidate, and the candidate has to prove itself by what is
        asked for next: by what it was chosen by, any would look better than it is.
        """
        choice = self._choice
        if choice is None or self._since < max(_LEAST_COUNTED, choice.count):
            return False
        with self._lock:
            file = memory_file(snapshot.x)
            if file is None or choice is not self._choice or choice.table != file.number:
                return False
            candidate = self._candidate
            better = self._candidate_hits - self._hits > _GAIN * self._since
            if candidate is not None and better:
                self._choice = self._choose(snapshot, file.number, np.flatnonzero(candidate))
                self._candidate = None
                return True
            self._candidate = np.zeros(len(snapshot.x), bool)
            self._candidate[self._best(snapshot)] = True
            # What was asked for long ago counts less and less.
            self._asked >>= 1
            self._since = self._hits = self._candidate_hits = 0
            return False

    def _meet(self, snapshot: Snapshot) -> None:
        """Another table: degrees may be others, and nodes were added."""
        rows = len(snapshot.x)
        values = snapshot.base.values
        degree = np.ones(rows, np.int64)
        for start in range(0, values.size, _PART_EDGES):
            part = np.bincount(values[start : start + _PART_EDGES], minlength=rows)
            degree += part[:rows]
        # As many rows were asked for, in proportion to their degrees, as there are.
        self._prior = (degree / degree.mean()).astype(np.float32)
        self._asked = np.pad(self._asked, (0, rows - self._asked.size))
        self._candidate = None

    def _best(self, snapshot: Snapshot) -> Ids:
        """The rows asked for most, ascending."""
        rows, row_bytes = len(snapshot.x), snapshot.num_features * snapshot.x.itemsize
        count = most_rows(self.memory_bytes, rows, row_bytes)
        if count in (0, rows):
            return np.arange(count)
        score = self._prior + self._asked
        return np.sort(np.argpartition(score, rows - count)[rows - count :])

    def _choose(self, snapshot: Snapshot, table: int, ids: Ids) -> Choice:
        file = MemoryFile.of(8 * ids.size)
        np.ndarray(ids.shape, np.int64, file)[:] = ids
        inside = np.zeros(len(snapshot.x), bool)
        inside[ids] = True
        self._since = self._hits = self._candidate_hits = 0
        return Choice(table, file, ids.size, inside)


def _segments(size_bytes: int) -> int:
    return -(-size_bytes // _SEGMENT_BYTES) * _SEGMENT_BYTES
