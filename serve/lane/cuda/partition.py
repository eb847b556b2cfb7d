"""Multiprocessors of a device that are kept free of long runs: green contexts of CUDA."""

import logging
from typing import Protocol

from serve.native_cuda import CudaError

_log = logging.getLogger(__name__)


class PartitionCalls(Protocol):
    """The calls to CUDA that this needs; ``CudaLibrary`` has them."""

    def partition(self, device: int, reserved_sms: int) -> tuple[int, int, int]:
        """Return a context of all other multiprocessors, how many are kept free, and of how many.

        Raises CudaError when the driver cannot.
        """
        ...

    def partition_stream(self, context: int) -> int:
        """Return a new stream of the context; raises CudaError."""
        ...


class Partition:
    """All multiprocessors of a device but those reserved for short runs."""

    def __init__(self, calls: PartitionCalls, context: int) -> None:
        self._calls, self._context = calls, context

    @classmethod
    def open(cls, calls: PartitionCalls, device: int, reserved_sms: int) -> "Partition | None":
        """Reserve at least that many; returns None for 0, and where the driver cannot.

        Runs then use the whole device; the log says why.
        """
        if not reserved_sms:
            return None
        try:
            context, kept, whole = calls.partition(device, reserved_sms)
        except CudaError as error:
            _log.warning("no multiprocessors are reserved for short runs: %s", error)
            return None
        _log.info("%d of %d multiprocessors are reserved for short runs", kept, whole)
        return cls(calls, context)

    def new_stream(self) -> int:
        """Return CUDA's handle of a new stream whose kernels stay off the reserved ones."""
        return self._calls.partition_stream(self._context)
