"""Models are compiled while they serve: one at a time, on what the lanes leave of one core.

Each is compiled, raced and calibrated in a process that stands still while a lane executes on that
core, and beside which all else goes first (SCHED_IDLE). Then the lanes load it, one after the
other, each when the server has nothing to do: that takes a lane some ten milliseconds. Requests
accepted from then on are estimated and run with what was compiled; those before end on what they
were estimated for.
"""

import logging
import threading
from collections.abc import Callable

from serve.errors import ServeError
from serve.ipc.messages import ProbeModel
from serve.models.cache import CalibrationCache
from serve.server.catalogue import ModelEntry, Registry
from serve.server.lanes.pool import LanePool
from serve.server.lanes.processes import Calibrator

_log = logging.getLogger(__name__)

#: On a machine that is never idle it may take long; then the next start tries again.
_TIMEOUT_S = 3600.0
#: No raced or timed graph takes more: the ledger does not know of it, what the device leaves to
#: the operating system holds it.
_MOST_BYTES = 256 << 20
_MOST_SHARE = 1 / 8
#: A lane loads at the first idle moment, or after so long without one.
_IDLE_WAIT_S = 5.0
_IDLE_LOOK_S = 0.002


class BackgroundCompiler:
    """A thread that takes models from ``Registry.to_compile`` until it is stopped."""

    def __init__(
        self,
        registry: Registry,
        cache: CalibrationCache,
        pool: LanePool,
        *,
        calibration_s: float,
        budget_bytes: int,
        idle: Callable[[], bool],
    ) -> None:
        """`cache` is of what is compiled; `idle` says whether the server has nothing to do now."""
        self._registry = registry
        self._cache = cache
        self._pool = pool
        self._calibration_s = calibration_s
        self._most_bytes = min(_MOST_BYTES, int(budget_bytes * _MOST_SHARE))
        self._idle = idle
        self._stopping = threading.Event()
        self._calibrator: Calibrator | None = None
        self._thread = threading.Thread(target=self._run, name="compiler", daemon=True)

    def start(self) -> None:
        """Begin with the models that wait."""
        self._thread.start()

    def stop(self) -> None:
        """End what runs; returns when nothing of it does."""
        self._stopping.set()
        self._registry.to_compile.put(None)
        if self._calibrator is not None:
            self._calibrator.kill()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (entry := self._registry.to_compile.get()) is not None:
            try:
                self._compile(entry)
            except ServeError as error:
                if not (self._stopping.is_set() or self._pool.calibrators.interrupted):
                    _log.warning("model %s: not compiled: %s", entry.spec.key, error)
            except Exception:
                # A bug; the model serves on as it did.
                _log.exception("model %s: not compiled", entry.spec.key)
            if self._stopping.is_set():
                return

    def _compile(self, entry: ModelEntry) -> None:
        if entry.retired:
            return
        _log.info("model %s: compiling in the background", entry.spec.key)
        message = ProbeModel(
            entry.spec,
            self._calibration_s,
            self._most_bytes,
            package=self._cache.package(entry.digest),
            compile_timeout_s=_TIMEOUT_S,
        )
        with self._pool.calibrator(background=True) as self._calibrator:
            if self._stopping.is_set():
                return
            found = self._calibrator.probe(message, _TIMEOUT_S, lambda step, fraction: None)
        if not self._stopping.is_set():
            self._registry.recompiled(entry, *found, self._wait_idle)

    def _wait_idle(self) -> None:
        for _ in range(int(_IDLE_WAIT_S / _IDLE_LOOK_S)):
            if self._idle() or self._stopping.wait(_IDLE_LOOK_S):
                return
