"""Imports of the fork server, from which all lanes are forked: torch, PyG, all a lane needs.

Service managers send SIGTERM to every process of a service, and a terminal that is closed SIGHUP.
Only the main process acts on them: lanes and their fork server must live until what was accepted is
answered.
"""

import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np

from serve.ipc.orphans import adopt_orphans, end_children_at_exit
from serve.ipc.signals import DRAINING, HANGUP, IGNORED
from serve.lane.patient_fork import fork_patiently


@contextmanager
def _left_out(name: str) -> Iterator[None]:
    """Replace module `name` by an empty one while open; later imports get the real one."""
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]


# Importing PyG takes a second, which a restarted lane would pay again. It imports torch._dynamo,
# which takes as long once more, to look one class up when it is asked about compiled models; torch
# itself imports that module on first use.
with _left_out("torch._dynamo"):
    from serve.lane import processor as processor
    from serve.models import zoo as zoo

adopt_orphans()
end_children_at_exit()
fork_patiently()
# Python's own generator does so by itself; lanes would draw the same numbers from numpy's.
os.register_at_fork(after_in_child=np.random.seed)
# It tells of each orphan that ends.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected")
for number in (*DRAINING, HANGUP, *IGNORED):
    signal.signal(number, signal.SIG_IGN)

# A collection writes to each object that it looks at: lanes would get copies of all those pages.
gc.collect()
gc.freeze()
