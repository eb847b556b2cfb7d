"""How calls come to their threads: with their message, and to threads kept for their kind.

gRPC's synchronous server gives a call to a thread when its head is there. That thread asks for the
message, sleeps, and is woken again by the thread that polls. Here the polling thread asks for the
message itself and gives the call away together with it. So a thread is woken once for a call, and a
call whose message never comes has none; it is ended after a while.

Nothing here may raise into the polling thread: gRPC has only that one, and without it every call
on every connection hangs.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import grpc
from grpc import _server as grpc_server
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from serve.rpc.refusals import MALFORMED, MESSAGE_SIZE, NO_MESSAGE, NO_THREAD, Refusals
from serve.rpc.workers import Workers

_log = logging.getLogger(__name__)

#: Seconds from a call's head until its message must be there.
RECEIVE_S = 10.0
#: Looks at calls without a message in that time. Their age is counted in looks, so that no call
#: ends because this process was stopped or had no processor.
_LOOKS = 10
#: Largest message that is handed to the protobuf library as it is: what such a message costs is a
#: multiple of its size. Methods with larger ones take bytes.
MAX_PARSED_BYTES = 64 * 1024

#: What gRPC has a thread do for a call with one answer and for one with many, how it receives a
#: message and how it ends a call.
#: NOTE: gRPC's own inside, and None where it looks different: then calls go the usual way.
_RESPOND = getattr(grpc_server, "_unary_response_in_pool", None)
_RESPOND_MANY = getattr(grpc_server, "_stream_response_in_pool", None)
_RECEIVE = getattr(grpc_server, "_receive_message", None)
_RECEIVE_TOKEN = getattr(grpc_server, "_RECEIVE_MESSAGE_TOKEN", None)
_ABORT = getattr(grpc_server, "_abort", None)
_IS_ACTIVE = getattr(grpc_server, "_is_rpc_state_active", None)
_KNOWN = None not in (_RESPOND, _RESPOND_MANY, _RECEIVE, _RECEIVE_TOKEN, _ABORT, _IS_ACTIVE)
#: Name of gRPC's function that waits for the message of a call that has exactly one.
_ASK_ONE = "unary_request"


class _NeverTold(Future[Any]):
    """Of every call: gRPC counts by it only for a limit on concurrent calls, which we set not."""

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Forget it."""


