"""One ModelStreamInfer stream: several requests in flight, answers as they finish.

Three kinds of threads share a ``Stream``: one reads requests, workers run them, and the call's own
thread writes answers. Back-pressure: the reader pauses while `window` requests are unanswered or
their answers unwritten, so that a client that does not read cannot fill the memory.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import grpc

from serve.errors import InvalidInput, NotReady, QueueFull, ServeError
from serve.rpc.cancellation import Cancellation
from serve.rpc.gate import Gate
from serve.rpc.status import Status, status_of
from serve.rpc.workers import Workers
from serve.server.clock import now_ns
from serve.threads import Thread
from serve.wire.messages import (
    Failure,
    ParameterValue,
    WireError,
    WireRequest,
    decode_request,
    encode_stream_answer,
)

#: Runs a request: (request, its message, arrived_ns, cancellation) to the serialized response.
Infer = Callable[[WireRequest, bytes, int, Cancellation], bytes]
#: Most requests of one stream that are in flight or answered and not yet written.
WINDOW = 256
#: Time after which a client that reads nothing of what it was answered may lose its stream.
UNREAD_NS = 10_000_000_000

_IDLE = "the stream was idle, and its place was needed; open another one"
_NO_THREAD = "no thread is available for this request; try again later"
_RETRY_NS = 1_000_000_000


class _Outgoing(NamedTuple):
    """Outcome of one request of the stream, waiting to be written."""

    content: bytes | Exception
    request_id: str
    #: True when the request passed the gate, which counts it until its answer is written.
    inside: bool


class Stream:
    """State of one stream; any thread may call ``close`` and ``give_up`` at any time."""

    def __init__(
        self,
        infer: Infer,
        gate: Gate,
        workers: Workers,
        window: int = WINDOW,
        *,
        cancel: Callable[[], object] = lambda: None,
        lost: Callable[[int, ServeError], None] = lambda arrived_ns, error: None,
    ) -> None:
        """`cancel` ends the call when its client does not read.

        `lost` keeps a record of a request that arrived and ended before `infer`.
        """
        self._infer = infer
        self._gate = gate
        self._workers = workers
        self._window = threading.Semaphore(window)
        self._lock = threading.Lock()
        self._closed = False
        #: Number of unanswered requests, plus one while the reader reads.
        self._busy = 1
        #: Number of unwritten answers, and of those whose requests are inside the gate.
        self._unwritten = self._unsent = 0
        #: Time at which an answer was written last.
        self._progress_ns = now_ns()
        self._cancel, self._lost = cancel, lost
        self._given_up = False
        #: Why the stream ends although its client would send more.
        self._last: ServeError | None = None
        self._reading = True
        self._cancellations: set[Cancellation] = set()
        #: Answers to write; None marks the end of the stream.
        self._answers: SimpleQueue[_Outgoing | None] = SimpleQueue()

    def answers(self, messages: Iterator[bytes], *, raise_errors: bool) -> Iterator[bytes]:
        """Yield the serialized messages to send.

        Args:
            messages: Serialized requests, read on a thread of their own.
            raise_errors: Raise the first error instead of sending it as a message.
        """
        reader = Thread(target=self._read, args=(messages,), name="stream-reader")
        try:
            reader.start()
        except RuntimeError as error:
            raise QueueFull(f"no thread can read the stream: {error}", _RETRY_NS) from error
        while (answer := self._answers.get()) is not None:
            if isinstance(answer.content, bytes):
                yield encode_stream_answer(answer.content)
            elif raise_errors:
                raise answer.content
            else:
                yield encode_failure(status_of(answer.content), answer.request_id)
            self._sent(answer)
        if self._given_up:
            raise QueueFull(_IDLE, _RETRY_NS)
        if self._last is not None:
            raise self._last

    @property
    def idle_since_ns(self) -> int | None:
        """Time of the last answer, of a stream without requests in flight; None for others.

        A stream whose answers its client has not read for a while counts as idle.
        """
        with self._lock:
            return self._progress_ns if self._is_idle() else None

    def give_up(self) -> bool:
        """End an idle stream with an error; returns False when it is not idle any more."""
        with self._lock:
            if self._closed or not self._is_idle():
                return False
            self._given_up = self._closed = True
            unread = self._unwritten > 0
            unsent, self._unsent = self._unsent, 0
        for _ in range(unsent):
            self._gate.leave()
        self._answers.put(None)
        if unread:
            self._cancel()
        return True

    def end(self, error: ServeError) -> None:
        """Read no more, and end with `error` once all requests are answered.

        A stream whose client has sent all ends as it would have.
        """
        with self._lock:
            if not self._closed and self._reading and self._last is None:
                self._last = error
                self._tell_end()

    def _is_idle(self) -> bool:
        in_flight = self._busy > 1
        unread = self._unwritten > 0 and now_ns() - self._progress_ns < UNREAD_NS
        return not (in_flight or unread)

    def close(self) -> None:
        """Cancel all requests in flight, as the call has ended."""
        with self._lock:
            self._closed = True
            unsent, self._unsent = self._unsent, 0
            cancellations = tuple(self._cancellations)
        for _ in range(unsent):
            self._gate.leave()
        for cancellation in cancellations:
            cancellation.cancel()
        self._window.release()
        self._answers.put(None)

    def _read(self, messages: Iterator[bytes]) -> None:
        try:
            for message in messages:
                arrived_ns = now_ns()
                self._window.acquire()
                cancellation = Cancellation()
                with self._lock:
                    if self._closed or self._last is not None:
                        break
                    self._busy += 1
                    self._cancellations.add(cancellation)
                if not self._workers.give(partial(self._serve, message, arrived_ns, cancellation)):
                    refused = QueueFull(_NO_THREAD, _RETRY_NS)
                    self._lost(arrived_ns, refused)
                    self._end(cancellation, _Outgoing(refused, "", False))
        except grpc.RpcError:
            pass  # the client went away: `close` does the rest
        finally:
            with self._lock:
                self._reading = False
            self._done()

    def _serve(self, message: bytes, arrived_ns: int, cancellation: Cancellation) -> None:
        """Run one request, on a worker's thread."""
        request_id, inside = "", False
        try:
            request = decode_request(message)
            request_id = request.request_id
            self._gate.enter()
            inside = True
            content: bytes | Exception = self._infer(request, message, arrived_ns, cancellation)
        except WireError as error:
            self._lost(arrived_ns, InvalidInput(str(error)))
            content = error
        except Exception as error:
            if not inside and isinstance(error, NotReady):
                self._lost(arrived_ns, error)
            content = error
        self._end(cancellation, _Outgoing(content, request_id, inside))

    def _end(self, cancellation: Cancellation, answer: _Outgoing) -> None:
        """Queue a request's answer for writing, unless the call has ended."""
        with self._lock:
            self._cancellations.discard(cancellation)
            closed = self._closed
            if not closed:
                self._unsent += answer.inside
                self._unwritten += 1
                self._answers.put(answer)
        if closed and answer.inside:
            self._gate.leave()
        self._done()

    def _sent(self, answer: _Outgoing) -> None:
        self._window.release()
        with self._lock:
            self._unwritten -= 1
            self._progress_ns = now_ns()
            leaves = answer.inside and not self._closed
            self._unsent -= leaves
        if leaves:
            self._gate.leave()

    def _done(self) -> None:
        """Note that the reader or a request is finished; the last one ends the stream."""
        with self._lock:
            self._busy -= 1
            self._tell_end()

    def _tell_end(self) -> None:
        """End the stream when nothing is to be answered any more. Under the lock."""
        # Of a stream that reads no more, the reader may still wait for its client.
        waits = self._last is not None and self._reading
        if self._busy == int(waits):
            self._answers.put(None)


def encode_failure(status: Status, request_id: str) -> bytes:
    """Return the message of a stream for a request that ended with `status`."""
    parameters: dict[str, ParameterValue] = {"status": status.code.name}
    if status.retry_after_ms is not None:
        parameters["retry_after_ms"] = status.retry_after_ms
    return encode_stream_answer(Failure(status.text, request_id, parameters))
