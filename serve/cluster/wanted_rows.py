"""Rows that a request needs of other servers: what it asks them for, and what it takes of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from serve import native
from serve.cluster.row_wire import DTYPES, ID_DTYPES, MOST_ID_BYTES, PIECE_BYTES, RowsAsked
from serve.graphs.csr import NO_ROWS, Ids, Rows, joined, offsets
from serve.graphs.edges import NO_IDS
from serve.graphs.partition import Parts
from serve.graphs.shared_column import RowsOf

_VALUE_BYTES = 4


@dataclass(slots=True)
class Piece:
    """The rows of one part that are asked for at once, and those after them."""

    #: Positions among the nodes that are wanted.
    at: Ids
    #: Where those of this message begin and end in `at`.
    begin: int
    end: int
    #: Of the message that is on its way; 0 while it waits for a connection.
    number: int = 0
    #: When it may be asked for again, and what the store said.
    again_ns: int = 0
    told: str = ""

    @property
    def now(self) -> Ids:
        """Positions of those of this message."""
        return self.at[self.begin : self.end]


class WantedRows(ABC):
    """Rows of nodes, by part."""

    def __init__(self, of_rows: RowsOf, nodes: Ids, parts: Parts, row_bytes: int) -> None:
        """Want those of `nodes` [K], which are of `parts` [K] and take about `row_bytes` each."""
        self.of_rows = of_rows
        self.nodes = nodes
        self._at_once = max(1, min(PIECE_BYTES // row_bytes, MOST_ID_BYTES // 8))
        order = np.argsort(parts, kind="stable")
        numbers, begins = np.unique(parts[order], return_index=True)
        #: What is asked for now, by part; a part that is here has none.
        self.pieces = {
            int(part): Piece(at, 0, min(self._at_once, at.size))
            for part, at in zip(numbers, np.split(order, begins[1:]), strict=True)
        }

    def message(self, number: int, part: int) -> list[bytes]:
        """Return the message that asks for the rows of a part that are next."""
        ids = self.nodes[self.pieces[part].now]
        return [msgspec.msgpack.encode(self._head(number)), ids.tobytes()]

    def go_on(self, part: int, taken: int) -> bool:
        """Go on to the rows after the first `taken` of the message; False when there are none."""
        piece = self.pieces[part]
        piece.begin += taken
        piece.end = min(piece.begin + self._at_once, piece.at.size)
        piece.number = 0
        if piece.begin == piece.at.size:
            del self.pieces[part]
            return False
        return True

    @abstractmethod
    def _head(self, number: int) -> RowsAsked:
        """Return what is asked for."""

    @abstractmethod
    def take(self, part: int, dtype: str, frames: Sequence[memoryview]) -> int:
        """Take the rows of an answer; return of how many nodes, 0 when it has others."""


class WantedFeatures(WantedRows):
    """Rows of features."""

    def __init__(self, of_rows: RowsOf, nodes: Ids, parts: Parts, num_features: int) -> None:
        super().__init__(of_rows, nodes, parts, _VALUE_BYTES * max(1, num_features))
        self._target: NDArray[Any] = np.empty((0, num_features), np.float32)
        self._at = NO_IDS

    def write_to(self, target: NDArray[Any], at: Ids) -> None:
        """Write those that come from now on to the rows `at` [K] of `target`."""
        self._target, self._at = target, at

    def _head(self, number: int) -> RowsAsked:
        return RowsAsked(number, *self.of_rows)

    def take(self, part: int, dtype: str, frames: Sequence[memoryview]) -> int:
        """See ``WantedRows``."""
        where = self.pieces[part].now
        width = self._target.shape[1]
        rows = _array(dtype, frames[0], DTYPES) if len(frames) == 1 else None
        if rows is None or rows.size != where.size * width:
            return 0
        self._target[self._at[where]] = rows.reshape(where.size, width)
        return where.size


class WantedDraws(WantedRows):
    """In-neighbours that nodes draw."""

    def __init__(
        self, of_rows: RowsOf, nodes: Ids, parts: Parts, num_nodes: int, fanout: int, hop_seed: int
    ) -> None:
        """Want those that each of `nodes` [K] draws of the graph's `num_nodes` nodes."""
        super().__init__(of_rows, nodes, parts, _VALUE_BYTES * max(1, fanout))
        self._num_nodes = num_nodes
        self._fanout, self._hop_seed = fanout, hop_seed
        self._found = [(NO_IDS, NO_ROWS)]

    def rows(self) -> Rows:
        """Return what each of the nodes drew, once all is here."""
        where = np.concatenate([at for at, _ in self._found])
        return joined([rows for _, rows in self._found]).take(np.argsort(where))

    def _head(self, number: int) -> RowsAsked:
        return RowsAsked(number, *self.of_rows, fanout=self._fanout, hop_seed=self._hop_seed)

    def take(self, part: int, dtype: str, frames: Sequence[memoryview]) -> int:
        """See ``WantedRows``."""
        if len(frames) != 2:
            return 0
        lengths, ids = _array("int32", frames[0], ID_DTYPES), _array(dtype, frames[1], ID_DTYPES)
        where = self.pieces[part].now
        if lengths is None or ids is None or not 1 <= lengths.size <= where.size:
            return 0
        most = ids.size if self._fanout == native.ALL_NEIGHBOURS else self._fanout
        if lengths.min() < 0 or lengths.max() > most:
            return 0
        # So that what comes piece by piece is not many small pieces.
        if lengths.size < where.size and lengths.nbytes + ids.nbytes < PIECE_BYTES:
            return 0
        starts = offsets(lengths.astype(np.int64))
        if starts[-1] != ids.size or (
            ids.size and not 0 <= ids.min() <= ids.max() < self._num_nodes
        ):
            return 0
        # A copy, as the message is freed.
        rows = Rows(starts, ids.astype(np.int64))
        self._found.append((where[: lengths.size], rows))
        return int(lengths.size)


def _array(dtype: str, frame: memoryview, known: Sequence[str]) -> NDArray[Any] | None:
    """Return the values of a frame; None where they are of no known dtype."""
    if dtype not in known or frame.nbytes % np.dtype(dtype).itemsize:
        return None
    return np.frombuffer(frame, dtype)
