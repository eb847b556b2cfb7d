"""Limit on what one client does at once: the others wait for their turn."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from serve.client.errors import TimedOut


class AsyncTurns:
    """Places for tasks of one event loop, given out in the order in which they were asked for."""

    def __init__(self, most: int | None, what: str) -> None:
        """Have `most` places, None for any number; `what` names what takes them in errors."""
        self._most, self._what = most, what
        self._free = None if most is None else asyncio.Semaphore(most)

    @asynccontextmanager
    async def taken(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Hold a place within the context; raises TimedOut when none is free in time."""
        if self._free is None:
            yield
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._free.acquire()
        except TimeoutError:
            raise _none_free(self._most, self._what) from None
        try:
            yield
        finally:
            self._free.release()


class Turns:
    """The same for threads."""

    def __init__(self, most: int | None, what: str) -> None:
        """Have `most` places, None for any number; `what` names what takes them in errors."""
        self._most, self._what = most, what
        self._free = None if most is None else threading.Semaphore(most)

    @contextmanager
    def taken(self, timeout_s: float | None) -> Iterator[None]:
        """Hold a place within the context; raises TimedOut when none is free in time."""
        if self._free is None:
            yield
            return
        if not self._free.acquire(timeout=timeout_s):
            raise _none_free(self._most, self._what)
        try:
            yield
        finally:
            self._free.release()


def _none_free(most: int | None, what: str) -> TimedOut:
    return TimedOut.local(f"{what}: at most {most} at once, and none ended within the time limit")
