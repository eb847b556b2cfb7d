"""Feature tables of resident graphs, mapped into the process of a device's lanes.

The main process keeps a graph's features in a memory file. A device's process maps it once for all
its lanes. On a GPU, a thread of its own has CUDA pin it, and runs gather the rows they need over
the bus. In tests the processor stands in for a GPU: the mapping is the same, and torch gathers.
"""

import logging
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from serve.graphs.features import open_memory_file
from serve.ipc.messages import TableRef
from serve.lane import clock
from serve.lane.cuda.cuda_queue import Pinned
from serve.lane.cuda.looped_tables import LoopedTables
from serve.native_cuda import CudaError

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "uint8": torch.uint8}


class Table:
    """One mapped table.

    The device reads it in place once it is pinned, which takes seconds for tens of gigabytes; until
    then the host gathers.
    """

    def __init__(self, ref: TableRef, pinned: Pinned | None, looped: LoopedTables) -> None:
        """Map the file; raises OSError when that fails."""
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
        self._pinned, self._looped = pinned, looped
        self._is_pinned = self._is_closed = False
        self._settled = threading.Event()
        if pinned is None:
            looped.add(ref.number, self.rows.data_ptr(), self.rows)
            self._settled.set()

    def read_in_place(self) -> bool:
        """Wait until the table is pinned or cannot be; return whether the device reads it."""
        self._settled.wait()
        return self._pinned is None or self._is_pinned

    def pin(self) -> None:
        """Pin the table, unless it is closed meanwhile. One that cannot be pinned is slower."""
        assert self._pinned is not None
        started_ns = clock.now_ns()
        try:
            self._is_pinned = self._pinned.register_in_parts(
                self.rows.data_ptr(), self.rows.nbytes, lambda: not self._is_closed
            )
            if self._is_pinned and (address := self._pinned.seen(self.rows)) is not None:
                self._looped.add(self.ref.number, address, self.rows)
        except CudaError as error:
            _log.warning("graph '%s': features are read by the host: %s", self.ref.graph, error)
        finally:
            self._settled.set()
        if self._is_pinned:
            _log.info(
                "graph '%s': %d MiB of features are read in place, pinned in %.1f s",
                self.ref.graph, self.rows.nbytes >> 20, (clock.now_ns() - started_ns) / 1e9,
            )  # fmt: skip

    def close(self) -> None:
        """Have pinning end, and loops without Python; nobody else uses the table any more."""
        self._is_closed = True
        self._looped.remove(self.ref.number)

    def unpin(self) -> None:
        """Undo ``pin``; the table is unmapped with its last reader."""
        if self._pinned is not None and self._is_pinned:
            # It may have been closed just before it was pinned.
            self._looped.remove(self.ref.number)
            self._pinned.unregister(self.rows.data_ptr())


class _Pinning:
    """A thread that pins tables and unpins them, one after another."""

    def __init__(self) -> None:
        self._due: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def soon(self, work: Callable[[], None]) -> None:
        """Have the thread do it, after all else that is due."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="pinning", daemon=True)
                self._thread.start()
        self._due.put(work)

    def _work(self) -> None:
        while True:
            work = self._due.get()
            try:
                work()
            except Exception:
                _log.exception("features of resident graphs: pinned memory cannot be given back")
            # Until the next one is due, it would keep a table mapped.
            del work


class Tables:
    """Tables of one process: the newest of each graph, and older ones still in use."""

    def __init__(self, pinned: Pinned | None) -> None:
        """`pinned` is the device's pinned memory, None on the processor."""
        self._pinned = pinned
        self.looped = LoopedTables()
        self._pinning = _Pinning()
        self._lock = threading.Lock()
        self._tables: dict[int, Table] = {}

    @contextmanager
    def using(self, ref: TableRef) -> Iterator[Table]:
        """Yield the table, which stays mapped meanwhile. Raises what ``Table`` raises."""
        table = self._take(ref)
        try:
            self._drop_old(ref.graph)
            yield table
        finally:
            with self._lock:
                table.users -= 1
            self._drop_old(ref.graph)

    def _take(self, ref: TableRef) -> Table:
        """Return the table with one user more."""
        with self._lock:
            table = self._tables.get(ref.number)
            if table is None:
                table = self._tables[ref.number] = Table(ref, self._pinned, self.looped)
                if self._pinned is not None:
                    self._pinning.soon(table.pin)
            table.users += 1
            return table

    def _drop_old(self, graph: str) -> None:
        """Give up the graph's tables that are neither its newest nor in use."""
        with self._lock:
            of_graph = [number for number, t in self._tables.items() if t.ref.graph == graph]
            old = [
                self._tables.pop(number)
                for number in of_graph
                if number != max(of_graph) and not self._tables[number].users
            ]
        for each in old:
            each.close()
            if self._pinned is not None:
                self._pinning.soon(each.unpin)
