"""Priorities of a running server's threads, set from outside: what the kernel could do for it."""

import ctypes
import os
import platform
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

#: plain: nothing is changed. short: the threads of the main process have the shortest time slice.
#: realtime: the main process goes before the client, that before the lanes, and all before every
#: other program, which needs CAP_SYS_NICE.
PRIORITIES = ("plain", "short", "realtime")
#: Numbers of `sched_setattr`, which Python and most C libraries lack.
_NUMBERS = {"x86_64": 314, "aarch64": 274}
#: The shortest slice that Linux takes, from 6.12 on.
_SHORTEST_NS = 100_000
_libc = ctypes.CDLL(None, use_errno=True)


def set_priorities(way: str, server: int, lanes: Iterable[int], client: int) -> None:
    """Set the threads of these processes as `way`, one of `PRIORITIES`, says; a client's anew.

    Raises ValueError for another way, and OSError for one that the kernel does not allow.
    """
    if way not in PRIORITIES:
        raise ValueError(f"priorities: '{way}' is none of {', '.join(PRIORITIES)}")
    if way == "realtime":
        for level, pids in enumerate((lanes, (client,), (server,)), 1):
            _schedule(pids, os.SCHED_FIFO, level)
        return
    _schedule((client,), os.SCHED_OTHER)
    if way == "short":
        for thread in _threads((server,)):
            _shorten(thread)


def _schedule(pids: Iterable[int], policy: int, level: int = 0) -> None:
    for thread in _threads(pids):
        os.sched_setscheduler(thread, policy, os.sched_param(level))


def _threads(pids: Iterable[int]) -> list[int]:
    found = []
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            found += [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
    return found


def _shorten(thread: int) -> None:
    """Give an ordinary thread the shortest time slice; it keeps its niceness."""
    nice = os.getpriority(os.PRIO_PROCESS, thread)
    layout = struct.Struct("=IIQiIQQQ")
    attributes = layout.pack(layout.size, os.SCHED_OTHER, 0, nice, 0, _SHORTEST_NS, 0, 0)
    if _libc.syscall(_NUMBERS[platform.machine()], thread, ctypes.c_char_p(attributes), 0):
        code = ctypes.get_errno()
        raise OSError(code, f"sched_setattr of thread {thread}: {os.strerror(code)}")
