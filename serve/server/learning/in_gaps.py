"""Models that serve after a short calibration are calibrated for the usual time, in gaps.

A gap is a time without requests. When none comes for long, the calibration runs beside requests,
with the niceness of lanes.
"""

import logging
import threading
from collections.abc import Callable, Iterable

from serve.errors import ServeError
from serve.server.catalogue import ModelEntry

_log = logging.getLogger(__name__)

#: A gap begins when the server has had nothing to do for so long.
GAP_S = 2.0
#: Longest wait for a gap.
_PATIENCE_S = 60.0
_PERIOD_S = 0.25


class CalibrationsInGaps:
    """A thread that completes the calibrations of served models, one after another."""

    def __init__(
        self,
        entries: Callable[[], Iterable[ModelEntry]],
        idle_s: Callable[[], float],
        complete: Callable[[ModelEntry], None],
    ) -> None:
        """`idle_s` tells for how long the server has had nothing to do, in seconds.

        `complete` calibrates a model for the usual time; its errors are logged, and the model goes
        on serving with what is known of it.
        """
        self._entries = entries
        self._idle_s = idle_s
        self._complete = complete
        self._stopped = threading.Event()
        #: Keys of models that could not be calibrated; they are not tried again.
        self._failed: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="calibrations", daemon=True)

    def start(self) -> None:
        """Begin to look for models to calibrate."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after an interrupt of the calibrators. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        waited_s = 0.0
        while not self._stopped.wait(_PERIOD_S):
            entry = next(filter(self._is_due, self._entries()), None)
            if entry is None:
                waited_s = 0.0
                continue
            waited_s += _PERIOD_S
            if self._idle_s() < GAP_S and waited_s < _PATIENCE_S:
                continue
            waited_s = 0.0
            try:
                self._complete(entry)
            except ServeError as error:
                self._failed.add(entry.key)
                if not self._stopped.is_set():
                    _log.warning("the estimates of %s stay rough: %s", entry.spec.key, error)

    def _is_due(self, entry: ModelEntry) -> bool:
        return entry.is_rough and not entry.retired and entry.key not in self._failed
