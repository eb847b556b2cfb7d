"""Work of one lane, in order: up to the device, there, and down again.

``CudaQueue`` for a GPU, ``HostQueue`` for the processor, where nothing is asynchronous. This is
all a lane knows of its device.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

#: torch's own annotations stop here.
_cuda: Any = torch.cuda
#: Of all that CUDA offers, two levels are used: torch's names for them, lower is more urgent.
_URGENT, _ORDINARY = -1, 0


class Queue(Protocol):
    """One thread's, for one task at a time."""

    device: torch.device

    def running(self, *, urgent: bool = False) -> AbstractContextManager[None]:
        """While open, what this thread launches is this queue's; see ``upload``."""
        ...

    def upload(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies on the device, for what is launched from here on; inside ``running``.

        What they are copied from must stay as it is until ``finish`` or ``download``.
        """
        ...

    def download(self, output: torch.Tensor, place: torch.Tensor) -> None:
        """Wait for `output` and copy it to `place`, in host memory; returns when it is there."""
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

    def download(self, output: torch.Tensor, place: torch.Tensor) -> None:
        """See ``Queue``."""
        place.copy_(output)

    def finish(self) -> None:
        """See ``Queue``."""


class Copies:
    """The streams that copies of all lanes of a device go through, one for each direction.

    A device has one engine a direction: what is in a stream of its own does not stand in the way
    of kernels, and copies of several lanes follow each other as they would anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.up = _cuda.Stream(device)
        self.down = _cuda.Stream(device)


class CudaQueue:
    """A lane's two streams, ordinary and urgent. Waits by events, never for the device.

    An urgent stream's kernels take the processors that others' free; what runs is not stopped.
    """

    def __init__(self, device: torch.device, copies: Copies) -> None:
        self.device = device
        self._copies = copies
        # Held for good: torch hands the same 32 streams out again and again.
        self._streams = {
            False: _cuda.Stream(device, priority=_ORDINARY),
            True: _cuda.Stream(device, priority=_URGENT),
        }
        self._current = self._streams[False]

    @contextmanager
    def running(self, *, urgent: bool = False) -> Iterator[None]:
        """See ``Queue``."""
        self._current = self._streams[urgent]
        with torch.cuda.device(self.device), torch.cuda.stream(self._current):
            yield

    def upload(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Queue``."""
        # NOTE: the memory copied into may have been used by this lane's last task, on another
        # stream. That task was waited for, which is why no event orders the two.
        with torch.cuda.stream(self._copies.up):
            found = {
                name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()
            }
            copied = _cuda.Event()
            copied.record(self._copies.up)
        self._current.wait_event(copied)
        return found

    def download(self, output: torch.Tensor, place: torch.Tensor) -> None:
        """See ``Queue``."""
        computed, copied = _cuda.Event(), _cuda.Event(blocking=True)
        computed.record(self._current)
        self._copies.down.wait_event(computed)
        with torch.cuda.stream(self._copies.down):
            place.copy_(output, non_blocking=True)
            copied.record(self._copies.down)
        copied.synchronize()

    def finish(self) -> None:
        """See ``Queue``."""
        for stream in (self._copies.up, self._current, self._copies.down):
            ended = _cuda.Event(blocking=True)
            ended.record(stream)
            ended.synchronize()
