"""Threads for calls: given out with the message, from a pool for each kind of call.

gRPC's synchronous server gives a call to a thread when its headers arrive. That thread asks for the
message, sleeps, and is woken again by gRPC's polling thread. Here the polling thread asks for the
message itself and hands the call over together with it. So a call wakes its thread once, and a call
whose message never comes holds no thread; it is ended after a time limit.

This stands on gRPC's private names (``grpc_internals``), because the bound on calls without a
message needs them. Where a release of gRPC lacks them, calls take gRPC's own way: the server works,
and such a call keeps its thread.

Nothing here may raise into the polling thread: gRPC has only one, and without it every call on
every connection hangs.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import grpc

from serve.rpc.grpc_internals import INTERNALS, GrpcInternals
from serve.rpc.refusals import (
    MALFORMED,
    MESSAGE_SIZE,
    NO_MESSAGE,
    NO_THREAD,
    NO_THREAD_TEXT,
    UNREAD,
    Refusals,
)
from serve.rpc.workers import Workers
from serve.threads import Thread

_log = logging.getLogger(__name__)

#: Time limit in seconds from a call's headers to its message.
RECEIVE_S = 10.0
#: Checks for calls without a message within that time. The age of a call is counted in checks, so
#: that no call ends because this process was stopped or had no processor.
_CHECKS = 10
#: Largest message that is handed to the protobuf library whole, since parsing costs a multiple of
#: its size. Methods with larger messages take bytes.
MAX_PARSED_BYTES = 64 * 1024

#: Name of gRPC's function that waits for the message of a call that has exactly one.
_ASK_ONE = "unary_request"
#: Number of arguments that gRPC passes to a responder, beside the function that runs it.
_RESPONDER_ARGUMENTS = 7


class _NeverDone(Future[Any]):
    """Result of every call. gRPC waits for it only to limit concurrent calls, which is not used."""

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Ignore the callback."""


class CallThreads(Executor):
    """The thread pool of a ``grpc.server`` without a limit on concurrent calls."""

    def __init__(
        self,
        workers: Workers,
        *,
        apart: Mapping[str, Workers] | None = None,
        receive_s: float = RECEIVE_S,
        refusals: Refusals | None = None,
        internals: GrpcInternals | None = INTERNALS,
    ) -> None:
        """Begin to watch for calls without a message; ``shutdown`` ends that and all workers.

        Args:
            workers: Pool of all methods that are not in `apart`.
            apart: Pools of single methods, by path.
            receive_s: Time limit for a call's message, after which the call is refused.
            refusals: Counts the calls that are refused here.
            internals: gRPC's private names; None to let gRPC receive messages itself.
        """
        self._workers = workers
        self._apart = {path.encode(): workers for path, workers in (apart or {}).items()}
        self._receive_s = receive_s
        self._refusals = refusals or Refusals()
        self._internals = internals
        self._never_done = _NeverDone()
        #: Calls without a message; the last dictionary holds those since the latest check.
        self._awaited: deque[dict[_Call, bool]] = deque({} for _ in range(_CHECKS + 1))
        self._shut = threading.Event()
        if internals is None:
            _log.warning(
                "gRPC %s lacks private names that this server uses: a call has a thread before its "
                "message arrives, and one whose message never comes keeps its thread",
                grpc.__version__,
            )
        Thread(target=self._watch, name="rpc-arrivals").start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a thread call `fn`; called by gRPC's polling thread. The future is never done."""
        if self._shut.is_set():
            raise RuntimeError("cannot schedule new calls after shutdown")
        internals = self._internals
        if (
            internals is not None
            and len(args) == _RESPONDER_ARGUMENTS
            and args[0] in internals.responders
        ):
            call = _Call(internals, self._refusals, fn, args)
            workers = self._apart.get(call.path, self._workers)
            try:
                if call.has_one_message:
                    self._receive(call, workers)
                else:
                    call.give_to(workers)
            except Exception:
                _log.exception("a call could not be started")
        elif not self._workers.give(partial(fn, *args, **kwargs)):
            self._refusals.count(NO_THREAD)
        return self._never_done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End idle threads now and all others after their calls; waits for none."""
        self._shut.set()
        for workers in (self._workers, *self._apart.values()):
            workers.shutdown()

    def _receive(self, call: "_Call", workers: Workers) -> None:
        """Ask for the call's message, and give the call to a thread when it arrives."""
        young = self._awaited[-1]
        young[call] = True

        def arrived() -> None:
            # Whoever removes the call from `young` decides its fate: this thread or `_watch`.
            if young.pop(call, False):
                call.give_to(workers)

        call.receive(arrived)

    def _watch(self) -> None:
        """Refuse calls whose message did not arrive in time; runs on a thread of its own."""
        while not self._shut.wait(self._receive_s / _CHECKS):
            old = self._awaited.popleft()
            self._awaited.append({})
            while old:
                try:
                    call, _ = old.popitem()
                    call.refuse(
                        NO_MESSAGE,
                        call.codes.deadline_exceeded,
                        f"message: it was not complete {self._receive_s:g} s after the call began",
                    )
                except KeyError:
                    break  # the message of the last one has just arrived
                except Exception:
                    _log.exception("a call without a message could not be ended")


