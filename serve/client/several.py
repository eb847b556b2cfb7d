"""Several servers of one client: which one each call goes to, and what becomes of it elsewhere.

The decisions are those of a front (``serve.core.cluster``). This module keeps them for all threads
of a client, and holds no connection.
"""

import asyncio
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import grpc

from serve.client.errors import ClientError, Exhausted, NotFound, TimedOut, Unavailable
from serve.core.cluster.commands import (
    ClusterCommand,
    EndRequest,
    NoAnswer,
    PassAnswer,
    SendAttempt,
    WithdrawAttempt,
)
from serve.core.cluster.dispatch import Dispatcher, DispatchParams
from serve.core.cluster.events import (
    AttemptAnswered,
    AttemptFailed,
    AttemptFailure,
    MachineAnnounced,
    RequestArrived,
    RequestGivenUp,
    TimePassed,
)
from serve.core.cluster.members import MachineState
from serve.core.cluster.probing import Probe, events_of
from serve.core.cluster.views import MachineFacts, RoutedRequest

#: How often each server is asked whether it serves, and how long it may take to say so. One that is
#: silent is left after two such times.
PROBE_EVERY_S = 0.2
PROBE_S = 0.3
#: How long a call waits when no server is ready, before it fails as with one server.
_PATIENCE_NS = 500_000_000
#: How long a call waits at most when all servers are full; the caller's time limit is mostly less.
_FULL_PATIENCE_NS = 60_000_000_000
#: Channels try again this often to reach a server that was not there.
RECONNECT_MS = 1000
#: Servers of one client, each of which takes a task or a thread.
MOST_SERVERS = 64


class CallWithdrawn(Exception):
    """An attempt ended as nobody waits for it any more."""


class AsyncBell:
    """Wakes the one task that waits for it; or the next one, when none does."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake who waits."""
        self._rung.set()

    async def wait(self, timeout_s: float | None) -> None:
        """Return when rung, or after the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        except TimeoutError:
            return
        self._rung.clear()


class Bell:
    """The same for threads."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self) -> None:
        """Wake who waits."""
        self._rung.set()

    def wait(self, timeout_s: float | None) -> None:
        """Return when rung, or after the time."""
        if self._rung.wait(timeout_s):
            self._rung.clear()


