"""Rollout of models to the lanes: read, calibrated, loaded on every lane, replaced and unloaded.

A version that does not load leaves the served one as it was, and the reason is told. Loading keeps
no lane from its tasks: finding shapes, tracing memory and timing happen once, in a process of their
own, and are cached on disk; then successors of the lanes load the model and take their places (on
a GPU, the lanes load it).
"""

import logging
import threading
from collections.abc import Callable

import msgspec

from serve.core.events import Event
from serve.core.types import Bytes
from serve.errors import ConfigError, NotReady, RequestCancelled, ServeError, UnknownName
from serve.estimate.calibration import Calibration
from serve.estimate.estimator import ModelEstimator
from serve.ipc.messages import LoadModel
from serve.models.cache import CalibrationCache
from serve.models.model_signature import PACKAGED, Signature
from serve.models.repository import BrokenModel, ModelSpec, content_hash, scan_model
from serve.progress import Progress
from serve.server.calibrations import Calibrations, RolloutSettings
from serve.server.catalogue import ModelCatalogue, ModelEntry
from serve.server.lane_domains import LaneDomains
from serve.server.lanes.lane_models import LaneModels
from serve.server.lanes.pool import LanePool
from serve.server.load_turns import LoadCancellation, LoadTurns
from serve.threads import Thread

_log = logging.getLogger(__name__)

_DRAIN_TIMEOUT_S = 60.0