class _Call:
    """One call, as gRPC hands it to its thread pool; the lock of gRPC's state guards changes."""

    def __init__(
        self,
        internals: GrpcInternals,
        refusals: Refusals,
        run: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> None:
        """`run` and its arguments are what gRPC would have a thread of its own call."""
        respond, rpc_event, state, behavior, ask, deserializer, serializer = arguments
        self._internals, self.codes = internals, internals.codes
        self._refusals = refusals
        self._state = state
        self._call = rpc_event.call
        self._deserializer, self._serializer = deserializer, serializer
        self.path: bytes = rpc_event.call_details.method or b""
        self.has_one_message = getattr(ask, "__name__", "") == _ASK_ONE
        self._begin = partial(run, respond, rpc_event, state, behavior)
        self._ask = ask

    def receive(self, arrived: Callable[[], None]) -> None:
        """Ask for the message; the polling thread calls `arrived` when it is there."""
        internals = self._internals
        # Without a deserializer: the call's own thread parses the bytes.
        received = internals.receive_message(self._state, self._call, None)

        def on_event(event: Any) -> Any:
            ended = received(event)
            try:
                arrived()
            except Exception:
                _log.exception("a call could not be started")
            return ended

        self._call.start_server_batch((internals.receive_operation(0),), on_event)
        self._state.due.add(internals.receive_token)

    def give_to(self, workers: Workers) -> None:
        """Have a thread answer the call, unless it ended before its message arrived."""
        if self.has_one_message and self._state.request is None:
            self._refusals.count(UNREAD)
            self._end(
                self.codes.unimplemented,
                f'"{self.path.decode()}" requires exactly one request message.',
            )
            return
        ask = self._take if self.has_one_message else self._ask
        work = partial(self._begin, ask, self._deserializer, self._serializer)
        if not workers.give(work):
            self.refuse(
                NO_THREAD,
                self.codes.resource_exhausted,
                NO_THREAD_TEXT,
            )

    def refuse(self, reason: str, code: Any, text: str) -> None:
        """End the call and count it as refused, unless it has ended."""
        self._end(code, text, reason)

    def _end(self, code: Any, text: str, reason: str | None = None) -> None:
        with self._state.condition:
            if self._internals.is_active(self._state):
                if reason is not None:
                    self._refusals.count(reason)
                self._state.request = None
                self._internals.abort(self._state, self._call, code, text.encode())

    def _take(self) -> Any:
        """Return the parsed message, on the call's thread; None when the call has ended."""
        with self._state.condition:
            message, self._state.request = self._state.request, None
        if message is None or self._deserializer is None:
            return message
        if len(message) > MAX_PARSED_BYTES:
            self.refuse(
                MESSAGE_SIZE,
                self.codes.resource_exhausted,
                f"message: {len(message)} bytes, at most {MAX_PARSED_BYTES} are taken by "
                f"{self.path.decode()}",
            )
            return None
        try:
            return self._deserializer(message)
        except Exception as error:
            self.refuse(
                MALFORMED,
                self.codes.invalid_argument,
                f"malformed message of {self.path.decode()}: {error}",
            )
            return None
