"""Torch and PyG, imported in half of the time that it takes to import them plainly."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from serve.collector import imports_uncollected


@contextmanager
def _left_out(*names: str) -> Iterator[None]:
    """Replace modules by empty ones while open; later imports get the real ones."""
    sys.modules.update({name: ModuleType(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


@contextmanager
def _asked_by_a_child(module: ModuleType, name: str) -> Iterator[None]:
    """Have a child process call the module's function `name` while open, and tell its text."""
    ask: Callable[[], str] = getattr(module, name)

    def asked() -> str:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(writing, ask().encode())
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading) as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        return text

    setattr(module, name, asked)
    try:
        yield
    finally:
        setattr(module, name, ask)


@contextmanager
def imported_lightly() -> Iterator[None]:
    """Import torch and PyG; while open, import what builds on them. In a process of one thread.

    PyG imports torch._dynamo, which takes longer than all else, to look one class up when it is
    asked about compiled models; torch itself imports that module on first use. PyG's data sets take
    a tenth, and few models need them. It also asks how torch was built, for which torch starts
    CUDA's driver. A process that is forked from one that has done so cannot use a GPU.
    """
    with imports_uncollected():
        import torch

        with (
            _left_out("torch._dynamo", "torch_geometric.datasets"),
            _asked_by_a_child(torch.__config__, "show"),
        ):
            import torch_geometric
            from torch_geometric.lazy_loader import LazyLoader

            yield
    name = "torch_geometric.datasets"
    torch_geometric.datasets = LazyLoader("datasets", vars(torch_geometric), name)
