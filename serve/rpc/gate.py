"""Count of requests in flight, closed to new ones while the server drains."""

import threading

from serve.errors import NotReady


class Gate:
    """Admits requests until ``close``; then refuses new ones and waits for those inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._inside = 0
        self._closed = False
        #: Somebody waits for the last to leave.
        self._awaited = False

    @property
    def closed(self) -> bool:
        """True once the server drains."""
        return self._closed

    @property
    def inside(self) -> int:
        """Number of requests in flight."""
        return self._inside

    def enter(self) -> None:
        """Count a request in; raises NotReady once closed. Pair with ``leave``."""
        with self._lock:
            if self._closed:
                raise NotReady("the server is shutting down and takes no new requests")
            self._inside += 1

    def leave(self) -> None:
        """Count a request out, after its answer was sent."""
        with self._lock:
            self._inside -= 1
            if self._awaited and self._inside == 0:
                self._empty.notify_all()

    def close(self) -> None:
        """Refuse all further requests."""
        with self._lock:
            self._closed = True

    def wait_empty(self, timeout_s: float) -> int:
        """Wait until all have left or `timeout_s` passed; returns how many are still inside."""
        with self._lock:
            self._awaited = True
            self._empty.wait_for(lambda: self._inside == 0, timeout_s)
            return self._inside
