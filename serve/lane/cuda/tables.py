"""Features of resident graphs where a device's lanes reach them: mapped, not copied.

The main process keeps a graph's features in a memory file. A device's process maps it once for all
its lanes and, on a GPU, has CUDA pin it, so that a run gathers the rows it needs over the bus. The
processor stands in for a GPU in tests: the same mapping, and torch gathers.
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
from serve.lane.cuda.queues import Pinned
from serve.native_cuda import CudaError

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "uint8": torch.uint8}


class Table:
    """One mapped table."""

    def __init__(self, ref: TableRef, pinned: Pinned | None) -> None:
        """Raises OSError when it cannot be mapped; one that cannot be pinned is slower to read."""
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
        #: The device reads it where it lies.
        self.direct = True
        self._pinned = pinned
        if pinned is not None:
            try:
                pinned.register(self.rows.data_ptr(), self.rows.nbytes)
            except CudaError as error:
                self._pinned, self.direct = None, False
                _log.warning("graph '%s': features are read by the host: %s", ref.graph, error)

    def close(self) -> None:
        """Unpin it; it is unmapped with its last reader."""
        if self._pinned is not None:
            self._pinned.unregister(self.rows.data_ptr())


class Tables:
    """The tables of one process, the newest of each graph and those still in use."""

    def __init__(self, pinned: Pinned | None) -> None:
        """`pinned`: of the device; None on the processor."""
        self._pinned = pinned
        self._lock = threading.Lock()
        self._tables: dict[int, Table] = {}

    @contextmanager
    def using(self, ref: TableRef) -> Iterator[Table]:
        """The table, mapped now if it is not; inside, it stays. Raises what ``Table`` raises."""
        with self._lock:
            table = self._tables.get(ref.number)
            if table is None:
                table = self._tables[ref.number] = Table(ref, self._pinned)
            table.users += 1
        try:
            yield table
        finally:
            with self._lock:
                table.users -= 1
                self._drop_old(ref.graph)

    def _drop_old(self, graph: str) -> None:
        of_graph = [number for number, t in self._tables.items() if t.ref.graph == graph]
        for number in of_graph:
            if number != max(of_graph) and not self._tables[number].users:
                self._tables.pop(number).close()
