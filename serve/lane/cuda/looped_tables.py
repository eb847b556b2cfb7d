"""What lanes' loops without Python know of the tables that a device reads in place."""

import ctypes
from typing import Any

import torch

from serve.native_cuda import DEVICE_LIBRARY, required_path


class LoopedTables:
    """The tables of one process, by number; any thread may call it.

    A table is told of once it is pinned, and taken back before it is unpinned.
    """

    def __init__(self) -> None:
        # Not PyDLL: to wait for a run's end must not hold the interpreter lock.
        library: Any = ctypes.CDLL(str(required_path(DEVICE_LIBRARY)))
        pointer, address, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64
        library.gnnserve_tables_open.restype = pointer
        self._add, self._remove = library.gnnserve_tables_add, library.gnnserve_tables_remove
        self._hot = library.gnnserve_tables_hot
        for function, arguments in (
            (self._add, (address, address, number, number, number, ctypes.c_char_p)),
            (self._remove, (address,)),
            (self._hot, (address, address, address)),
        ):
            function.restype, function.argtypes = None, (pointer, *arguments)
        #: What ``gnnserve_lane_open`` takes; never closed.
        self.handle: int = library.gnnserve_tables_open()

    def add(self, number: int, address: int, rows: torch.Tensor) -> None:
        """Have loops read that table [R, F], which the device finds at `address`."""
        dtype = str(rows.dtype).removeprefix("torch.")
        self._add(self.handle, number, address, *rows.shape, rows.element_size(), dtype.encode())

    def remove(self, number: int) -> None:
        """Have loops read it no more; returns when no run does."""
        self._remove(self.handle, number)

    def heat(self, number: int, rows: int, slot_of: int) -> None:
        """Have loops read hot rows of the table there; see ``queues.HotRows``."""
        self._hot(self.handle, number, rows, slot_of)

    def cool(self, number: int) -> None:
        """Have loops read the table alone; returns when no run reads hot rows."""
        self._hot(self.handle, number, 0, 0)
