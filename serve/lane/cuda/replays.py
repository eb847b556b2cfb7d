"""Runs that were captured as CUDA graphs: which of a lane's, and for how long.

A capture fixes shapes and addresses, so it serves runs of exactly one shape. A shape is captured
once it has recurred, while the lane has nothing else to do; the one not used for longest makes room
for another. What cannot be captured (it waits for the device, or keeps tensors of a run) is
launched as ever, and not tried again.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

_log = logging.getLogger(__name__)

#: Captured after so many runs of a shape; where the lane is never idle, after so many times more.
_AFTER, _BUSY_FACTOR = 8, 4
#: Captured at once, and shapes counted.
_MOST, _MOST_COUNTED = 32, 1024


class NoRoom(Exception):
    """The memory that captured runs share has no room for another."""


@dataclass(frozen=True, slots=True)
class RunShape:
    """All that a captured run depends on besides the content of its inputs."""

    #: Of the model, as lanes know it.
    key: str
    #: Name, dtype as numpy calls it, and shape of each.
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    #: On which of the lane's streams: a capture keeps its priority.
    urgent: bool = False


class Captured(Protocol):
    """A run that was written down."""

    #: Where each launch leaves its answer.
    output: torch.Tensor

    def launch(self) -> None:
        """Start all of it on the current stream; raises CudaError."""
        ...

    def forget(self) -> None:
        """Free it; nothing of it runs."""
        ...


@dataclass(frozen=True, slots=True)
class FixedRun:
    """A captured run and the tensors it reads, to be filled before each launch."""

    inputs: Mapping[str, torch.Tensor]
    captured: Captured


class Replays:
    """The captured runs of one lane."""

    def __init__(
        self, capture: Callable[[RunShape], FixedRun], *, most: int = _MOST, after: int = _AFTER
    ) -> None:
        """`capture` raises NoRoom where another has to go first, whatever else where it cannot."""
        self._capture = capture
        self._most, self._after = most, after
        #: By use, the oldest first.
        self._runs: OrderedDict[RunShape, FixedRun] = OrderedDict()
        #: How often each was asked for that is not captured, None: it cannot be; as above.
        self._asked: OrderedDict[RunShape, int | None] = OrderedDict()
        self._due: RunShape | None = None

    def find(self, shape: RunShape) -> FixedRun | None:
        """The captured run of that shape; None: there is none, and one more was asked for."""
        found = self._runs.get(shape)
        if found is not None:
            self._runs.move_to_end(shape)
            return found
        asked = self._asked.pop(shape, 0)
        self._asked[shape] = asked if asked is None else asked + 1
        if asked is not None and asked + 1 >= self._after:
            self._due = shape
        if len(self._asked) > _MOST_COUNTED:
            self._asked.popitem(last=False)
        return None

    def capture_due(self, *, idle: bool) -> None:
        """Capture the run that has recurred, if one has; between two runs of the lane."""
        shape = self._due
        asked = None if shape is None else self._asked.get(shape)
        if shape is None or asked is None:
            self._due = None
        elif idle or asked >= _BUSY_FACTOR * self._after:
            self._due = None
            self._try(shape)

    def give_up(self, shape: RunShape, reason: object) -> None:
        """Launch runs of that shape from now on."""
        _log.warning("model %s: runs of %s are launched: %s", shape.key, _told(shape), reason)
        run = self._runs.pop(shape, None)
        if run is not None:
            run.captured.forget()
        self._asked[shape] = None

    def forget(self, key: str) -> None:
        """Free all of a model's; before its weights are gone."""
        for shape in [shape for shape in self._runs if shape.key == key]:
            self._runs.pop(shape).captured.forget()
        for shape in [shape for shape in self._asked if shape.key == key]:
            del self._asked[shape]

    def __len__(self) -> int:
        """How many are captured."""
        return len(self._runs)

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
                _log.info("model %s: runs of %s are replayed", shape.key, _told(shape))
            return

    def _drop_oldest(self) -> None:
        _, run = self._runs.popitem(last=False)
        run.captured.forget()


def _told(shape: RunShape) -> str:
    return ", ".join(f"{name} {list(size)}" for name, _, size in shape.inputs)