class ModelRollout:
    """Changes what a catalogue serves, each model by one thread at a time. Any thread."""

    def __init__(
        self,
        catalogue: ModelCatalogue,
        cache: CalibrationCache,
        pool: LanePool,
        settings: RolloutSettings,
        *,
        budget_changed: Callable[[Bytes], None],
        read_rules: Callable[[str], None] = lambda name: None,
        tell: Callable[[Event], None],
        lock: threading.Lock,
    ) -> None:
        """`budget_changed` is told `weights_bytes` whenever it changes.

        `read_rules` reads again which versions of a model answer what; it is called at each load.

        `tell` gives the scheduler an event.

        `lock` is the driver's, which guards the mutable parts of an entry.
        """
        self._catalogue = catalogue
        self._cache = cache
        self._pool = pool
        self._settings = settings
        self._budget_changed = budget_changed
        self._read_rules = read_rules
        self._lock = lock
        self._turns = LoadTurns(lambda: pool.calibrators.interrupted)
        #: Guards the memory for weights: what is given to models that the lanes do not hold yet.
        self._room = threading.Lock()
        self._coming_bytes: dict[str, int] = {}
        self.lane_models = LaneModels(pool, settings.start_timeout_s)
        self._domains = LaneDomains(pool, self.lane_models, tell)
        self.calibrations = Calibrations(cache, pool, settings, self._turns, lock)

    @property
    def weights_bytes(self) -> int:
        """Weights and code of all models that the lanes hold."""
        return self.lane_models.weights_bytes

    def load(
        self,
        name: str,
        progress: Progress | None = None,
        cancellation: LoadCancellation | None = None,
    ) -> ModelEntry:
        """Serve every version of `name` that loads from disk; return the default version.

        A version that is served unchanged stays. A changed one is loaded beside the old one and
        takes over; the old one is unloaded once its requests are answered, and so are versions that
        are gone. A version that does not load is logged and described by ``ModelInfos``, and the
        old one serves on. If the newest on disk does not load, its error is raised after the others
        were loaded, and versions that are gone stay. Errors tell paths in the repository relative
        to it; the log has them in full. A load that is cancelled before a version serves raises
        RequestCancelled, and changes no more.
        """
        cancellation = cancellation or LoadCancellation()
        with self._turns.of_model(name, cancellation):
            try:
                return self._load(name, progress or (lambda step, fraction: None), cancellation)
            except ServeError as error:
                told = self._catalogue.told(str(error))
                if isinstance(error, UnknownName) or self._catalogue.serves(name):
                    self._catalogue.clear_state(name)
                else:
                    self._catalogue.set_state(name, "UNAVAILABLE", told)
                if not isinstance(error, UnknownName):  # a name that a client made up
                    _log.error("loading %s: %s", name, error)
                raise type(error)(told) from error

    def interrupt(self) -> None:
        """End loads that are under way soon, after an interrupt of the calibrators."""
        self._turns.interrupt()
        self.lane_models.interrupt()

    def unload(self, name: str, cancellation: LoadCancellation | None = None) -> None:
        """Stop serving `name`; return when its accepted requests are answered.

        Raises RequestCancelled when it is cancelled before its turn.
        """
        with self._turns.of_model(name, cancellation or LoadCancellation()):
            if not self._catalogue.withdraw(name):
                scan_model(self._catalogue.root, name)  # raises UnknownName
                return
            self._catalogue.set_state(name, "UNLOADING")
            self._catalogue.clear_failures(name)
            for version in self._catalogue.versions(name):
                self._retire(self._catalogue.remove(name, version))
            self._catalogue.set_state(name, "UNAVAILABLE", "unloaded")

    def close(self) -> None:
        """Close all files, once no lane runs any more."""
        self.lane_models.close()

    def _load(self, name: str, progress: Progress, cancellation: LoadCancellation) -> ModelEntry:
        catalogue = self._catalogue
        found = scan_model(catalogue.root, name)
        # The newest first: if the device has no room for all versions, it has room for that one.
        on_disk = {one.version: one for one in reversed(found) if one.version is not None}
        if not on_disk:
            raise ConfigError(found[-1].reason if isinstance(found[-1], BrokenModel) else "")
        newest = next(iter(on_disk))
        catalogue.set_state(name, "LOADING")
        catalogue.clear_failures(name)
        failures: dict[int, ServeError] = {}
        for version, one in on_disk.items():
            try:
                if isinstance(one, BrokenModel):
                    raise ConfigError(one.reason)
                self._load_version(one, progress, cancellation)
            except RequestCancelled:
                raise
            except ServeError as error:
                if version != newest:  # the error of the newest is raised below
                    _log.error("loading %s: version %d: %s", name, version, error)
                failures[version] = error
                catalogue.set_failure(name, version, catalogue.told(str(error)))
        served = catalogue.versions(name)
        if not served:
            raise failures[newest]
        default = catalogue.set_default(name, max(served) if newest in failures else newest)
        self._read_rules(name)
        catalogue.clear_state(name)
        if (failure := failures.get(newest)) is not None:
            raise type(failure)(
                f"version {newest} of model '{name}' does not load, version "
                f"{default.spec.version} serves: {failure}"
            ) from failure
        for version in served - on_disk.keys():
            self._retire(catalogue.remove(name, version))
        return default

    def _load_version(
        self, spec: ModelSpec, progress: Progress, cancellation: LoadCancellation
    ) -> None:
        """Serve the version as it is on disk, unless it is served so already."""
        old = self._catalogue.version(spec.name, spec.version)
        if old is not None and old.digest == content_hash(spec):
            return
        self._domains.require(spec)
        self._take_room(spec)
        try:
            copied = self.lane_models.copy_files(spec)
            try:
                digest = content_hash(copied)
                rough, signature, calibration = self.calibrations.get(
                    copied, digest, progress, cancellation
                )
                self._domains.enter(spec, cancellation)
                try:
                    entry = self._load_on_lanes(
                        copied, digest, signature, calibration, cancellation
                    )
                except BaseException:
                    self._domains.leave(spec)
                    raise
                entry.is_rough = rough
            except BaseException:
                self.lane_models.close_files_of(copied)
                raise
        finally:
            self._leave_room(spec)
        self._catalogue.serve(entry, old)
        if old is not None:
            self._retire(old)
        _log.info("model %s: serving version %d", spec.name, spec.version)
        if warning := calibration.warning:
            _log.warning("model %s: %s", spec.key, warning)

    def _take_room(self, spec: ModelSpec) -> None:
        """Reserve the memory of the version's weights; raises NotReady when it is not there."""
        with self._room:
            needed_bytes = self.weights_bytes + spec.weights_bytes
            needed_bytes += sum(self._coming_bytes.values())
            if needed_bytes > self._settings.budget_bytes:
                raise NotReady(
                    f"model {spec.key}: weights of all models would take {needed_bytes} bytes, "
                    f"the device has {self._settings.budget_bytes} (device.memory_budget)"
                )
            self._coming_bytes[spec.key] = spec.weights_bytes

    def _leave_room(self, spec: ModelSpec) -> None:
        """Reserve it no more: the lanes hold the version, or it does not load."""
        with self._room:
            self._coming_bytes.pop(spec.key, None)

    def _load_on_lanes(
        self,
        spec: ModelSpec,
        digest: str,
        signature: Signature,
        calibration: Calibration,
        cancellation: LoadCancellation,
    ) -> ModelEntry:
        """Load the model on all lanes with the executor that calibration chose."""
        executor = calibration.executor
        content = f"{spec.key}@{digest[:12]}"
        message = LoadModel(
            f"{content} {executor}", spec, signature, executor, content=content,
            replay_most=calibration.replay_most, replay_any_size=calibration.replay_any_size,
            gather_threads=calibration.gather_threads,
        )  # fmt: skip
        if executor in PACKAGED:
            message = msgspec.structs.replace(
                message,
                package=self._cache.package(digest),
                package_bytes=self._cache.package_bytes(digest),
            )
        key = message.key
        with self._room:
            self.lane_models.add(message)
            self._coming_bytes.pop(spec.key, None)
        self._tell_budget()
        try:
            self.lane_models.load(message, cancellation)
        except ServeError:
            self._forget(key)
            raise
        catalogue = self._catalogue
        estimator = ModelEstimator(calibration, catalogue.overhead, catalogue.slowdown)
        reason = calibration.executor_reason
        return ModelEntry(spec, digest, key, signature, estimator, executor, reason)

    def _retire(self, entry: ModelEntry) -> None:
        """Drop the model from the lanes once no request of it is left.

        Waits for that for a while; after that a thread does.
        """
        with self._lock:
            entry.retired = True
            if entry.inflight == 0:
                entry.idle.set()
        if entry.idle.wait(_DRAIN_TIMEOUT_S):
            self._drop(entry)
            return
        _log.warning("model %s: still has requests; its memory is kept until they end", entry.key)
        try:
            Thread(target=self._drop_late, args=(entry,), name="retired").start()
        except RuntimeError as error:
            _log.error("model %s: its memory is kept: %s", entry.key, error)

    def _drop_late(self, entry: ModelEntry) -> None:
        entry.idle.wait()  # every request ends, at the stop of the server if not before
        try:
            with self._turns.of_model(entry.spec.name, LoadCancellation()):
                if not self._pool.calibrators.interrupted:
                    self._drop(entry)
        except NotReady:
            return  # the server stops, and drops all

    def _drop(self, entry: ModelEntry) -> None:
        if self._catalogue.by_key(entry.key) is entry:
            self._forget(entry.key)
        else:  # the same content was loaded again meanwhile, from files of its own
            self.lane_models.close_files_of(entry.spec)
        self._domains.leave(entry.spec)

    def _forget(self, key: str) -> None:
        self._catalogue.forget(key)
        self.lane_models.drop(key)
        self._tell_budget()

    def _tell_budget(self) -> None:
        with self._room:
            self._budget_changed(Bytes(self.weights_bytes))
