"""Streams of a client of several servers: every request of one is a call of its own."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from serve.client.errors import ClientError, TimedOut
from serve.client.retries import TimeLimit
from serve.core.cluster.commands import SendAttempt
from serve.wire.messages import Failure, WireRequest, encode_response, encode_stream_answer

#: Calls of one stream at once, those among them whose answers nobody has read yet.
AT_ONCE = 32


def graph_of(request: WireRequest) -> str:
    """Return the graph that the request names; empty for none."""
    return str(request.parameters.get("graph") or "")


def marked(response: bytes, step: SendAttempt) -> bytes:
    """Return the response with what only the client knows: who answered, and at which attempt."""
    # Messages that follow each other are one with the fields of both.
    facts = encode_response("", {}, parameters={"machine": step.machine, "attempts": step.attempt})
    return facts + response


def stream_message(found: bytes | ClientError, request_id: str) -> bytes:
    """Return the message of a stream that carries an answer or an error."""
    if not isinstance(found, ClientError):
        return encode_stream_answer(found)
    parameters: dict[str, Any] = {"status": found.code}
    if found.retry_after_s is not None:
        parameters["retry_after_ms"] = round(found.retry_after_s * 1000)
    return encode_stream_answer(Failure(found.message, request_id, parameters))


def _late() -> TimedOut:
    return TimedOut.local("the stream has not ended within its time limit")


class AsyncCalls:
    """Answers to the messages of a stream, in the order in which they come."""

    def __init__(
        self,
        ask: Callable[[bytes], Awaitable[bytes]],
        messages: AsyncIterator[bytes],
        limit: TimeLimit,
    ) -> None:
        """Have every message answered by `ask`, until the time limit."""
        self._ask, self._messages, self._limit = ask, messages, limit
        self._places = asyncio.Semaphore(AT_ONCE)
        self._answers: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the answers; raises TimedOut, and what a call raises."""
        self._start(self._read())
        while True:
            try:
                async with asyncio.timeout(self._limit.remaining_s):
                    found = await self._answers.get()
            except TimeoutError:
                raise _late() from None
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            self._places.release()
            yield found

    def cancel(self) -> None:
        """Give up what has no answer. Idempotent."""
        for task in tuple(self._tasks):
            task.cancel()

    def _start(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read(self) -> None:
        calls: set[asyncio.Task[None]] = set()
        async for message in self._messages:
            await self._places.acquire()
            call = self._start(self._one(message))
            calls.add(call)
            call.add_done_callback(calls.discard)
        if calls:
            await asyncio.wait(calls)
        self._answers.put_nowait(None)

    async def _one(self, message: bytes) -> None:
        try:
            answer: bytes | BaseException = await self._ask(message)
        except Exception as error:
            answer = error
        self._answers.put_nowait(answer)


class Calls:
    """The same for threads."""

    def __init__(
        self, ask: Callable[[bytes], bytes], messages: Iterator[bytes], limit: TimeLimit
    ) -> None:
        """Have every message answered by `ask`, until the time limit."""
        self._ask, self._messages, self._limit = ask, messages, limit
        self._reading = threading.Lock()
        self._over = threading.Event()
        self._places = threading.Semaphore(AT_ONCE)
        #: An answer, an error, or None when a thread has ended.
        self._answers: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()
        self._threads = 0

    def __iter__(self) -> Iterator[bytes]:
        """Yield the answers; raises TimedOut, and what a call raises."""
        self._start()
        ended = 0
        while ended < self._threads:
            try:
                found = self._answers.get(timeout=self._limit.remaining_s)
            except queue.Empty:
                raise _late() from None
            if isinstance(found, BaseException):
                raise found
            if found is None:
                ended += 1
            else:
                self._places.release()
                yield found

    def cancel(self) -> None:
        """Give up what has no answer. Idempotent."""
        self._over.set()
        self._places.release(AT_ONCE)

    def _start(self) -> None:
        """Begin a thread; each begins the next once it has a message, up to the most."""
        self._threads += 1
        threading.Thread(target=self._work, name="stream of several servers", daemon=True).start()

    def _work(self) -> None:
        try:
            while True:
                self._places.acquire()
                with self._reading:
                    message = None if self._over.is_set() else next(self._messages, None)
                    if message is None:
                        break
                    if self._threads < AT_ONCE:
                        self._start()
                self._answers.put(self._ask(message))
        except Exception as error:
            self._answers.put(error)
        finally:
            self._places.release()
            self._answers.put(None)