class CallThreads(Executor):
    """The thread pool of a ``grpc.server`` without a limit on concurrent calls."""

    def __init__(
        self,
        workers: Workers,
        *,
        apart: Mapping[str, Workers] | None = None,
        receive_s: float = RECEIVE_S,
        refusals: Refusals | None = None,
    ) -> None:
        """Begin to watch over calls without a message; ``shutdown`` ends that and all workers.

        Args:
            workers: Serve all methods that have no threads of their own.
            apart: Methods, by their paths, with threads of their own, which are there whatever
                the others do.
            receive_s: Time for a call's message to arrive; after it the call is refused.
            refusals: Counts the calls that are refused here.
        """
        self._workers = workers
        self._apart = {path.encode(): workers for path, workers in (apart or {}).items()}
        self._receive_s = receive_s
        self._refusals = refusals or Refusals()
        self._told = _NeverTold()
        #: Calls without a message, by their states; the last began after the latest look.
        self._awaited: deque[dict[Any, Any]] = deque({} for _ in range(_LOOKS + 1))
        self._shut = threading.Event()
        if not _KNOWN:
            _log.warning(
                "gRPC %s is not known from inside: calls have a thread before their message is "
                "there, and one whose message never comes keeps its thread",
                grpc.__version__,
            )
        threading.Thread(target=self._look, name="rpc-arrivals", daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a thread call `fn`; the future is never done. gRPC's polling thread."""
        if self._shut.is_set():
            raise RuntimeError("cannot schedule new calls after shutdown")
        if _KNOWN and len(args) == 7 and args[0] in (_RESPOND, _RESPOND_MANY):
            call = _Call(self._refusals, fn, *args)
            workers = self._apart.get(call.path, self._workers)
            try:
                if call.has_one_message:
                    self._receive(call, workers)
                else:
                    call.give_to(workers)
            except Exception:
                _log.exception("a call could not be begun")
        elif not self._workers.give(partial(fn, *args, **kwargs)):
            self._refusals.count(NO_THREAD)
        return self._told

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Idle threads end now, others when their calls have; none is waited for."""
        self._shut.set()
        for workers in (self._workers, *self._apart.values()):
            workers.shutdown()

    def _receive(self, call: "_Call", workers: Workers) -> None:
        """Ask for the call's message, and give the call to a thread when it is there."""
        young = self._awaited[-1]
        young[call] = True

        def arrived() -> None:
            # Else it is too late: whoever takes the call out of here decides what becomes of it.
            if young.pop(call, False):
                call.give_to(workers)

        call.receive(arrived)

    def _look(self) -> None:
        """Refuse calls whose message did not come in time; a thread of its own."""
        while not self._shut.wait(self._receive_s / _LOOKS):
            old = self._awaited.popleft()
            self._awaited.append({})
            while old:
                try:
                    call, _ = old.popitem()
                    call.refuse(
                        NO_MESSAGE,
                        cygrpc.StatusCode.deadline_exceeded,
                        f"message: it was not complete {self._receive_s:g} s after the call began",
                    )
                except KeyError:
                    break  # the last one's message has just come
                except Exception:
                    _log.exception("a call without a message could not be ended")


class _Call:
    """One call, as gRPC hands it to its thread pool. Changes are made under its state's lock."""

    def __init__(
        self,
        refusals: Refusals,
        run: Callable[..., Any],
        respond: Any,
        rpc_event: Any,
        state: Any,
        behavior: Any,
        ask: Callable[[], Any],
        deserializer: Callable[[bytes], Any] | None,
        serializer: Any,
    ) -> None:
        self._refusals = refusals
        self._state = state
        self._call = rpc_event.call
        self._deserializer, self._serializer = deserializer, serializer
        self.path: bytes = rpc_event.call_details.method or b""
        self.has_one_message = getattr(ask, "__name__", "") == _ASK_ONE
        self._begin = partial(run, respond, rpc_event, state, behavior)
        self._ask = ask

    def receive(self, arrived: Callable[[], None]) -> None:
        """Ask for the message; `arrived` is called by the polling thread when it is there."""
        assert _RECEIVE is not None
        # As bytes: to parse it is for the call's own thread.
        received = _RECEIVE(self._state, self._call, None)

        def on_event(event: Any) -> Any:
            ended = received(event)
            try:
                arrived()
            except Exception:
                _log.exception("a call could not be begun")
            return ended

        self._call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), on_event)
        self._state.due.add(_RECEIVE_TOKEN)

    def give_to(self, workers: Workers) -> None:
        """Have the call answered, unless it ended before its message came."""
        if self.has_one_message and self._state.request is None:
            self._end(
                cygrpc.StatusCode.unimplemented,
                f'"{self.path.decode()}" requires exactly one request message.',
            )
            return
        ask = self._take if self.has_one_message else self._ask
        work = partial(self._begin, ask, self._deserializer, self._serializer)
        if not workers.give(work):
            self.refuse(
                NO_THREAD,
                cygrpc.StatusCode.resource_exhausted,
                "no thread can be had for this call now; try again later",
            )

    def refuse(self, reason: str, code: Any, text: str) -> None:
        """End the call, unless it has ended, and count it."""
        self._end(code, text, reason)

    def _end(self, code: Any, text: str, reason: str | None = None) -> None:
        assert _ABORT is not None
        assert _IS_ACTIVE is not None
        with self._state.condition:
            if _IS_ACTIVE(self._state):
                if reason is not None:
                    self._refusals.count(reason)
                self._state.request = None
                _ABORT(self._state, self._call, code, text.encode())

    def _take(self) -> Any:
        """The message, parsed; None: there is none that can be answered. The call's thread."""
        with self._state.condition:
            message, self._state.request = self._state.request, None
        if message is None or self._deserializer is None:
            return message
        if len(message) > MAX_PARSED_BYTES:
            self.refuse(
                MESSAGE_SIZE,
                cygrpc.StatusCode.resource_exhausted,
                f"message: {len(message)} bytes, at most {MAX_PARSED_BYTES} are taken by "
                f"{self.path.decode()}",
            )
            return None
        try:
            return self._deserializer(message)
        except Exception as error:
            self.refuse(
                MALFORMED,
                cygrpc.StatusCode.invalid_argument,
                f"malformed message of {self.path.decode()}: {error}",
            )
            return None
