"""Calibrations of models: from the cache, or made now, for a short time at first."""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from serve.errors import NotReady
from serve.estimate.calibration import Calibration
from serve.ipc.messages import ProbeModel
from serve.models.cache import CalibrationCache
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec, content_hash
from serve.progress import Progress
from serve.server.catalogue import ModelEntry
from serve.server.lanes.pool import LanePool
from serve.server.load_turns import LoadCancellation, LoadTurns

_log = logging.getLogger(__name__)

#: Time for timing a model that nothing is known of before it serves.
FIRST_CALIBRATION_S = 1.0
#: A calibration from which times of runs differ by more, as a factor, is made anew.
_DISAGREES = 1.25
#: Wait for a calibrator beyond the compiler's own time limit, so that its error is the one told.
_PROBE_BEYOND_S = 30.0


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How models are calibrated and loaded."""

    #: An executor's name, or `auto` to have calibration choose.
    executor: str
    #: Time for timing one model.
    calibration_s: float
    #: Time limit for loading one model on all lanes.
    start_timeout_s: float
    #: Memory of a device, the upper bound of the weights of all models.
    budget_bytes: int


class Calibrations:
    """Finds and makes calibrations. Any thread; one model is measured at a time."""

    def __init__(
        self,
        cache: CalibrationCache,
        pool: LanePool,
        settings: RolloutSettings,
        turns: LoadTurns,
        lock: threading.Lock,
    ) -> None:
        """`lock` is the driver's, which guards the mutable parts of an entry."""
        self._cache = cache
        self._pool = pool
        self._settings = settings
        self._turns = turns
        self._lock = lock
        #: Whether a new model may serve after a short calibration. Set before the first load.
        self.starts_rough = False

    def load_ns(self, specs: Iterable[ModelSpec]) -> int | None:
        """Return the time that loading these models takes; None when one is not calibrated.

        Raises ConfigError when a file cannot be read.
        """
        known = [self._cache.get(content_hash(spec)) for spec in specs]
        return sum(one[1].load_ns for one in known if one) if all(known) else None

    def get(
        self, spec: ModelSpec, digest: str, progress: Progress, cancellation: LoadCancellation
    ) -> tuple[bool, Signature, Calibration]:
        """Return signature and calibration, from the cache or by calibrating now.

        The first value is True for a rough calibration, which is not kept.
        """
        cached = self._cache.get(digest)
        if cached is not None:
            return False, *cached
        settings = self._settings
        budget_s = settings.calibration_s
        # Compiling takes longer than a calibration, which would be done again for nothing.
        rough = self.starts_rough and not self._cache.compiles
        rough = rough and budget_s > FIRST_CALIBRATION_S
        found = self._calibrate(
            spec,
            digest,
            progress,
            cancellation,
            budget_s=FIRST_CALIBRATION_S if rough else budget_s,
            executor=settings.executor,
        )
        if rough:
            return True, found[0], found[1].rough()
        self._cache.put(digest, *found)
        return False, *found

    def why_due(self, entry: ModelEntry) -> str:
        """Return why a served model should be calibrated for long; empty for no reason."""
        if entry.is_rough:
            return "it was calibrated for a short time"
        if self._settings.calibration_s <= FIRST_CALIBRATION_S:
            return ""  # another one would know no better
        with self._lock:
            factor = entry.estimator.runs.disagreement
        if not 1 / _DISAGREES <= factor <= _DISAGREES:
            return f"its runs take {factor:.2f} times as long as calibrated"
        return "the machine was busy" if entry.estimator.calibration.was_busy else ""

    def complete(self, entry: ModelEntry, yields: bool) -> None:
        """Calibrate a served model for the usual time, with the executor it has.

        Its times are estimated anew then. With `yields` requests go first. Raises ModelError when
        it fails, NotReady when the calibrator dies or the server stops.
        """
        never = LoadCancellation()
        with self._turns.of_model(entry.spec.name, never):
            if entry.retired:
                return
            signature, found = self._calibrate(
                entry.spec,
                entry.digest,
                lambda step, fraction: None,
                never,
                budget_s=self._settings.calibration_s,
                executor=entry.executor,
                yields=yields,
            )
        with self._lock:
            # Otherwise times are of other terms.
            if found.memory.graphs == entry.estimator.calibration.memory.graphs:
                entry.estimator.retime(found.time, found.busy_share)
            entry.is_rough = False
            entry.cached_info = None
        found = msgspec.structs.replace(found, executor_reason=entry.executor_reason)
        self._cache.put(entry.digest, signature, found)
        _log.info("model %s: calibrated", entry.spec.key)

    def _calibrate(
        self,
        spec: ModelSpec,
        digest: str,
        progress: Progress,
        cancellation: LoadCancellation,
        *,
        budget_s: float,
        executor: str,
        yields: bool = False,
    ) -> tuple[Signature, Calibration]:
        """Calibrate a model in a process of its own, which times it for `budget_s`."""
        settings = self._settings
        max_bytes = settings.budget_bytes // 2
        message = ProbeModel(
            spec,
            budget_s,
            min(max_bytes, spec.max_memory_bytes or max_bytes),
            executor,
            self._cache.package(digest),
            settings.start_timeout_s,
        )
        try:
            with (
                self._turns.of_measuring(cancellation) as heard,
                self._pool.calibrator(
                    spec.domain, self._cache.compiles_into(), yields=yields
                ) as calibrator,
                cancellation.calling(calibrator.kill),
            ):
                _log.info("model %s: calibrating for %g s", spec.key, budget_s)

                def tell(step: str, fraction: float) -> None:
                    heard()
                    progress(step, fraction)

                timeout_s = settings.start_timeout_s + _PROBE_BEYOND_S
                found = calibrator.probe(message, timeout_s, tell)
        except NotReady:
            cancellation.check()
            raise
        except (OSError, EOFError) as error:
            raise NotReady(f"model {spec.key}: no process to calibrate it: {error}") from error
        return found
