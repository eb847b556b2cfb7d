"""Threads for work on large bodies, which give way to everything else on the machine."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from serve.niceness import IDLE_CLASS, be_nice

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: Work on fewer bytes takes less time than handing it to a thread.
_LEAST_BYTES = 64 * 1024
#: Two, so that one huge body does not hold up all others.
_THREADS = 2


_threads = ThreadPoolExecutor(_THREADS, "large-bodies", be_nice, (IDLE_CLASS,))


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
