"""Work of one lane, in order: up to the device, there, and down again.

``CudaQueue`` for a GPU, ``HostQueue`` for the processor, where nothing is asynchronous. This is
all a lane knows of its device.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from serve.lane.cuda.replays import Captured
from serve.native_cuda import CudaError, CudaLibrary

#: torch's own annotations stop here.
_cuda: Any = torch.cuda
#: Of all that CUDA offers, two levels are used: torch's names for them, lower is more urgent.
_URGENT, _ORDINARY = -1, 0


@dataclass(frozen=True, slots=True)
class HotRows:
    """Rows of a table in host memory that lie on the device too."""

    #: For each row of the table its place among `rows`, int32 [R]; -1: it is not there.
    slot_of: torch.Tensor
    #: [H, F], as the table has them.
    rows: torch.Tensor


class Queue(Protocol):
    """One thread's, for one task at a time."""

    device: torch.device

    def running(self, *, urgent: bool = False) -> AbstractContextManager[None]:
        """While open, what this thread launches is this queue's; see ``upload``."""
        ...

    def upload(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies on the device, for what is launched from here on; inside ``running``.

        What they are copied from must stay as it is until ``finish`` or ``download``. What a run
        uploads first is copied at once; later, when all that was launched meanwhile has ended.
        """
        ...

    def fill(self, places: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        """The same into tensors that are on the device, by name, and that no run reads now."""
        ...

    def capture(self, work: Callable[[], torch.Tensor]) -> Captured:
        """What `work` launches, to be launched as a whole; inside ``running``, nothing is run.

        The memory it uses must stay its own. Raises what `work` raises, and CudaError for what
        cannot be captured: whatever waits for the device.
        """
        ...

    def gather(
        self,
        table: torch.Tensor,
        ids: torch.Tensor,
        hot: HotRows | None = None,
        *,
        placed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows `ids` int64 [K] of `table` [R, F], on the device; both are in host memory.

        Those that are `hot` are read there; `placed` are the ids on the device, where they were
        uploaded before. For what is launched from here on; inside ``running``. Nobody checks ids.
        Like what is uploaded, all must stay as they are.
        """
        ...

    def download(self, output: torch.Tensor, place: torch.Tensor) -> None:
        """Wait for `output` and copy it to `place`, in host memory; returns when it is there."""
        ...

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors in host memory as requests' are: from there copies are fast."""
        ...

    def landing(self, output: torch.Tensor) -> torch.Tensor:
        """Such memory for `output` to be downloaded to."""
        ...

    def finish(self) -> None:
        """Wait for all that was launched; raises what the device raised meanwhile."""
        ...


class HostQueue:
    """The processor: what is asked for is done at once."""

    device = torch.device("cpu")

    @contextmanager
    def running(self, *, urgent: bool = False) -> Iterator[None]:
        """See ``Queue``."""
        yield

    def upload(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Queue``."""
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def fill(self, places: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        """See ``Queue``."""
        for name, place in places.items():
            place.copy_(tensors[name])

    def capture(self, work: Callable[[], torch.Tensor]) -> Captured:
        """See ``Queue``; it is run at once, and again at each launch, into the same place."""
        return _Repeated(work)

    def gather(
        self,
        table: torch.Tensor,
        ids: torch.Tensor,
        hot: HotRows | None = None,
        *,
        placed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Queue``."""
        out = torch.index_select(table, 0, ids)
        if hot is not None:
            slots = hot.slot_of[ids]
            there = slots >= 0
            out[there] = hot.rows[slots[there]]
        return out

    def download(self, output: torch.Tensor, place: torch.Tensor) -> None:
        """See ``Queue``."""
        place.copy_(output)

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Queue``."""
        return dict(tensors)

    def landing(self, output: torch.Tensor) -> torch.Tensor:
        """See ``Queue``."""
        return torch.empty(output.shape, dtype=output.dtype)

    def finish(self) -> None:
        """See ``Queue``."""


class _Repeated:
    """Stands in for a captured run where nothing is launched."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self._work = work
        self.output = work()

    def launch(self) -> None:
        with torch.inference_mode():
            self.output.copy_(self._work())

    def forget(self) -> None:
        pass


class Copies:
    """The streams that copies of all lanes of a device go through, one for each direction.

    A device has one engine a direction: what is in a stream of its own does not stand in the way
    of kernels, and copies of several lanes follow each other as they would anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.up = _cuda.Stream(device)
        self.down = _cuda.Stream(device)


class Pinned:
    """Host memory that the device reads where it lies."""

    def __init__(self, library: CudaLibrary, device: int = 0) -> None:
        """`device` is the number of the one that reads."""
        self.library, self._device = library, device
        #: Start, end, and where the device sees the start.
        self._ranges: list[tuple[int, int, int]] = []

    def register(self, address: int, size_bytes: int) -> None:
        """Pin that memory, until ``unregister``; raises CudaError where it cannot be."""
        seen = self.library.register(address, size_bytes, self._device)
        self._ranges.append((address, address + size_bytes, seen))

    def unregister(self, address: int) -> None:
        """Before the memory that starts there is unmapped, with nothing in flight that reads it."""
        self._ranges = [found for found in self._ranges if found[0] != address]
        self.library.unregister(address)

    def seen(self, tensor: torch.Tensor) -> int | None:
        """Where the device sees the tensor's data; None: that memory is not pinned."""
        start = tensor.data_ptr()
        end = start + tensor.nbytes
        for first, last, seen in self._ranges:
            if first <= start and end <= last:
                return seen + start - first
        return None


class _CudaGraph:
    """A captured run of a ``CudaQueue``."""

    def __init__(
        self, library: CudaLibrary, graph: int, output: torch.Tensor, queue: "CudaQueue"
    ) -> None:
        self._library, self._graph, self._queue = library, graph, queue
        self.output = output

    def launch(self) -> None:
        self._library.replay(self._graph, self._queue.stream)

    def forget(self) -> None:
        self._library.forget(self._graph)


class CudaQueue:
    """A lane's two streams, ordinary and urgent. Waits by events, never for the device.

    An urgent stream's kernels take the processors that others' free; what runs is not stopped.
    """

    def __init__(self, device: torch.device, copies: Copies, pinned: Pinned | None = None) -> None:
        self.device = device
        self._copies = copies
        self._pinned = pinned
        #: The run has uploaded something, and may have launched something since.
        self._begun = False
        # Held for good: torch hands the same 32 streams out again and again.
        self._streams = {
            False: _cuda.Stream(device, priority=_ORDINARY),
            True: _cuda.Stream(device, priority=_URGENT),
        }
        self._current = self._streams[False]

    @property
    def stream(self) -> int:
        """CUDA's handle of the stream that is used now."""
        handle: int = self._current.cuda_stream
        return handle

    @contextmanager
    def running(self, *, urgent: bool = False) -> Iterator[None]:
        """See ``Queue``."""
        self._current, self._begun = self._streams[urgent], False
        with torch.cuda.device(self.device), torch.cuda.stream(self._current):
            yield

    def upload(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Queue``."""
        with self._going_up():
            return {
                name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()
            }

    def fill(self, places: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        """See ``Queue``. What was copied there last was read by a run that was waited for."""
        with self._going_up():
            for name, place in places.items():
                place.copy_(tensors[name], non_blocking=True)

    @contextmanager
    def _going_up(self) -> Iterator[None]:
        """While open, copies are on the stream up, and what is launched afterwards waits for them.

        NOTE: memory is free for others when the host lets go of it, and the host is ahead of the
        device: what is copied into may be what kernels launched before are about to read or write.
        The last run's were waited for, this run's are waited for here.
        """
        if self._begun:
            launched = _cuda.Event()
            launched.record(self._current)
            self._copies.up.wait_event(launched)
        self._begun = True
        with torch.cuda.stream(self._copies.up):
            yield
            copied = _cuda.Event()
            copied.record(self._copies.up)
        self._current.wait_event(copied)

    def capture(self, work: Callable[[], torch.Tensor]) -> Captured:
        """See ``Queue``."""
        if self._pinned is None:
            raise CudaError("there is no library to capture with")
        library, stream = self._pinned.library, self.stream
        library.capture(stream)
        try:
            output = work()
        except BaseException:
            # Broken, most likely, and then not to be ended either; but ended it is.
            with suppress(CudaError):
                library.forget(library.end_capture(stream))
            raise
        return _CudaGraph(library, library.end_capture(stream), output, self)

    def gather(
        self,
        table: torch.Tensor,
        ids: torch.Tensor,
        hot: HotRows | None = None,
        *,
        placed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Queue``. Rows of memory that is not pinned are put together on the host."""
        seen = None if self._pinned is None else self._pinned.seen(table)
        if self._pinned is None or seen is None:
            return self.upload({"rows": torch.index_select(table, 0, ids)})["rows"]
        if placed is None:
            placed = self.upload({"ids": ids})["ids"]
        out = torch.empty(len(ids), table.shape[1], dtype=table.dtype, device=self.device)
        self._pinned.library.gather(
            seen, placed.data_ptr(), len(ids), table.shape[1] * table.element_size(),
            out.data_ptr(), stream=self.stream,
            hot=0 if hot is None else hot.rows.data_ptr(),
            slot_of=0 if hot is None else hot.slot_of.data_ptr(),
        )  # fmt: skip
        return out

    def download(self, output: torch.Tensor, place: torch.Tensor) -> None:
        """See ``Queue``."""
        computed, copied = _cuda.Event(), _cuda.Event(blocking=True)
        computed.record(self._current)
        self._copies.down.wait_event(computed)
        with torch.cuda.stream(self._copies.down):
            place.copy_(output, non_blocking=True)
            copied.record(self._copies.down)
        copied.synchronize()

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Queue``."""
        return {name: tensor.pin_memory() for name, tensor in tensors.items()}

    def landing(self, output: torch.Tensor) -> torch.Tensor:
        """See ``Queue``."""
        return torch.empty(output.shape, dtype=output.dtype, pin_memory=True)

    def finish(self) -> None:
        """See ``Queue``."""
        for stream in (self._copies.up, self._current, self._copies.down):
            ended = _cuda.Event(blocking=True)
            ended.record(stream)
            ended.synchronize()
