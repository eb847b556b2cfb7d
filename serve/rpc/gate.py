"""Counts requests in flight, and shuts the door when the server drains."""

import threading

from serve.errors import NotReady


class Gate:
    """Open until ``close``; then nobody enters, and the last to leave is waited for."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """The server is draining."""
        return self._closed

    @property
    def inside(self) -> int:
        """Requests in flight."""
        return self._inside

    def enter(self) -> None:
        """One request more; raises NotReady once closed. Pair with ``leave``."""
        with self._condition:
            if self._closed:
                raise NotReady("the server is shutting down and takes no new requests")
            self._inside += 1

    def leave(self) -> None:
        """The request's answer is out."""
        with self._condition:
            self._inside -= 1
            if self._inside == 0:
                self._condition.notify_all()

    def close(self) -> None:
        """Let nobody in any more."""
        with self._condition:
            self._closed = True

    def wait_empty(self, timeout_s: float) -> int:
        """Wait until all have left or `timeout_s` passed; how many are still inside."""
        with self._condition:
            self._condition.wait_for(lambda: self._inside == 0, timeout_s)
            return self._inside
