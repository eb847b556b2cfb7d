"""When models are loaded and unloaded: at once, one after the other, or not any more.

Different models do not wait for each other, but for their measurements, which would disturb each
other. A model that hangs while it is loaded holds up nobody else for long.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serve.errors import NotReady, RequestCancelled
from serve.server import clock

#: A model that is measured and tells nothing for so long does not keep others from it.
_SILENCE_S = 10.0


class LoadCancellation:
    """A client's word that it no longer waits for a load. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        #: True once `cancel` was called.
        self.cancelled = False

    def cancel(self) -> None:
        """End the load soon, unless it serves already. Idempotent."""
        with self._lock:
            self.cancelled = True
            calls = tuple(self._calls)
        for call in calls:
            call()

    def check(self) -> None:
        """Raise RequestCancelled once `cancel` was called."""
        if self.cancelled:
            raise RequestCancelled("the load was cancelled by its client")

    @contextmanager
    def calling(self, call: Callable[[], None]) -> Iterator[None]:
        """Have `cancel` call `call` within the block, or call it now if it was cancelled before."""
        with self._lock:
            self._calls.append(call)
            cancelled = self.cancelled
        try:
            if cancelled:
                call()
            yield
        finally:
            with self._lock:
                self._calls.remove(call)


class LoadTurns:
    """Turns of the threads that load and unload models."""

    def __init__(self, interrupted: Callable[[], bool], silence_s: float = _SILENCE_S) -> None:
        """`interrupted` returns True once the server stops; nobody waits for a turn then."""
        self._interrupted = interrupted
        self._silence_s = silence_s
        self._changed = threading.Condition()
        #: Models that are being loaded or unloaded.
        self._busy: set[str] = set()
        #: When each measurement that runs has told something last, by a key of its own.
        self._heard_ns: dict[object, int] = {}

    def interrupt(self) -> None:
        """Wake all waiting threads, so that they see that the server stops."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def of_model(self, name: str, cancellation: LoadCancellation) -> Iterator[None]:
        """Wait until nobody else loads or unloads the model, and have others wait in the block.

        Raises RequestCancelled, and NotReady while the server stops.
        """
        with cancellation.calling(self.interrupt), self._changed:
            while name in self._busy and not self._given_up(cancellation):
                self._changed.wait()
            self._busy.add(name)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(name)
                self._changed.notify_all()

    @contextmanager
    def of_measuring(self, cancellation: LoadCancellation) -> Iterator[Callable[[], None]]:
        """Wait until no other model is measured, or those that are tell nothing.

        Yields a function to call whenever the measurement tells something. Raises as `of_model`.
        """
        key = object()

        def heard() -> None:
            with self._changed:
                self._heard_ns[key] = clock.now_ns()

        with cancellation.calling(self.interrupt), self._changed:
            while (wait_s := self._until_silent_s()) > 0 and not self._given_up(cancellation):
                self._changed.wait(wait_s)
            self._heard_ns[key] = clock.now_ns()
        try:
            yield heard
        finally:
            with self._changed:
                del self._heard_ns[key]
                self._changed.notify_all()

    def _until_silent_s(self) -> float:
        """Return the time until no measurement has told anything for long; 0 when that is so."""
        latest_ns = max(self._heard_ns.values(), default=0)
        silent_s = (clock.now_ns() - latest_ns) / 1e9
        return max(0.0, self._silence_s - silent_s) if self._heard_ns else 0.0

    def _given_up(self, cancellation: LoadCancellation) -> bool:
        cancellation.check()
        if self._interrupted():
            raise NotReady("no model is loaded while the server stops")
        return False
