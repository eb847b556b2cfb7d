"""Calls that stay open: how many there may be, and what one costs whose client does not read."""

import threading
from collections.abc import Callable
from typing import Any

import grpc

from serve.errors import QueueFull
from serve.rpc.refusals import OPEN_CALLS, Refusals
from serve.rpc.status import abort
from serve.rpc.workers import Workers

#: Answers a call with its request (or requests), its context and, of a watch, a way to send.
Behavior = Callable[..., Any]

_RETRY_NS = 1_000_000_000
_NOTHING = object()


class OpenCalls:
    """How many calls of a kind are open, and may be."""

    def __init__(self, most: int, what: str, refusals: Refusals) -> None:
        """`most` at once, called `what` in refusals, which `refusals` counts."""
        self._most, self._what = most, what
        self._refusals = refusals
        self._places = threading.Semaphore(most)

    def enter(self, context: grpc.ServicerContext) -> bool:
        """Count the call until it ends; False: it has ended. Raises QueueFull."""
        if not self._places.acquire(blocking=False):
            self._refusals.count(OPEN_CALLS)
            raise QueueFull(
                f"{self._most} {self._what} are open, which is the most taken", _RETRY_NS
            )
        if context.add_callback(self._places.release):
            return True
        self._places.release()
        return False


def limited(behavior: Behavior, calls: OpenCalls) -> Behavior:
    """`behavior` of another library's service, as often at once as `calls` lets it."""

    def call(requests: Any, context: grpc.ServicerContext, *send: Any) -> Any:
        try:
            if not calls.enter(context):
                return iter(())
        except QueueFull as error:
            abort(context, error)
        return behavior(requests, context, *send)

    return call


def watched(behavior: Behavior, workers: Workers) -> Behavior:
    """`behavior` of the health service's `Watch`, with a way to send that never blocks.

    The service sends a change to one watcher after the other under its only lock, and gRPC's own
    way to send waits until the client reads. One that does not would stop health for everybody.
    """

    def call(request: Any, context: grpc.ServicerContext, send: Callable[[Any], None]) -> Any:
        return behavior(request, context, _Latest(send, workers))

    # How gRPC is asked for a call that has no thread while there is nothing to send.
    call.experimental_non_blocking = True  # type: ignore[attr-defined]
    return call


class _Latest:
    """Sends the latest of what it is given, by a thread of `workers`; drops what was not sent."""

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
