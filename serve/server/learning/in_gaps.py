"""Models are calibrated in gaps: after a short calibration, and when runs disagree with it.

A gap is a time without requests. When requests come again, a calibration stands still while they
run; what it times is processor time. A model that serves after a short calibration does not wait
for ever: when no gap comes, its calibration runs beside requests, with the niceness of lanes. One
whose calibration is in doubt waits for a gap, and after it for a while, each time twice as long.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from serve.errors import ServeError
from serve.server.catalogue import ModelEntry
from serve.threads import Thread

_log = logging.getLogger(__name__)

#: A gap begins when the server has had nothing to do for so long.
GAP_S = 2.0
#: Longest wait for a gap.
_PATIENCE_S = 60.0
_PERIOD_S = 0.25
#: Time from one calibration of a model in doubt to the next: the first, and at most.
_AGAIN_S, _MOST_AGAIN_S = 600.0, 86_400.0


class CalibrationsInGaps:
    """A thread that completes the calibrations of served models, one after another."""

    def __init__(
        self,
        entries: Callable[[], Iterable[ModelEntry]],
        idle_s: Callable[[], float],
        why_due: Callable[[ModelEntry], str],
        complete: Callable[[ModelEntry, bool], None],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Calibrate nothing before `start`.

        Args:
            entries: Returns the served models.
            idle_s: Tells for how long the server has had nothing to do, in seconds.
            why_due: Returns why a model is to be calibrated; empty for no reason.
            complete: Calibrates a model for the usual time; requests go first if told so. Its
                errors are logged, and the model goes on serving with what is known of it.
            monotonic_s: Clock.
        """
        self._entries = entries
        self._idle_s = idle_s
        self._why_due = why_due
        self._complete = complete
        self._monotonic_s = monotonic_s
        self._stopped = threading.Event()
        #: Keys of models that could not be calibrated; they are not tried again.
        self._failed: set[str] = set()
        #: When models may be calibrated again at the earliest, and how long they waited for it.
        self._again_at: dict[str, tuple[float, float]] = {}
        self._thread = Thread(target=self._run, name="calibrations")

    def start(self) -> None:
        """Begin to look for models to calibrate."""
        self._thread.start()

    def begin_stop(self) -> None:
        """Begin no further calibration, and tell of none that is interrupted from now on."""
        self._stopped.set()

    def stop(self) -> None:
        """End the thread, after an interrupt of the calibrators. Idempotent."""
        self.begin_stop()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        waited_s = 0.0
        while not self._stopped.wait(_PERIOD_S):
            due = [entry for entry in self._entries() if self._is_due(entry)]
            if not due:
                waited_s = 0.0
                continue
            # Rough ones come first.
            entry = min(due, key=lambda one: not one.is_rough)
            waited_s += _PERIOD_S
            impatient = entry.is_rough and waited_s >= _PATIENCE_S
            if self._idle_s() < GAP_S and not impatient:
                continue
            waited_s = 0.0
            _log.info("model %s is calibrated: %s", entry.spec.key, self._why_due(entry))
            try:
                self._complete(entry, not impatient)
                self._let_rest(entry.key)
            except ServeError as error:
                if entry.is_rough:
                    self._failed.add(entry.key)
                else:
                    self._let_rest(entry.key)
                if not self._stopped.is_set():
                    _log.warning("the estimates of %s stay rough: %s", entry.spec.key, error)

    def _let_rest(self, key: str) -> None:
        """Have a model that was just calibrated wait, twice as long as before."""
        _, before_s = self._again_at.get(key, (0.0, _AGAIN_S / 2))
        wait_s = min(2 * before_s, _MOST_AGAIN_S)
        self._again_at[key] = self._monotonic_s() + wait_s, wait_s

    def _is_due(self, entry: ModelEntry) -> bool:
        if entry.retired or entry.key in self._failed or not self._why_due(entry):
            return False
        return self._monotonic_s() >= self._again_at.get(entry.key, (0.0, 0.0))[0]
