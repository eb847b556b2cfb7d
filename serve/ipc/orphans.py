"""Processes that a model started and left: adopted by the fork server, and ended with their lane.

A process group does not hold a process that began a session of its own, as daemons do. But when
its parent ends, the kernel gives it to the nearest ancestor that asked for orphans. Lanes and their
fork server ask: so whatever a lane leaves behind is a child of the fork server, and no lane.
"""

import atexit
import ctypes
import os
import select
import signal
import sys
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

#: Rounds of looking for children: those of a killed process come up in the next one.
_ROUNDS = 1000
#: Rounds without a child until there is none: one may have come to us behind the first's back.
_EMPTY_ROUNDS = 2
#: Time for a killed process to end; one that the kernel holds for longer keeps its children.
_END_MS = 5_000


def adopt_orphans() -> None:
    """Have the kernel give orphans below this process to it."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children_at_exit() -> None:
    """Have this process kill all its children, and those that come to it, before it ends."""
    ours = os.getpid()

    def end() -> None:
        if os.getpid() == ours:  # not a fork of it
            kill_children(ours)
            # Finalising an interpreter with torch takes seconds.
            sys.stderr.flush()
            os._exit(0)

    atexit.register(end)


def kill_children(pid: int, but: Set[int] = frozenset()) -> None:
    """Kill the children of a process that adopts orphans, and in turn those that come to it.

    Spares those of `but`, with whatever is below them.
    """
    killed = set(but)
    empty = 0
    for _ in range(_ROUNDS):
        found = [child for child in _children(pid) if child not in killed]
        empty = 0 if found else empty + 1
        if empty == _EMPTY_ROUNDS:
            return
        for child in found:
            _kill_child(child, pid)
        killed.update(found)


def _kill_child(child: int, pid: int) -> None:
    """Kill `child` and wait for its end, which gives its children to `pid`.

    Does nothing when it has ended and its id is that of another process by now.
    """
    with suppress(OSError):
        pidfd = os.pidfd_open(child)
        try:
            if _parent(child) == pid:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                ended = select.poll()
                ended.register(pidfd, select.POLLIN)
                ended.poll(_END_MS)
        finally:
            os.close(pidfd)


def _children(pid: int) -> list[int]:
    everybody = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [other for other in everybody if _parent(other) == pid]


def _parent(pid: int) -> int:
    """Return the id of the parent, 0 when there is none or the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The name before may hold any character.
    return int(stat.rpartition(")")[2].split()[1])
