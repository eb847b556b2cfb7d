"""Sites where a model is measured: how memory is traced and runs are timed there."""

from collections.abc import Callable
from typing import Protocol

import torch

from serve.estimate.memory import MemoryTrace
from serve.lane import clock
from serve.lane.measure.tracing import trace

Run = Callable[[], object]


class Site(Protocol):
    """A device as calibration sees it."""

    #: As torch names it.
    name: str

    def place(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `inputs` where a forward pass finds them without allocating."""
        ...

    def stage(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `inputs` where a lane finds a request's, so that timed runs are realistic."""
        ...

    def trace(self, run: Run, module: torch.nn.Module, *counts: int) -> MemoryTrace:
        """Trace the allocations of `run()` on placed inputs, the free of its output included."""
        ...

    def time_ns(self, run: Run) -> int:
        """Return the time of `run()` on an idle lane."""
        ...


class Processor:
    """This process, on its own threads."""

    name = "cpu"

    def place(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Site``."""
        return inputs

    def stage(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Site``."""
        return inputs

    def trace(self, run: Run, module: torch.nn.Module, *counts: int) -> MemoryTrace:
        """See ``Site``."""
        return trace(run, module, *counts)

    def time_ns(self, run: Run) -> int:
        """Return the run's time; with one thread its processor time, as on a core of its own."""
        started_ns = clock.work_ns()
        run()
        return clock.work_ns() - started_ns
