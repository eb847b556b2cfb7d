"""Copies of graphs' hot sets on the device.

Each graph has one block of memory, allocated once. A thread of its own fills it when no lane reads
it; lanes use it when it is filled and read the table otherwise. ``serve.graphs.hot_set`` chooses
the rows.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from serve.graphs.features import open_memory_file
from serve.graphs.hot_set import slots_bytes
from serve.ipc.messages import HotSetHeld, HotSetRef, TableRef
from serve.lane.cuda.queues import HotRows, Queue
from serve.lane.cuda.tables import Table, Tables

_log = logging.getLogger(__name__)

#: Bytes of one copy.
_PART_BYTES = 16 << 20

Tell = Callable[[HotSetHeld], None]


@dataclass(slots=True)
class _Kept:
    """The hot set of one graph."""

    #: Table, hot set and listener of the change that is due; None when there is none.
    wanted: tuple[TableRef, HotSetRef | None, Tell] | None = None
    #: Numbers of the table and of the hot set offered last.
    numbers: tuple[int, int | None] = (0, None)
    memory: torch.Tensor | None = None
    #: Rows that lanes may use, and the number of their table.
    rows: HotRows | None = None
    table: int = 0
    users: int = 0

    def unused(self) -> bool:
        """Return True when no lane reads from it."""
        return not self.users


class HotKeeper:
    """The hot sets of one process."""

    def __init__(self, tables: Tables, open_queue: Callable[[], Queue]) -> None:
        """`open_queue` is called in the thread that copies, before its first copy."""
        self._tables = tables
        self._open_queue = open_queue
        self._changed = threading.Condition()
        self._kept: dict[str, _Kept] = {}
        self._thread: threading.Thread | None = None

    def offer(self, table: TableRef, hot: HotSetRef | None, tell: Tell) -> None:
        """Copy the hot set to the device soon; another thread calls `tell` when it is there.

        With None the graph has no hot set. A hot set that is there is not copied again.
        """
        numbers = table.number, None if hot is None else hot.number
        with self._changed:
            kept = self._kept.setdefault(table.graph, _Kept())
            if numbers == kept.numbers or (hot is None and kept.memory is None):
                return
            kept.numbers, kept.wanted = numbers, (table, hot, tell)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hot rows", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def held_bytes(self) -> int:
        """Bytes of the device's memory that hot sets take."""
        with self._changed:
            memories = [kept.memory for kept in self._kept.values()]
        return sum(memory.nbytes for memory in memories if memory is not None)

    @contextmanager
    def using(self, table: TableRef) -> Iterator[HotRows | None]:
        """Yield the table's hot set, None without one; it stays unchanged meanwhile."""
        with self._changed:
            kept = self._kept.get(table.graph)
            rows = None if kept is None or kept.table != table.number else kept.rows
            if kept is not None and rows is not None:
                kept.users += 1
        try:
            yield rows
        finally:
            if kept is not None and rows is not None:
                with self._changed:
                    kept.users -= 1
                    self._changed.notify_all()

    def _work(self) -> None:
        queue: Queue | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(one.wanted for one in self._kept.values()))
                kept = next(one for one in self._kept.values() if one.wanted)
                wanted, kept.wanted, kept.rows = kept.wanted, None, None
            # Wait for the runs that use its memory; no others begin.
            self._tables.looped.cool(kept.table)
            with self._changed:
                self._changed.wait_for(kept.unused)
            assert wanted is not None
            table, hot, tell = wanted
            if hot is None:
                continue
            try:
                queue = queue or self._open_queue()
                rows = self._copied(kept, table, hot, queue)
            except FileNotFoundError:
                # The hot set or the table was replaced, and the new offer is on its way.
                continue
            except Exception as error:
                _log.warning(
                    "graph '%s': no rows are kept on the device: %s; graph.hot_memory = 'off' "
                    "leaves their memory to tasks", table.graph, error,
                )  # fmt: skip
                tell(HotSetHeld(table.graph, hot.number, str(error)))
                continue
            with self._changed:
                kept.rows, kept.table = rows, table.number
            self._tables.looped.heat(table.number, rows.rows.data_ptr(), rows.slot_of.data_ptr())
            _log.info("graph '%s': %d rows are kept on the device", table.graph, hot.count)
            tell(HotSetHeld(table.graph, hot.number))

    def _copied(self, kept: _Kept, ref: TableRef, hot: HotSetRef, queue: Queue) -> HotRows:
        """Copy the rows to the graph's memory; returns when all are there."""
        with os.fdopen(open_memory_file(hot.path, hot.number), "rb") as file:
            ids = np.fromfile(file, np.int64, hot.count)
        with self._tables.using(ref) as table, queue.running():
            if not table.read_in_place():
                raise ValueError("the host reads the features")
            if kept.memory is None:
                with self._changed:
                    kept.memory = torch.empty(
                        hot.memory_bytes, dtype=torch.uint8, device=queue.device
                    )
            rows = _placed(kept.memory, table, hot.count)
            slot_of = torch.full((table.rows.shape[0],), -1, dtype=torch.int32)
            slot_of[torch.from_numpy(ids)] = torch.arange(hot.count, dtype=torch.int32)
            rows.slot_of.copy_(slot_of)
            row_bytes = table.rows.shape[1] * table.rows.element_size()
            step = max(1, _PART_BYTES // row_bytes)
            for start in range(0, hot.count, step):
                part = torch.from_numpy(ids[start : start + step])
                rows.rows[start : start + step].copy_(torch.index_select(table.rows, 0, part))
            queue.finish()
        return rows


def _placed(memory: torch.Tensor, table: Table, count: int) -> HotRows:
    """Lay out `count` rows and the positions of the table's rows in `memory`.

    Raises ValueError when they do not fit.
    """
    num_rows, columns = table.rows.shape
    first = slots_bytes(num_rows)
    size_bytes = count * columns * table.rows.element_size()
    if first + size_bytes > memory.numel():
        raise ValueError(f"{count} rows take {first + size_bytes} bytes of {memory.numel()}")
    slot_of = memory[: 4 * num_rows].view(torch.int32)
    rows = memory[first : first + size_bytes].view(table.rows.dtype).view(count, columns)
    return HotRows(slot_of, rows)
