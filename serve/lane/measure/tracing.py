"""Trace the tensor allocations of one forward pass.

The trace comes from torch's profiler. It is exact and names the operation of each allocation, but
misses memory that a kernel takes from the C library itself (sorting keys for a scatter: 32 bytes an
edge). A lane's meter sees that (``serve.native.Meter``). ``torch.profiler`` wraps the profiler used
here, and imports torch's compiler for it, which takes longer than a model's traces.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from serve.estimate.memory import MemoryTrace

_LAYER = "layer:"


def trace(run: Callable[[], object], module: torch.nn.Module, *counts: int) -> MemoryTrace:
    """Trace all CPU tensor allocations and frees of `run()`, the free of its output included.

    `counts` is the size of what it runs on.

    Labels are `layer (Type): operation`, with the layers of `module`.
    """
    # The profiler writes two lines to stderr for each use, unless told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # A collection now would free, and count, garbage of earlier runs.
    collects = gc.isenabled()
    gc.disable()
    try:
        with (
            _named_layers(module),
            profile(profile_memory=True, use_kineto=True) as profiler,
        ):
            output = run()
            del output
    finally:
        if collects:
            gc.enable()
    found: list[tuple[int, int, str]] = []
    recorded: Any = profiler
    for root in recorded.kineto_results.experimental_event_tree():
        _collect(root, "", "", found)
    found.sort(key=lambda event: event[0])
    return MemoryTrace(
        counts,
        tuple(size for _, size, _ in found),
        tuple(label for _, _, label in found),
    )


def _collect(event: Any, layer: str, operation: str, into: list[tuple[int, int, str]]) -> None:
    """Add (start, bytes, label) of every CPU allocation and free in the profiler's tree."""
    fields = event.extra_fields
    if hasattr(fields, "alloc_size"):
        if fields.device.type == "cpu":
            label = f"{layer}: {operation}" if layer and operation else layer or operation
            into.append((event.start_time_ns, fields.alloc_size, label))
        return
    name: str = event.name
    if name.startswith(_LAYER):
        layer, operation = name.removeprefix(_LAYER), ""
    elif "::" in name:
        operation = name
    for child in event.children:
        _collect(child, layer, operation, into)


@contextmanager
def _named_layers(module: torch.nn.Module) -> Iterator[None]:
    """Have every submodule mark its forward in the profiler's events while open."""
    active: list[Any] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(layer: torch.nn.Module, _: object) -> None:
            mark: Any = record_function(f"{_LAYER}{name} ({type(layer).__name__})")
            mark.__enter__()
            active.append(mark)

        return hook

    def leave(*_: object) -> None:
        active.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        for name, layer in module.named_modules():
            if name:
                hooks.callback(layer.register_forward_pre_hook(enter(name)).remove)
                hooks.callback(layer.register_forward_hook(leave).remove)
        try:
            yield
        finally:
            # A forward that raised has left its marks behind.
            while active:
                leave()
