"""Where a model is measured: how its memory is traced there, and what its time is."""

from collections.abc import Callable
from typing import Protocol

import torch

from serve.estimate.memory import MemoryTrace
from serve.lane import clock
from serve.lane.measure.tracing import trace

Run = Callable[[], torch.Tensor]


class Site(Protocol):
    """A device as calibration sees it."""

    #: As torch names it.
    name: str

    def place(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`inputs` where a forward pass finds them, so that it allocates nothing for them."""
        ...

    def stage(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`inputs` where a lane finds a request's, so that a run takes the time it will take."""
        ...

    def trace(
        self, run: Run, module: torch.nn.Module, num_nodes: int, num_edges: int
    ) -> MemoryTrace:
        """Every allocation and free of `run()` on placed inputs, its output's free included."""
        ...

    def time_ns(self, run: Run) -> int:
        """How long `run()` takes on an idle lane."""
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

    def trace(
        self, run: Run, module: torch.nn.Module, num_nodes: int, num_edges: int
    ) -> MemoryTrace:
        """See ``Site``."""
        return trace(run, module, num_nodes, num_edges)

    def time_ns(self, run: Run) -> int:
        """On one thread its processor time, which is its time on a core of its own."""
        started_ns = clock.work_ns()
        run()
        return clock.work_ns() - started_ns
