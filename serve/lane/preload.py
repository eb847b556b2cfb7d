"""Imports of the fork server, from which all lanes are forked: torch, PyG, all a lane needs.

Service managers send SIGTERM to every process of a service, and a terminal that is closed SIGHUP.
Only the main process acts on them: lanes and their fork server must live until what was accepted is
answered.
"""

import gc
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from serve.ipc.orphans import adopt_orphans, end_children_at_exit
from serve.ipc.signals import DRAINING, HANGUP, IGNORED


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
    from serve.models import zoo as zoo

adopt_orphans()
end_children_at_exit()
# It tells of each orphan that ends.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected")
for number in (*DRAINING, HANGUP, *IGNORED):
    signal.signal(number, signal.SIG_IGN)

# A collection writes to every object that it looks at, and so would copy their pages into each lane.
gc.collect()
gc.freeze()