class AsyncBackground:
    """Tasks beside those of the caller."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Callable[[str], Coroutine[Any, Any, None]], name: str) -> None:
        """Begin to do `work` for `name`."""
        self._tasks.append(asyncio.create_task(work(name)))

    async def join(self) -> None:
        """Wait until all have ended, which they have been asked to."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Background:
    """The same for threads."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[str], None], name: str) -> None:
        """Begin to do `work` for `name`."""
        thread = threading.Thread(target=work, args=(name,), name=f"probe {name}", daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def join(self) -> None:
        """Wait until all have ended, which they have been asked to."""
        for thread in self._threads:
            thread.join()


class AsyncUnary:
    """A call that can be cancelled while it is waited for."""

    def __init__(self, method: Any, request: object, timeout_s: float | None, meta: Any) -> None:
        self._call = method(request, timeout=timeout_s, metadata=meta)
        self._cancelled = False

    def cancel(self) -> None:
        """End it, unless it has ended."""
        self._cancelled = True
        self._call.cancel()

    async def outcome(self) -> Any:
        """Return the answer; raises CallWithdrawn when cancelled here, else grpc.RpcError."""
        try:
            return await self._call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._cancelled and task is not None and not task.cancelling():
                raise CallWithdrawn from None
            raise


class Unary:
    """The same for threads, made by the one that waits: gRPC's futures take a thread each.

    Nothing but the end of its channel ends it before its time. That comes where a server is lost,
    which is why calls are withdrawn; those whose time has passed end by themselves.
    """

    def __init__(self, method: Any, request: object, timeout_s: float | None, meta: Any) -> None:
        self._call = partial(method, request, timeout=timeout_s, metadata=meta)
        self._cancelled = False

    def cancel(self) -> None:
        """Not begin it, or not tell how it ended."""
        self._cancelled = True

    def outcome(self) -> Any:
        """Return the answer; raises CallWithdrawn when cancelled here, else grpc.RpcError.

        Raises ValueError when its channel was closed before.
        """
        try:
            if not self._cancelled:
                return self._call()
        except (grpc.RpcError, ValueError):
            if not self._cancelled:
                raise
        raise CallWithdrawn


class Route:
    """One call on its way through servers."""

    def __init__(self, request_id: int, bell: AsyncBell | Bell) -> None:
        self.request_id = request_id
        self.bell: Any = bell
        #: What is to be done next: send it, or end it.
        self.steps: deque[SendAttempt | EndRequest] = deque()
        #: The attempt whose answer is the call's.
        self.passed: int | None = None
        #: What the last attempt failed with.
        self.failure: ClientError | None = None
        self._call: AsyncUnary | Unary | None = None
        self._withdrawn = 0

    def started(self, attempt: int, call: AsyncUnary | Unary) -> None:
        """Know the attempt in flight, which may be withdrawn already."""
        self._call = call
        if attempt <= self._withdrawn:
            call.cancel()

    def take(self, command: ClusterCommand) -> None:
        """Take in what was decided."""
        if isinstance(command, SendAttempt | EndRequest):
            self.steps.append(command)
            self.bell.ring()
        elif isinstance(command, WithdrawAttempt):
            self._withdrawn = command.attempt
            if self._call is not None:
                self._call.cancel()
        elif isinstance(command, PassAnswer):
            self.passed = command.attempt

    def error(self, end: EndRequest) -> ClientError:
        """Return the error to raise when there is no answer."""
        if end.reason is NoAnswer.EXPIRED:
            return TimedOut.local(end.message)
        if end.reason is NoAnswer.NO_GRAPH:
            return NotFound.local(end.message)
        if self.failure is not None:
            return self.failure
        if end.reason is NoAnswer.FRONT_FULL:
            return Exhausted.local(end.message)
        return Unavailable.local(end.message)


class Routes:
    """All calls of one client. Thread-safe."""

    def __init__(self, names: Sequence[str]) -> None:
        params = DispatchParams(
            rule="count", patience_ns=_PATIENCE_NS, full_patience_ns=_FULL_PATIENCE_NS,
            seed=random.getrandbits(31),
        )  # fmt: skip
        self._lock = threading.Lock()
        self._dispatcher = Dispatcher(params)
        self._routes: dict[int, Route] = {}
        self._ids = itertools.count(1)
        for name in names:
            self._tell(MachineAnnounced(MachineFacts(name)))

    def begin(self, bell: AsyncBell | Bell, timeout_s: float | None, graph: str = "") -> Route:
        """Return the route of a call that begins now, to a server that holds the graph."""
        with self._lock:
            route = Route(next(self._ids), bell)
            self._routes[route.request_id] = route
            ends_ns = None if timeout_s is None else time.monotonic_ns() + int(timeout_s * 1e9)
            routed = RoutedRequest(route.request_id, "", expires_ns=ends_ns, graph=graph)
            self._tell(RequestArrived(routed))
        return route

    def wake(self) -> None:
        """Have every call that waits look what to do."""
        with self._lock:
            for route in self._routes.values():
                route.bell.ring()

    def next_step(self, route: Route) -> SendAttempt | EndRequest | None:
        """Return what to do for the call now; None to wait until its bell rings."""
        with self._lock:
            if not route.steps:
                self._tell(TimePassed())
            return route.steps.popleft() if route.steps else None

    def wait_s(self) -> float | None:
        """Return how long to wait at most before the next step is asked for."""
        with self._lock:
            wake_ns = self._dispatcher.next_wakeup()
        return None if wake_ns is None else max(0.0, (wake_ns - time.monotonic_ns()) / 1e9)

    def started(self, route: Route, attempt: int, call: AsyncUnary | Unary) -> None:
        """Know the call that an attempt is."""
        with self._lock:
            route.started(attempt, call)

    def ended(self, route: Route, attempt: int, failure: ClientError | None, once: bool) -> bool:
        """Tell how an attempt ended; returns True when that is how the call ends.

        With `once` no failure has it sent again.
        """
        with self._lock:
            kind = None if failure is None or once else _kind(failure)
            if kind is None:
                self._tell(AttemptAnswered(route.request_id, attempt))
                return route.passed == attempt
            assert failure is not None
            route.failure = failure
            wait_s = failure.retry_after_s
            self._tell(AttemptFailed(
                route.request_id, attempt, kind, failure.message,
                None if wait_s is None else int(wait_s * 1e9),
            ))  # fmt: skip
            return False

    def end(self, route: Route) -> None:
        """Forget a call, however it ended."""
        with self._lock:
            self._tell(RequestGivenUp(route.request_id))
            del self._routes[route.request_id]

    def is_ready(self, name: str) -> bool:
        """Return True when a server gets calls."""
        with self._lock:
            member = self._dispatcher.members.get(name)
            return member is not None and member.state is MachineState.READY

    def probed(self, name: str, probe: Probe, graphs: frozenset[str] | None = None) -> bool:
        """Know what came of asking a server whether it is ready, and which graphs it holds.

        Returns True when it is lost by that, and all calls to it are withdrawn.
        """
        members = self._dispatcher.members
        with self._lock:
            before = members.get(name)
            was_here = before is not None and before.state is not MachineState.GONE
            for event in events_of(probe, name, members, graphs):
                self._tell(event)
            member = members.get(name)
            return was_here and member is not None and member.state is MachineState.GONE

    def _tell(self, event: object) -> None:
        for command in self._dispatcher.handle(event, time.monotonic_ns()):
            route = self._routes.get(getattr(command, "request_id", 0))
            if route is not None:
                route.take(command)


def _kind(failure: ClientError) -> AttemptFailure | None:
    """Return how the attempt failed; None when another server would say the same."""
    if failure.retry_after_s is not None:
        return AttemptFailure.REFUSED
    return AttemptFailure.UNREACHABLE if isinstance(failure, Unavailable) else None
