"""The queue of a lane on a GPU: its streams, and the memory that its copies start from."""

import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from serve.lane.cuda.partition import Partition
from serve.lane.cuda.queues import HotRows, Pairs
from serve.lane.cuda.replayer import Replayer
from serve.lane.cuda.replays import Captured
from serve.lane.cuda.streams import StreamKind
from serve.native_cuda import GATHER_THREADS, CopyList, CudaError, CudaLibrary

#: Any, as torch does not annotate its streams and events.
_cuda: Any = torch.cuda
#: Two of CUDA's stream priorities, as torch numbers them: lower is more urgent.
_URGENT, _ORDINARY = -1, 0


#: Pinning that much takes a few tenths of a second, and whoever waits for the process waits for it.
PART_BYTES = 1 << 30


def parts_of(address: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of each part of that memory to be pinned; no page is in two parts."""
    end = address + size_bytes
    while address < end:
        part_end = min(end, address // PART_BYTES * PART_BYTES + PART_BYTES)
        yield address, part_end - address
        address = part_end


class Copies:
    """The two streams for copies of all lanes of a device, one for each direction.

    A device has one copy engine a direction. Copies in streams of their own do not delay kernels,
    and copies of several lanes follow each other on the engine anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.up = _cuda.Stream(device)
        self.down = _cuda.Stream(device)


class Pinned:
    """Pinned host memory, which the device reads directly."""

    def __init__(self, library: CudaLibrary, device: int = 0) -> None:
        """`device` is the number of the device that reads."""
        self.library, self._device = library, device
        self._lock = threading.Lock()
        #: Start and end address, and the start as the device addresses it.
        self._ranges: list[tuple[int, int, int]] = []
        #: Addresses of the parts of what was pinned in parts, by the address of the first.
        self._parts: dict[int, list[int]] = {}

    def register(self, address: int, size_bytes: int) -> None:
        """Pin that memory until ``unregister``; raises CudaError when CUDA refuses."""
        self._publish(address, size_bytes, self._register(address, size_bytes))

    def register_in_parts(
        self, address: int, size_bytes: int, go_on: Callable[[], bool] = lambda: True
    ) -> bool:
        """Pin that memory as ``register`` does, a part at a time while `go_on` returns True.

        Kernels may read all of it then; a copy may not reach from one part into another. Returns
        False when it ended early. Then, and when CUDA refuses, nothing of it is pinned.
        """
        parts: list[int] = []
        shifts: set[int] = set()
        try:
            for start, part_bytes in parts_of(address, size_bytes):
                if not go_on():
                    self._unregister(parts)
                    return False
                seen = self._register(start, part_bytes)
                parts.append(start)
                shifts.add(seen - start)
        except CudaError:
            self._unregister(parts)
            raise
        if len(shifts) > 1:
            # The device sees the parts apart from each other, but a table must be in one piece.
            self._unregister(parts)
            self.register(address, size_bytes)
            return True
        with self._lock:
            self._parts[address] = parts
        self._publish(address, size_bytes, address + shifts.pop())
        return True

    def unregister(self, address: int) -> None:
        """Unpin the memory that starts there, before its unmapping; no kernel may still read it."""
        with self._lock:
            self._ranges = [found for found in self._ranges if found[0] != address]
            parts = self._parts.pop(address, [address])
        self._unregister(parts)

    def _register(self, address: int, size_bytes: int) -> int:
        return self.library.register(address, size_bytes, self._device)

    def _unregister(self, parts: Sequence[int]) -> None:
        for start in parts:
            self.library.unregister(start)

    def _publish(self, address: int, size_bytes: int, seen: int) -> None:
        with self._lock:
            self._ranges = [*self._ranges, (address, address + size_bytes, seen)]

    def seen(self, tensor: torch.Tensor) -> int | None:
        """Return the device's address of the tensor's data; None when it is not pinned."""
        start = tensor.data_ptr()
        end = start + tensor.nbytes
        for first, last, seen in self._ranges:
            if first <= start and end <= last:
                return seen + start - first
        return None


class _CudaGraph:
    """A captured run of a ``CudaQueue``."""

    def __init__(
        self,
        library: CudaLibrary,
        graph: int,
        outputs: tuple[torch.Tensor, ...],
        queue: "CudaQueue",
    ) -> None:
        self._library, self.handle, self._queue = library, graph, queue
        self.outputs = outputs

    def launch(self) -> None:
        self._library.replay(self.handle, self._queue.stream)

    def forget(self) -> None:
        self._library.forget(self.handle)


class CudaQueue:
    """A lane's streams, ordinary and urgent ones. It waits for events, never for the whole device.

    An urgent stream's kernels get multiprocessors that others free; running kernels go on.
    """

    def __init__(
        self,
        device: torch.device,
        copies: Copies,
        pinned: Pinned,
        partition: Partition | None = None,
    ) -> None:
        """With a `partition` it has a stream for bounded runs, too."""
        self.device = device
        self._pinned = pinned
        self._library = pinned.library
        up, down = copies.up.cuda_stream, copies.down.cuda_stream
        self._route = self._library.route(device.index or 0, up, down)
        #: The run has uploaded something, and may have launched kernels since.
        self._begun = False
        # Held for good: torch hands out the same 32 streams again and again.
        self._streams = {
            StreamKind.ORDINARY: _cuda.Stream(device, priority=_ORDINARY),
            StreamKind.URGENT: _cuda.Stream(device, priority=_URGENT),
        }
        if partition is not None:
            bounded = _cuda.ExternalStream(partition.new_stream(), device)
            self._streams[StreamKind.BOUNDED] = bounded
        self.kinds: Sequence[StreamKind] = tuple(self._streams)
        #: The stream in use, as CUDA knows it.
        self.stream: int = self._streams[StreamKind.ORDINARY].cuda_stream

    @contextmanager
    def running(self, kind: StreamKind = StreamKind.ORDINARY) -> Iterator[None]:
        """See ``Queue``. The device is the thread's current one."""
        stream = self._streams[kind]
        self.stream, self._begun = stream.cuda_stream, False
        before = _cuda.current_stream(self.device)
        _cuda.set_stream(stream)
        try:
            yield
        finally:
            _cuda.set_stream(before)

    def upload(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Queue``."""
        sources = {name: tensor.contiguous() for name, tensor in tensors.items()}
        placed = {
            name: torch.empty_like(tensor, device=self.device) for name, tensor in sources.items()
        }
        self.fill([(tensor, placed[name]) for name, tensor in sources.items()])
        return placed

    def fill(self, pairs: Pairs) -> None:
        """See ``Queue``. The run that read the previous content was waited for.

        The allocator reuses memory as soon as the host frees it, and the host is ahead of the
        device. A copy could therefore overwrite memory that kernels launched before still use. The
        last run's kernels were waited for; this run's are waited for here.
        """
        self._library.upload(self._route, self.stream, _copies(pairs), behind=self._begun)
        self._begun = True

    def capture(self, work: Callable[[], tuple[torch.Tensor, ...]]) -> Captured:
        """See ``Queue``."""
        library, stream = self._library, self.stream
        library.capture(stream)
        try:
            outputs = work()
        except BaseException:
            # Ending a broken capture most likely fails too, but must be tried.
            with suppress(CudaError):
                library.forget(library.end_capture(stream))
            raise
        return _CudaGraph(library, library.end_capture(stream), outputs, self)

    def replayer(self) -> Replayer:
        """See ``Queue``."""
        streams = {kind: stream.cuda_stream for kind, stream in self._streams.items()}
        return Replayer(self._library.replay_task, self._route, streams)

    def gather(
        self,
        table: torch.Tensor,
        ids: torch.Tensor,
        hot: HotRows | None = None,
        *,
        placed: torch.Tensor | None = None,
        threads: int = GATHER_THREADS,
    ) -> torch.Tensor:
        """See ``Queue``. The host gathers rows of memory that is not pinned."""
        seen = self._pinned.seen(table)
        if seen is None:
            return self.upload({"rows": torch.index_select(table, 0, ids)})["rows"]
        if placed is None:
            placed = self.upload({"ids": ids})["ids"]
        out = torch.empty(len(ids), table.shape[1], dtype=table.dtype, device=self.device)
        self._library.gather(
            seen, placed.data_ptr(), len(ids), table.shape[1] * table.element_size(),
            out.data_ptr(), stream=self.stream, most_threads=threads,
            hot=0 if hot is None else hot.rows.data_ptr(),
            slot_of=0 if hot is None else hot.slot_of.data_ptr(),
        )  # fmt: skip
        return out

    def download(self, pairs: Pairs) -> None:
        """See ``Queue``."""
        found = []
        for output, place in pairs:
            if output.device.type == self.device.type:
                found.append((output.contiguous(), place))
            else:
                place.copy_(output)  # the model has computed it on the processor
        self._library.download(self._route, self.stream, _copies(found))

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Queue``."""
        return {name: tensor.pin_memory() for name, tensor in tensors.items()}

    def landing(self, output: torch.Tensor) -> torch.Tensor:
        """See ``Queue``."""
        return torch.empty(output.shape, dtype=output.dtype, pin_memory=True)

    def finish(self) -> None:
        """See ``Queue``."""
        self._library.finish(self._route, self.stream)


def _copies(pairs: Pairs) -> CopyList:
    """Return the copies of the first of each pair to the second.

    Raises ValueError where their sizes differ, or where one has gaps.
    """
    copies = array("Q")
    for tensor, place in pairs:
        size_bytes = tensor.nbytes
        if place.nbytes != size_bytes:
            raise ValueError(f"a tensor of {size_bytes} bytes has a place of {place.nbytes}")
        if not (tensor.is_contiguous() and place.is_contiguous()):
            raise ValueError(f"a tensor of {size_bytes} bytes or its place has gaps")
        if size_bytes:
            copies.extend((place.data_ptr(), tensor.data_ptr(), size_bytes))
    return copies
