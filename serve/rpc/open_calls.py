"""Calls that stay open: a limit on their number, and protection from clients that do not read.

A call that can tell that it is idle gives its place up to a new one.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from serve.errors import QueueFull
from serve.rpc.refusals import IDLE_STREAM, OPEN_CALLS, Refusals
from serve.rpc.status import abort
from serve.rpc.workers import Workers

#: Answers a call; takes its request or requests, its context and, for a watch, a send function.
Behavior = Callable[..., Any]

_RETRY_NS = 1_000_000_000
_NOTHING = object()


class Yielding(Protocol):
    """An open call that ends when it is idle and another needs its place."""

    @property
    def idle_since_ns(self) -> int | None:
        """Time since which it has done nothing; None when it is in use."""
        ...

    def give_up(self) -> bool:
        """End the call; returns False when it is in use after all."""
        ...


class OpenCallLimit:
    """Limit on the open calls of one kind."""

    def __init__(self, most: int, what: str, refusals: Refusals) -> None:
        """Allow `most` calls at once; refusals name them `what` and are counted in `refusals`."""
        self._most, self._what = most, what
        self._refusals = refusals
        self._lock = threading.Lock()
        #: Open calls by a key of their own; None for those that cannot tell whether they are idle.
        self._open: dict[object, Yielding | None] = {}

    def enter(self, context: grpc.ServicerContext, call: Yielding | None = None) -> bool:
        """Count the call until it ends; at the limit, the one that is idle for the longest ends.

        Returns False when it has already ended; raises QueueFull when all are in use.
        """
        key = object()
        with self._lock:
            if len(self._open) >= self._most and not self._make_room():
                self._refusals.count(OPEN_CALLS)
                raise QueueFull(
                    f"{self._most} {self._what} are open, and no more are accepted", _RETRY_NS
                )
            self._open[key] = call

        def leave() -> None:
            with self._lock:
                self._open.pop(key, None)

        if context.add_callback(leave):
            return True
        leave()
        return False

    def _make_room(self) -> bool:
        """End the call that is idle for the longest; returns False when all are in use."""
        idle = [
            (since_ns, key, call)
            for key, call in self._open.items()
            if call is not None and (since_ns := call.idle_since_ns) is not None
        ]
        for _, key, call in sorted(idle, key=lambda one: one[0]):
            if call.give_up():
                del self._open[key]
                self._refusals.count(IDLE_STREAM)
                return True
        return False


def limited(behavior: Behavior, calls: OpenCallLimit) -> Behavior:
    """Return `behavior`, a method of another library's service, under the limit of `calls`."""

    def call(requests: Any, context: grpc.ServicerContext, *send: Any) -> Any:
        try:
            if not calls.enter(context):
                return iter(())
        except QueueFull as error:
            abort(context, error)
        return behavior(requests, context, *send)

    return call


def watched(behavior: Behavior, workers: Workers) -> Behavior:
    """Return `behavior`, the health service's `Watch`, with a send function that never blocks.

    The service sends a change to its watchers one after the other while it holds its only lock, and
    gRPC's own send blocks until the client reads. A client that does not read would stop the health
    service for everybody.
    """

    def call(request: Any, context: grpc.ServicerContext, send: Callable[[Any], None]) -> Any:
        return behavior(request, context, _Latest(send, workers))

    # Tells gRPC that the call needs no thread while there is nothing to send.
    call.experimental_non_blocking = True  # type: ignore[attr-defined]
    return call


class _Latest:
    """Sends the latest status on a thread of `workers`; a newer status replaces an unsent one."""

    def __init__(self, send: Callable[[Any], None], workers: Workers) -> None:
        self._send = send
        self._workers = workers
        self._lock = threading.Lock()
        self._latest = _NOTHING
        self._sending = False

    def __call__(self, status: Any) -> None:
        with self._lock:
            self._latest = status
            if self._sending:
                return
            self._sending = True
        if not self._workers.give(self._send_all):
            with self._lock:
                self._sending = False

    def _send_all(self) -> None:
        while True:
            with self._lock:
                status, self._latest = self._latest, _NOTHING
                if status is _NOTHING:
                    self._sending = False
                    return
            self._send(status)
