"""Memory that a client shares with a server on the same host, for the tensors of requests.

The client copies a request's tensors here and sends only their places. This module holds no
connection: the clients register the memory with the server.
"""

import contextlib
import mmap
import os
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path

from serve.client.errors import Exhausted
from serve.native import OffsetAllocator
from serve.pb import grpc_service_pb2 as pb
from serve.wire.messages import Array, Places, array_bytes

_FOLDER = Path("/dev/shm")
_ALIGNMENT_BYTES = 64


class SharedMemory:
    """POSIX shared memory object of this process. Thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        """Create the object, which takes memory as it is used; raises Exhausted on failure."""
        self.name = f"gnnserve-{os.getpid()}-{uuid.uuid4().hex}"
        self.size_bytes = size_bytes
        self._allocator = OffsetAllocator(size_bytes, _ALIGNMENT_BYTES)
        self._lock = threading.Lock()
        self._closed = False
        try:
            fd = os.open(_FOLDER / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.ftruncate(fd, size_bytes)
                self._map = mmap.mmap(fd, size_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            self.unlink()
            raise Exhausted.local(
                f"shared memory of {size_bytes} bytes: {error.strerror}"
            ) from error

    @property
    def registration(self) -> pb.SystemSharedMemoryRegisterRequest:
        """Message that registers this memory with a server."""
        return pb.SystemSharedMemoryRegisterRequest(
            name=self.name, key=self.name, byte_size=self.size_bytes
        )

    def place(self, tensors: Mapping[str, Array]) -> Places | None:
        """Copy `tensors` here until ``release``; returns None when there is no room now."""
        raws = {name: array_bytes(array) for name, array in tensors.items()}
        sizes = [-(-raw.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for raw in raws.values()]
        with self._lock:
            block = -1 if self._closed else self._allocator.alloc(max(1, sum(sizes)))
        if block < 0:
            return None
        offsets, at = {}, block
        for (name, raw), size in zip(raws.items(), sizes, strict=True):
            self._map[at : at + raw.nbytes] = raw
            offsets[name] = at
            at += size
        return Places(self.name, offsets, block)

    def release(self, places: Places) -> None:
        """Free the places of a request that was answered."""
        with self._lock:
            self._allocator.free(places.block_bytes)

    def unlink(self) -> None:
        """Remove the object's name, so that it vanishes with the last process that uses it."""
        with contextlib.suppress(FileNotFoundError):
            (_FOLDER / self.name).unlink()

    def close(self) -> None:
        """Accept no more tensors and remove the object's name. Idempotent."""
        with self._lock:
            self._closed = True
        self.unlink()
