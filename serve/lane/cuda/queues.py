"""Queues: a lane's work on its device, in order. Data goes up, runs there, and comes down again.

A lane knows nothing else of its device. ``cuda_queue.CudaQueue`` is for a GPU; ``HostQueue`` is for
the processor, where nothing is asynchronous.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from serve.lane.cuda.replayer import Replayer, host_replayer
from serve.lane.cuda.replays import Captured
from serve.lane.cuda.streams import UNPARTITIONED, StreamKind
from serve.native_cuda import GATHER_THREADS

#: Tensors and where their content goes.
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class HotRows:
    """Rows of a table in host memory that have a copy on the device."""

    #: Position of each row of the table in `rows`, int32 [R]; -1 for a row without a copy.
    slot_of: torch.Tensor
    #: [H, F], in the table's dtype.
    rows: torch.Tensor


class Queue(Protocol):
    """A queue of one thread, for one task at a time."""

    device: torch.device
    #: The streams that it has.
    kinds: Sequence[StreamKind]

    def running(self, kind: StreamKind = StreamKind.ORDINARY) -> AbstractContextManager[None]:
        """Launch this thread's kernels on that stream of this queue while open."""
        ...

    def upload(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies on the device, for kernels launched afterwards; inside ``running``.

        The sources must not change until ``finish`` or ``download``. The first upload of a run
        starts at once; a later one starts when the kernels launched before it have ended.
        """
        ...

    def fill(self, pairs: Pairs) -> None:
        """Copy the first of each pair to the second, a place on the device that no run reads now.

        Both are contiguous and of one dtype.
        """
        ...

    def capture(self, work: Callable[[], tuple[torch.Tensor, ...]]) -> Captured:
        """Record the kernels that `work` launches without running them; inside ``running``.

        The memory it uses must stay reserved for it. Raises what `work` raises, and CudaError for
        calls that cannot be captured: those that wait for the device.
        """
        ...

    def replayer(self) -> Replayer:
        """Return what replays this queue's captures without Python."""
        ...

    def gather(
        self,
        table: torch.Tensor,
        ids: torch.Tensor,
        hot: HotRows | None = None,
        *,
        placed: torch.Tensor | None = None,
        threads: int = GATHER_THREADS,
    ) -> torch.Tensor:
        """Return rows `ids` int64 [K] of `table` [R, F] on the device; both are in host memory.

        Rows with a copy in `hot` are read from there. `placed` is a copy of `ids` on the device, if
        there is one. At most `threads` of the device read. The result is for kernels launched
        afterwards; inside ``running``. Nobody checks ids. As with ``upload``, the arguments must
        not change.
        """
        ...

    def download(self, pairs: Pairs) -> None:
        """Copy the first of each pair, computed on the device, to the second in host memory.

        Returns when all is computed and copied. Places are contiguous.
        """
        ...

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors in pinned host memory, like those of requests, which copies fast."""
        ...

    def landing(self, output: torch.Tensor) -> torch.Tensor:
        """Return such memory for the download of `output`."""
        ...

    def finish(self) -> None:
        """Wait for everything launched; raises what the device raised meanwhile."""
        ...


class HostQueue:
    """The processor as a queue: every operation is done at once."""

    device = torch.device("cpu")

    def __init__(self, *, bounded: bool = False) -> None:
        """`bounded`: as if there were multiprocessors reserved for short runs."""
        self.kinds: Sequence[StreamKind] = tuple(StreamKind) if bounded else UNPARTITIONED
        self._captured: WeakValueDictionary[int, _Repeated] = WeakValueDictionary()

    @contextmanager
    def running(self, kind: StreamKind = StreamKind.ORDINARY) -> Iterator[None]:
        """See ``Queue``."""
        yield

    def upload(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Queue``."""
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def fill(self, pairs: Pairs) -> None:
        """See ``Queue``."""
        for tensor, place in pairs:
            place.copy_(tensor)

    def capture(self, work: Callable[[], tuple[torch.Tensor, ...]]) -> Captured:
        """See ``Queue``; `work` runs at once, and again at each launch, into the same tensors."""
        run = _Repeated(work)
        self._captured[run.handle] = run
        return run

    def replayer(self) -> Replayer:
        """See ``Queue``; it needs Python after all."""
        return host_replayer(
            lambda handle: self._captured[handle].launch(), dict.fromkeys(self.kinds, 0)
        )

    def gather(
        self,
        table: torch.Tensor,
        ids: torch.Tensor,
        hot: HotRows | None = None,
        *,
        placed: torch.Tensor | None = None,
        threads: int = GATHER_THREADS,
    ) -> torch.Tensor:
        """See ``Queue``."""
        out = torch.index_select(table, 0, ids)
        if hot is not None:
            slots = hot.slot_of[ids]
            there = slots >= 0
            out[there] = hot.rows[slots[there]]
        return out

    def download(self, pairs: Pairs) -> None:
        """See ``Queue``."""
        for output, place in pairs:
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
    """A stand-in for a captured run on the processor."""

    def __init__(self, work: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        self._work = work
        self.outputs = work()
        self.handle = id(self)

    def launch(self) -> None:
        with torch.inference_mode():
            for output, new in zip(self.outputs, self._work(), strict=True):
                output.copy_(new)

    def forget(self) -> None:
        pass
