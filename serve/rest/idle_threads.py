"""Threads for work on large bodies, which give way to everything else on the machine."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: Work on fewer bytes takes less time than handing it to a thread.
_LEAST_BYTES = 64 * 1024
#: Two, so that one huge body does not hold up all others.
_THREADS = 2
#: Beside the policy, for systems that do not let threads change theirs.
_NICENESS = 19


def _give_way() -> None:
    """Have the calling thread run only where nobody else would, lanes of the largest niceness too.

    A thread as nice as a lane takes half of the core on which that runs a small request.
    """
    # Linux keeps both by thread. A limit may forbid changes.
    be_nice()
    with suppress(OSError):
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def be_nice() -> None:
    """Have the calling thread run behind what serves requests, and no later than the lanes."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


_threads = ThreadPoolExecutor(_THREADS, "large-bodies", _give_way)


async def in_thread(
    size_bytes: int,
    work: Callable[_Arguments, _Result],
    *arguments: _Arguments.args,
    **options: _Arguments.kwargs,
) -> _Result:
    """Return what `work` returns: in a thread when it is about many bytes, else at once."""
    if size_bytes < _LEAST_BYTES:
        return work(*arguments, **options)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, lambda: work(*arguments, **options))
