"""Changes that threads of this server wait for, and the versions that they make."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from serve.graphs.snapshot import Snapshot


class MadeChanges:
    """Any thread may call any method."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: By key of a change that somebody waits for; None while it is not made.
        self._versions: dict[bytes, Snapshot | None] = {}

    @contextmanager
    def expected(self, key: bytes) -> Iterator[None]:
        """Keep the version that the change makes, until the end of the block."""
        with self._changed:
            self._versions[key] = None
        try:
            yield
        finally:
            with self._changed:
                del self._versions[key]

    def tell(self, key: bytes, snapshot: Snapshot) -> None:
        """Take note that a change was made on this server."""
        with self._changed:
            if key in self._versions:
                self._versions[key] = snapshot
                self._changed.notify_all()

    def wait(self, key: bytes, timeout_s: float) -> Snapshot | None:
        """Return the version that the expected change made; None when it has not in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._versions[key] is not None, timeout_s)
            return self._versions[key]
