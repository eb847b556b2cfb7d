"""Models that changed in the repository, loaded at SIGHUP, or by themselves where it is watched."""

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from serve.config import Config
from serve.errors import ServeError
from serve.models.version_file import VERSIONS_FILE
from serve.server.load_turns import LoadCancellation
from serve.threads import Thread

_log = logging.getLogger(__name__)
#: Files of a model by path, with time of change and size.
_Files = frozenset[tuple[str, int, int]]
#: Time for the thread to end once its load is cancelled.
_END_S = 5.0
#: Time from one look at a watched repository to the next. What is being copied changes meanwhile.
_WATCH_S = 5.0


class RepositoryRescan:
    """Loads the models whose files changed since it last looked, one after the other."""

    def __init__(
        self,
        root: Path,
        wanted: Collection[str],
        load: Callable[[str, LoadCancellation], None],
        *,
        watched: bool = False,
    ) -> None:
        """Look at nothing yet.

        Args:
            root: The repository.
            wanted: Models to serve; empty for all.
            load: Loads a model, as ``Inference.load``; raises ServeError.
            watched: Whether `watch` does anything.
        """
        self._root = root
        self._wanted = wanted
        self._load = load
        self._watched = watched
        self._seen: dict[str, _Files] = {}
        self._cancellation = LoadCancellation()
        self._lock = threading.Lock()
        self._asked = False
        self._thread: Thread | None = None
        self._stopped = threading.Event()
        self._watch: Thread | None = None

    def look(self) -> None:
        """Take what is in the repository as known, before it is loaded."""
        self._seen = dict(_files_of(self._root))

    def begin(self) -> None:
        """Look again and load what changed, on a thread of its own; any number of times."""
        with self._lock:
            self._asked = True
            if self._thread is None and not self._cancellation.cancelled:
                thread = Thread(target=self._work, name="rescan")
                thread.start()
                self._thread = thread

    def watch(self, period_s: float = _WATCH_S) -> None:
        """Look once in a period, and begin when files have changed and stayed so for one."""
        if not self._watched:
            return
        self._watch = Thread(target=self._follow, name="repository watch", args=(period_s,))
        self._watch.start()

    def stop(self) -> None:
        """Cancel what is being loaded, and begin nothing more."""
        self._stopped.set()
        self._cancellation.cancel()
        with self._lock:
            threads = self._watch, self._thread
        for thread in threads:
            if thread is not None:
                thread.join(_END_S)

    def _follow(self, period_s: float) -> None:
        before = self._seen
        while not self._stopped.wait(period_s):
            now = dict(_files_of(self._root))
            if now == before and changed(self._seen, now, self._wanted):
                try:
                    self.begin()
                except RuntimeError as error:  # no room for a thread; the next look tries again
                    _log.warning("models changed in the repository, and are not loaded: %s", error)
            before = now

    def _work(self) -> None:
        while self._next():
            before, self._seen = self._seen, dict(_files_of(self._root))
            for name in changed(before, self._seen, self._wanted):
                if self._cancellation.cancelled:
                    break
                try:
                    self._load(name, self._cancellation)
                except ServeError as error:
                    if not self._cancellation.cancelled:
                        _log.error("model %s changed in the repository: %s", name, error)
                else:
                    _log.info("model %s changed in the repository, and is loaded", name)

    def _next(self) -> bool:
        """Return True when somebody asked since the last time; else the thread is to end."""
        with self._lock:
            asked, self._asked = self._asked, False
            if not asked:
                self._thread = None
            return asked


def rescan_of(config: Config, load: Callable[[str, LoadCancellation], None]) -> RepositoryRescan:
    """Return what rescans the repository of a configuration."""
    models = config.models
    root = config.path(models.repository)
    return RepositoryRescan(root, models.load, load, watched=models.watch)


def changed(
    before: dict[str, _Files], now: dict[str, _Files], wanted: Collection[str]
) -> list[str]:
    """Return the models that are to be loaded: new ones, and those with other files."""
    return sorted(
        name
        for name, files in now.items()
        if files != before.get(name) and (not wanted or name in wanted)
    )


def _files_of(root: Path) -> Iterator[tuple[str, _Files]]:
    """Yield each model's files, its own and those of its versions.

    The server itself writes which versions answer; that file is left out.
    """
    for model in _folders(root):
        folders = (model, *_folders(model))
        found = (one for folder in folders for one in _entries(folder) if one.name != VERSIONS_FILE)
        yield model.name, frozenset(_facts(found))


def _folders(folder: Path) -> list[Path]:
    return [
        Path(one.path) for one in _entries(folder) if one.is_dir() and one.name != "__pycache__"
    ]


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    """Return what is in a folder, without what is being written: its name begins with a dot."""
    with suppress(OSError), os.scandir(folder) as found:
        return [one for one in found if not one.name.startswith(".")]
    return []


def _facts(entries: Iterator["os.DirEntry[str]"]) -> Iterator[tuple[str, int, int]]:
    for one in entries:
        with suppress(OSError):
            if one.is_file():
                facts = one.stat()
                yield one.path, facts.st_mtime_ns, facts.st_size
