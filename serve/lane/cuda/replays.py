"""Cache of a lane's runs that were captured as CUDA graphs.

A capture fixes shapes and addresses, so it serves runs of exactly one shape, or of a bucket's
(``buckets``). A shape that recurs is captured while the lane is idle; the least recently used one
makes room for another. Runs that cannot be captured (they wait for the device, or keep tensors of a
run) are launched as usual, and not tried again.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from serve.lane.cuda.streams import StreamKind
from serve.lane.models.sizing import SHORT, Sizing

_log = logging.getLogger(__name__)

#: Runs of a shape before its capture, those of a bucket, and the factor on them for a lane that is
#: never idle.
_AFTER, _AFTER_BUCKET, _BUSY_FACTOR = 8, 1, 4
#: Upper bounds of captured runs and of counted shapes.
_MOST, _MOST_COUNTED = 256, 1024

#: Name, numpy dtype name and shape of an input.
RunInput = tuple[str, str, tuple[int, ...]]


class NoRoom(Exception):
    """The shared memory of captured runs has no room for another one."""


@dataclass(frozen=True, slots=True)
class RunShape:
    """Properties that a captured run depends on, besides the content of its inputs."""

    #: The model's key, as lanes know it.
    key: str
    inputs: tuple[RunInput, ...]
    #: Which of the lane's streams: a capture keeps its priority.
    kind: StreamKind = StreamKind.ORDINARY
    #: The sizes are a bucket's, which smaller graphs use too.
    is_bucket: bool = False


class Captured(Protocol):
    """A captured run."""

    #: Output tensors of every launch.
    outputs: tuple[torch.Tensor, ...]
    #: The capture as a ``Replayer`` knows it.
    handle: int

    def launch(self) -> None:
        """Start the run on the current stream; raises CudaError."""
        ...

    def forget(self) -> None:
        """Free the capture, which must not be running."""
        ...


class Looped(Protocol):
    """A captured run that a loop replays by itself, see ``packet_loop``."""

    def drop(self) -> None:
        """Have the loop replay it no more."""
        ...

    def used_again(self) -> int:
        """Return how many runs the loop had replayed when it replayed this one last.

        Returns 0 when that was asked before and it was not replayed since.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedRun:
    """A captured run and the tensors it reads, to be filled before each launch."""

    inputs: Mapping[str, torch.Tensor]
    captured: Captured
    sizing: Sizing = SHORT
    looped: Looped | None = None

    def forget(self) -> None:
        """Free the capture, which must not be running."""
        if self.looped is not None:
            self.looped.drop()
        self.captured.forget()


class Replays:
    """The captured runs of one lane."""

    def __init__(
        self, capture: Callable[[RunShape], FixedRun], *, most: int = _MOST, after: int = _AFTER
    ) -> None:
        """`capture` raises NoRoom when another run must go first; other errors are for good."""
        self._capture = capture
        self._most, self._after = most, after
        #: Least recently used first.
        self._runs: OrderedDict[RunShape, FixedRun] = OrderedDict()
        #: Number of requests for each shape without a capture; None when it cannot be captured.
        self._asked: OrderedDict[RunShape, int | None] = OrderedDict()
        self._due: RunShape | None = None

    def find(self, shape: RunShape) -> FixedRun | None:
        """Return the captured run of that shape; without one, count the request."""
        found = self._runs.get(shape)
        if found is not None:
            self._runs.move_to_end(shape)
            return found
        asked = self._asked.pop(shape, 0)
        self._asked[shape] = asked if asked is None else asked + 1
        if asked is not None and asked + 1 >= self._wanted(shape):
            self._due = shape
        if len(self._asked) > _MOST_COUNTED:
            self._asked.popitem(last=False)
        return None

    @property
    def is_due(self) -> bool:
        """True when a run is to be captured as soon as no packet waits."""
        return self._due is not None

    def capture_due(self, *, idle: bool) -> None:
        """Capture a run that has recurred, if there is one; call it between two runs."""
        shape = self._due
        asked = None if shape is None else self._asked.get(shape)
        if shape is None or asked is None:
            self._due = None
        elif idle or asked >= _BUSY_FACTOR * self._wanted(shape):
            self._due = None
            self._try(shape)

    def give_up(self, shape: RunShape, reason: object) -> None:
        """Launch runs of that shape from now on."""
        _log.warning("model %s: runs of %s are launched: %s", shape.key, _text(shape), reason)
        run = self._runs.pop(shape, None)
        if run is not None:
            run.forget()
        self._asked[shape] = None

    def forget(self, key: str) -> None:
        """Free all captures of a model, before its weights are freed."""
        for shape in [shape for shape in self._runs if shape.key == key]:
            self._runs.pop(shape).forget()
        for shape in [shape for shape in self._asked if shape.key == key]:
            del self._asked[shape]

    def __len__(self) -> int:
        """Return the number of captured runs."""
        return len(self._runs)

    def _wanted(self, shape: RunShape) -> int:
        """Return the number of runs of that shape before its capture."""
        return _AFTER_BUCKET if shape.is_bucket else self._after

    def _try(self, shape: RunShape) -> None:
        while len(self._runs) >= self._most:
            self._drop_oldest()
        while True:
            try:
                self._runs[shape] = self._capture(shape)
            except NoRoom as error:
                if self._runs:
                    self._drop_oldest()
                    continue
                self.give_up(shape, error)
            except Exception as error:
                self.give_up(shape, f"{type(error).__name__}: {error}")
            else:
                self._asked.pop(shape, None)
                _log.info("model %s: runs of %s are replayed", shape.key, _text(shape))
            return

    def _drop_oldest(self) -> None:
        # What the loop has replayed since the last time is used later than what Python has not.
        used = {shape: run.looped.used_again() for shape, run in self._runs.items() if run.looped}
        for shape in sorted(filter(used.__getitem__, used), key=used.__getitem__):
            self._runs.move_to_end(shape)
        _, run = self._runs.popitem(last=False)
        run.forget()


def _text(shape: RunShape) -> str:
    return ", ".join(f"{name} {list(size)}" for name, _, size in shape.inputs)
