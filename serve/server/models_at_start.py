"""The models of a start: those known to load fast come first, others while these may serve."""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from serve.errors import NotReady, ServeError
from serve.models.repository import ModelSpec, scan_model
from serve.progress import Progress
from serve.server.catalogue import ModelCatalogue
from serve.server.rollout import ModelRollout
from serve.threads import Thread

#: A model that takes longer to load is loaded while the server serves.
_SLOW_NS = 2_000_000_000


class ModelsAtStart:
    """Loads models one by one. A model that does not load is logged and stays UNAVAILABLE."""

    def __init__(
        self, catalogue: ModelCatalogue, rollout: ModelRollout, interrupted: Callable[[], bool]
    ) -> None:
        """`interrupted` returns True once the server stops."""
        self._catalogue = catalogue
        self._rollout = rollout
        self._interrupted = interrupted
        #: Notified when a model has loaded, or not.
        self._changed = threading.Condition()
        self._left: list[str] = []
        #: Calibrated models that load slowly, and would keep lanes from others.
        self._slow: list[str] = []
        self._serving = threading.Event()
        self._count = 0
        self._thread = Thread(target=self._load_new, name="new models")
        self._progress: Progress = lambda step, fraction: None

    @property
    def done(self) -> bool:
        """True when each model has loaded or has failed to."""
        return not self._left

    def load(self, names: Iterable[str], patience_s: float, progress: Progress) -> None:
        """Load the models that are calibrated, then new ones; return when some can serve.

        Calibrated models wait for no new one. Without any, it waits for the first new one, and for
        further ones as long as they need less than `patience_s` together. Then a thread goes on
        loading them, and after `go_on` those that are known to load slowly. Raises NotReady when
        the server stops.
        """
        self._left, self._progress = list(names), progress
        self._count = len(self._left)
        for name in self._left:
            self._catalogue.set_state(name, "LOADING", "its turn comes")
        known = {name: self._load_ns(name) for name in self._left}
        self._slow = [name for name, ns in known.items() if ns is not None and ns > _SLOW_NS]
        for name, load_ns in known.items():
            if load_ns is not None and load_ns <= _SLOW_NS:
                self._load(name)
        calibrated = bool(self._catalogue.entries)
        if self._left:
            self._thread.start()
        if not calibrated:
            with self._changed:
                self._changed.wait_for(self._some_or_stopped)
                self._changed.wait_for(self._most_or_stopped, patience_s)
        self._check()

    def go_on(self) -> None:
        """Take note that the server serves: slow models are loaded beside its lanes."""
        self._serving.set()

    def wait(self) -> None:
        """Wait until each model has loaded or has failed to; raises NotReady as `load`."""
        with self._changed:
            self._changed.wait_for(lambda: self.done or self._interrupted())
        self._check()

    def interrupt(self) -> None:
        """Wake the threads that wait, so that they see that the server stops."""
        self._serving.set()
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for the end of the thread, after an interrupt of what it waits for."""
        if self._thread.is_alive():
            self._thread.join()

    def _check(self) -> None:
        if self._interrupted():
            raise NotReady("told to stop")

    def _load_ns(self, name: str) -> int | None:
        """Return the time that loading a model takes, None when nothing is known of it."""
        try:
            found = scan_model(self._catalogue.root, name)
            return self._rollout.calibrations.load_ns(o for o in found if isinstance(o, ModelSpec))
        except ServeError:
            return 0  # it fails at once

    def _some_or_stopped(self) -> bool:
        return self.done or bool(self._catalogue.entries) or self._interrupted()

    def _most_or_stopped(self) -> bool:
        return len(self._left) <= len(self._slow) or self._interrupted()

    def _load_new(self) -> None:
        new = [name for name in self._left if name not in self._slow]
        with suppress(NotReady):  # told to stop
            for name in new:
                self._load(name)
            if self._slow and self._catalogue.entries:
                self._serving.wait()
            for name in self._slow:
                self._load(name)

    def _load(self, name: str) -> None:
        self._check()
        share = 1 - len(self._left) / self._count
        self._progress(f"loading {name}", share)
        # The log and the model's metadata name the error.
        with suppress(ServeError):
            self._rollout.load(name, partial(self._tell, name, share))
        with self._changed:
            self._left.remove(name)
            self._changed.notify_all()

    def _tell(self, name: str, share: float, step: str, fraction: float) -> None:
        self._progress(f"{name}: {step}", share + fraction / self._count)
