"""Feature tables of resident graphs, mapped into the process of a device's lanes.

The main process keeps a graph's features in a memory file. A device's process maps it once for all
its lanes. On a GPU, CUDA pins it, and runs gather the rows they need over the bus. In tests the
processor stands in for a GPU: the mapping is the same, and torch gathers.
"""

import logging
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from serve.graphs.features import open_memory_file
from serve.ipc.messages import TableRef
from serve.lane.cuda.cuda_queue import Pinned
from serve.native_cuda import CudaError

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "uint8": torch.uint8}


class Table:
    """One mapped table."""

    def __init__(self, ref: TableRef, pinned: Pinned | None) -> None:
        """Map the file; raises OSError when that fails. A table that cannot be pinned is slower."""
        self.ref = ref
        self.users = 0
        rows, columns = ref.shape
        dtype = _DTYPES[ref.dtype]
        fd = open_memory_file(ref.path, ref.number)
        try:
            mapped = mmap.mmap(fd, rows * columns * dtype.itemsize, mmap.MAP_SHARED)
        finally:
            os.close(fd)
        #: [rows, columns], in host memory.
        self.rows = torch.frombuffer(mapped, dtype=dtype, count=rows * columns).view(ref.shape)
        #: True when the device reads the host memory directly.
        self.direct = True
        self._pinned = pinned
        if pinned is not None:
            try:
                pinned.register(self.rows.data_ptr(), self.rows.nbytes)
            except CudaError as error:
                self._pinned, self.direct = None, False
                _log.warning("graph '%s': features are read by the host: %s", ref.graph, error)

    def close(self) -> None:
        """Unpin the table; it is unmapped with its last reader."""
        if self._pinned is not None:
            self._pinned.unregister(self.rows.data_ptr())


class Tables:
    """Tables of one process: the newest of each graph, and older ones still in use."""

    def __init__(self, pinned: Pinned | None) -> None:
        """`pinned` is the device's pinned memory, None on the processor."""
        self._pinned = pinned
        self._changed = threading.Condition()
        self._tables: dict[int, Table] = {}
        #: Numbers of tables that a thread maps now.
        self._being_made: set[int] = set()

    @contextmanager
    def using(self, ref: TableRef) -> Iterator[Table]:
        """Yield the table, which stays mapped meanwhile. Raises what ``Table`` raises."""
        table = self._take(ref)
        try:
            yield table
        finally:
            with self._changed:
                table.users -= 1
                old = self._take_old(ref.graph)
            for each in old:
                each.close()

    def _take(self, ref: TableRef) -> Table:
        """Return the table with one user more.

        Mapping and pinning one of many gigabytes takes seconds, in which others are used.
        """
        number = ref.number
        with self._changed:
            self._changed.wait_for(lambda: number not in self._being_made)
            if (table := self._tables.get(number)) is not None:
                table.users += 1
                return table
            self._being_made.add(number)
        made: Table | None = None
        try:
            made = Table(ref, self._pinned)
            made.users = 1
            return made
        finally:
            with self._changed:
                self._being_made.discard(number)
                if made is not None:
                    self._tables[number] = made
                self._changed.notify_all()

    def _take_old(self, graph: str) -> list[Table]:
        """Remove and return the graph's tables that are neither its newest nor in use."""
        of_graph = [number for number, t in self._tables.items() if t.ref.graph == graph]
        return [
            self._tables.pop(number)
            for number in of_graph
            if number != max(of_graph) and not self._tables[number].users
        ]
