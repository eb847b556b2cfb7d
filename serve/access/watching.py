"""Files that are read again when they change."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from serve.threads import Thread

_log = logging.getLogger(__name__)

_PERIOD_S = 0.5
#: Inode, size and time of the last change; None for a file that is missing.
_Seen = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Files that belong together, and what to call when one of them has changed."""

    def __init__(
        self,
        paths: Sequence[Path],
        changed: Callable[[], None],
        looked: Callable[[], None] = lambda: None,
    ) -> None:
        """Remember how the files are now; `looked` is called after each look at them."""
        self._paths = tuple(paths)
        self._changed = changed
        self._looked = looked
        self._seen = self._look()

    def read(self) -> None:
        """Call the function although no file may have changed."""
        self._seen = self._look()
        self._changed()

    def look(self) -> None:
        """Call the function when a file has changed and none is missing."""
        now = self._look()
        # A file that is missing is being replaced: wait for the new one.
        changed = now != self._seen and None not in now
        try:
            if changed:
                self._seen = now
                self._changed()
            self._looked()
        except Exception:  # a bug; the next change is looked at all the same
            _log.exception("changed files could not be read")

    def _look(self) -> _Seen:
        return tuple(map(_facts, self._paths))


class FileWatcher:
    """Looks at files twice a second, on one thread, between `start` and `stop`."""

    def __init__(self, *files: WatchedFiles, period_s: float = _PERIOD_S) -> None:
        self._files = files
        self._period_s = period_s
        self._stopped = threading.Event()
        self._thread = Thread(target=self._follow, name="watched-files")

    def start(self) -> None:
        """Begin to look; starts no thread when there are no files."""
        if self._files:
            self._thread.start()

    def stop(self) -> None:
        """Look no more; returns when nothing is being read. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _follow(self) -> None:
        while not self._stopped.wait(self._period_s):
            for files in self._files:
                files.look()


def _facts(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
