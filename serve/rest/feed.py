"""Updates of live views for those who watch them.

One thread of low priority reads the database once a second for each view that somebody watches,
however many do. A watcher gets all numbers first, and then what changed; one that reads slowly gets
all numbers again.
"""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from serve.niceness import IDLE_CLASS, be_nice
from serve.obs.live.view import Focus, View
from serve.obs.read import reading
from serve.rest.errors import RestError, retry_headers
from serve.rest.replies import Pieces

#: Most watchers; one more is refused.
MOST_WATCHERS = 16
#: Most questions that wait for the thread; one more is refused.
MOST_QUESTIONS = 16
_RETRY_MS = 1000
#: Time between two updates.
EVERY_S = 1.0
_Result = TypeVar("_Result")


class Watched:
    """One view and its watchers."""

    def __init__(self, focus: Focus) -> None:
        self.view = View(focus)
        self.watchers = 0
        #: Number of updates so far; the last one, and all numbers at that time.
        self.number = 0
        self.changes = self.all = b""
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Feed:
    """All views that somebody watches; to be used inside one event loop."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._threads = ThreadPoolExecutor(1, "live", be_nice, (IDLE_CLASS,))
        self._watched: dict[Focus, Watched] = {}
        #: Questions that wait for the thread or have it, also of clients that have gone.
        self._questions = 0
        self._closed = False

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        for one in self._watched.values():
            one.changed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ask(self, question: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Return what `question` reads from the database, on the thread.

        Raises ServeError, and RestError when `MOST_QUESTIONS` wait.
        """
        if self._closed:
            raise RestError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down")
        if self._questions >= MOST_QUESTIONS:
            raise RestError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{self._questions} questions wait for the database, as many as may; try again "
                "later",
                retry_headers(_RETRY_MS),
            )
        self._questions += 1
        try:
            return await self._read(question)
        finally:
            self._questions -= 1

    async def _read(self, question: Callable[[sqlite3.Connection], _Result]) -> _Result:
        def answer() -> _Result:
            with reading(self._database) as db:
                return question(db)

        return await asyncio.get_running_loop().run_in_executor(self._threads, answer)

    def watch(self, focus: Focus) -> Pieces:
        """Return the updates as server-sent events, until the iterator is closed.

        Raises RestError when there are `MOST_WATCHERS`.
        """
        watchers = sum(one.watchers for one in self._watched.values())
        if watchers >= MOST_WATCHERS:
            raise RestError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{watchers} pages watch this server, as many as may; close one and try again",
            )
        watched = self._watched.setdefault(focus, Watched(focus))
        watched.watchers += 1
        if watched.task is None:
            watched.task = asyncio.ensure_future(self._keep(watched))
        return EventStream(self._events(watched), lambda: self._leave(watched))

    async def _events(self, watched: Watched) -> AsyncIterator[bytes]:
        seen = 0
        while not self._closed:
            if watched.number > seen:
                yield watched.changes if seen and watched.number == seen + 1 else watched.all
                seen = watched.number
            else:
                await watched.changed.wait()

    def _leave(self, watched: Watched) -> None:
        watched.watchers -= 1
        if not watched.watchers:
            self._watched.pop(watched.view.focus, None)
            if watched.task is not None:
                watched.task.cancel()

    async def _keep(self, watched: Watched) -> None:
        """Update a view once a second until it is cancelled."""
        loop = asyncio.get_running_loop()
        sent: dict[int, Any] = {}
        while True:
            begun_s = loop.time()
            try:
                seen = await self._read(lambda db: watched.view.update(db, time.time()))
            except Exception as error:
                watched.all = watched.changes = event("problem", {"error": str(error)})
            else:
                points = {point.start_s: point for point in seen["points"]}
                fresh = [point for at, point in points.items() if sent.get(at) != point]
                sent = points
                watched.all = event("all", seen)
                watched.changes = event("changes", seen | {"points": fresh})
            watched.number += 1
            changed, watched.changed = watched.changed, asyncio.Event()
            changed.set()
            await asyncio.sleep(max(EVERY_S - (loop.time() - begun_s), 0.2))


class EventStream:
    """Iterator that says when it is closed, also when it never began."""

    def __init__(self, events: AsyncIterator[bytes], closed: Callable[[], None]) -> None:
        self._events = events
        self._closed: Callable[[], None] | None = closed

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._events)

    async def aclose(self) -> None:
        """End it. Idempotent."""
        if self._closed is not None:
            self._closed()
            self._closed = None


def event(name: str, data: Any) -> bytes:
    """Return a server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))
