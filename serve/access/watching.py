"""Files that are read again when they change."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

_log = logging.getLogger(__name__)

_PERIOD_S = 0.5


class WatchedFiles:
    """Calls a function whenever one of several files has changed, between `start` and `stop`."""

    def __init__(
        self, paths: Sequence[Path], changed: Callable[[], None], period_s: float = _PERIOD_S
    ) -> None:
        """Remember how the files are now."""
        self._paths = tuple(paths)
        self._changed = changed
        self._period_s = period_s
        self._seen = self._look()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watched-files", daemon=True)

    def start(self) -> None:
        """Begin to look, every half second."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; returns when no call of the function is in progress. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> tuple[tuple[int, ...] | None, ...]:
        found: list[tuple[int, ...] | None] = []
        for path in self._paths:
            try:
                status = path.stat()
            except OSError:
                found.append(None)
            else:
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)

    def _follow(self) -> None:
        while not self._stopped.wait(self._period_s):
            now = self._look()
            # A file that is missing is being replaced: wait for the new one.
            if now == self._seen or None in now:
                continue
            self._seen = now
            try:
                self._changed()
            except Exception:  # a bug; the next change is looked at all the same
                _log.exception("changed files could not be read")
