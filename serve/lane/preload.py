"""Imports of the fork server, from which all lanes are forked: torch, PyG, all a lane needs.

Service managers send SIGTERM to every process of a service, and a terminal that is closed SIGHUP.
Only the main process acts on them: lanes and their fork server must live until what was accepted is
answered.
"""

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np

from serve.collector import imports_uncollected
from serve.ipc.child_signals import hear_only_of_ends
from serve.ipc.orphans import adopt_orphans, end_children_at_exit
from serve.ipc.signals import ignore_left_to_main
from serve.lane.patient_fork import fork_patiently


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


# Importing PyG takes a second, which a restarted lane would pay again. It imports torch._dynamo,
# which takes as long once more, to look one class up when it is asked about compiled models; torch
# itself imports that module on first use. PyG's data sets take a tenth, and few models need them.
# It also asks how torch was built, for which torch starts CUDA's driver. A process that is forked
# from one that has done so cannot use a GPU.
with imports_uncollected():
    import torch

    with (
        _left_out("torch._dynamo", "torch_geometric.datasets"),
        _asked_by_a_child(torch.__config__, "show"),
    ):
        import torch_geometric
        from torch_geometric.lazy_loader import LazyLoader

        from serve.lane import processor as processor
        from serve.models import zoo as zoo

torch_geometric.datasets = LazyLoader("datasets", vars(torch_geometric), "torch_geometric.datasets")

adopt_orphans()
end_children_at_exit()
fork_patiently()
# The fork server sets its handler after this.
os.register_at_fork(before=hear_only_of_ends)
# Python's own generator does so by itself; lanes would draw the same numbers from numpy's.
os.register_at_fork(after_in_child=np.random.seed)
# It tells of each orphan that ends.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected")
ignore_left_to_main()

# A collection writes to each object that it looks at: lanes would get copies of all those pages.
gc.collect()
gc.freeze()
