"""Threads that serve calls: made on demand, as many as calls in flight, woken once for a call.

gRPC's synchronous server gives a call to a thread when its head is there. That thread asks for the
message, sleeps, and is woken again by the thread that polls. Here the polling thread asks for the
message itself and gives the call away together with it, to the thread that has been idle for the
shortest time, as what that one needs is the likeliest to be in the caches (docs/performance.md).
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from grpc import _server as grpc_server
from grpc._cython import cygrpc  # type: ignore[attr-defined]

_log = logging.getLogger(__name__)

Work = Callable[[], object]

#: What gRPC has a thread do for a call with one request and one answer, and what receives messages.
#: NOTE: gRPC's own inside, and None where it looks different: then calls go the usual way.
_RESPOND = getattr(grpc_server, "_unary_response_in_pool", None)
_RECEIVE = getattr(grpc_server, "_receive_message", None)
_RECEIVE_TOKEN = getattr(grpc_server, "_RECEIVE_MESSAGE_TOKEN", None)
_KNOWN = None not in (_RESPOND, _RECEIVE, _RECEIVE_TOKEN)


class _NeverTold(Future[Any]):
    """Of every call: gRPC counts by it only for a limit on concurrent calls, which we set not."""

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Forget it."""


class CallThreads(Executor):
    """The thread pool of a ``grpc.server`` without a limit on concurrent calls."""

    def __init__(self, most: int, name: str) -> None:
        """At most so many threads, called `name`; calls beyond that wait, their messages unread."""
        self._name = name
        self._lock = threading.Lock()
        #: Threads and calls that will have one.
        self._free = most
        self._waiting: deque[Work] = deque()
        #: Inboxes of idle threads; the last became idle last.
        self._idle: list[SimpleQueue[Work | None]] = []
        self._shut = False
        self._told = _NeverTold()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a thread call `fn`; the future is never done. gRPC's polling thread."""
        with self._lock:
            if self._shut:
                raise RuntimeError("cannot schedule new calls after shutdown")
            if not self._free:
                self._waiting.append(partial(fn, *args, **kwargs))
                return self._told
            self._free -= 1
        if _KNOWN and len(args) == 7 and args[0] is _RESPOND:
            self._receive(fn, *args)
        else:
            self._give(partial(fn, *args, **kwargs))
        return self._told

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Idle threads end now, others when their calls have; none is waited for."""
        with self._lock:
            self._shut = True
            for inbox in self._idle:
                inbox.put(None)
            self._idle.clear()

    def _receive(
        self,
        run: Callable[..., Any],
        respond: Any,
        rpc_event: Any,
        state: Any,
        behavior: Any,
        ask: Callable[[], Any],
        deserializer: Any,
        serializer: Any,
    ) -> None:
        """Ask for the call's message, and give the call to a thread when it is there.

        Under the lock of `state`. `ask` is gRPC's way to the message; it also ends a call that has
        none, is cancelled or malformed.
        """
        assert _RECEIVE is not None
        received = _RECEIVE(state, rpc_event.call, deserializer)

        def take() -> Any:
            with state.condition:
                message, state.request = state.request, None
            return ask() if message is None else message

        def give(event: Any) -> Any:
            ended = received(event)
            self._give(
                partial(run, respond, rpc_event, state, behavior, take, deserializer, serializer)
            )
            return ended

        rpc_event.call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), give)
        state.due.add(_RECEIVE_TOKEN)

    def _give(self, work: Work) -> None:
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is not None:
            inbox.put(work)
            return
        inbox = SimpleQueue()
        inbox.put(work)
        threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()

    def _serve(self, inbox: "SimpleQueue[Work | None]") -> None:
        while (work := inbox.get()) is not None:
            while work is not None:
                try:
                    work()
                except BaseException:
                    _log.exception("a call ended unexpectedly")
                work = self._next(inbox)

    def _next(self, inbox: "SimpleQueue[Work | None]") -> Work | None:
        """A call that waits for a thread, or None: this one is idle now."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._free += 1
            if self._shut:
                inbox.put(None)
            else:
                self._idle.append(inbox)
            return None
