"""Calls that stay open: a limit on their number, and protection from clients that do not read."""

import threading
from collections.abc import Callable
from typing import Any

import grpc

from serve.errors import QueueFull
from serve.rpc.refusals import OPEN_CALLS, Refusals
from serve.rpc.status import abort
from serve.rpc.workers import Workers

#: Answers a call; takes its request or requests, its context and, for a watch, a send function.
Behavior = Callable[..., Any]

_RETRY_NS = 1_000_000_000
_NOTHING = object()


class OpenCallLimit:
    """Limit on the open calls of one kind."""

    def __init__(self, most: int, what: str, refusals: Refusals) -> None:
        """Allow `most` calls at once; refusals name them `what` and are counted in `refusals`."""
        self._most, self._what = most, what
        self._refusals = refusals
        self._places = threading.Semaphore(most)

    def enter(self, context: grpc.ServicerContext) -> bool:
        """Count the call until it ends.

        Returns False when it has already ended; raises QueueFull at the limit.
        """
        if not self._places.acquire(blocking=False):
            self._refusals.count(OPEN_CALLS)
            raise QueueFull(
                f"{self._most} {self._what} are open, and no more are accepted", _RETRY_NS
            )
        if context.add_callback(self._places.release):
            return True
        self._places.release()
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
