"""Which models are served: read, calibrated, loaded on every lane, replaced and let go.

A version that does not load leaves what is served as it was, and is told; requests that name no
version get the newest that is served.

Loading never takes a lane from its tasks for longer than reading the weights: what is slow
(finding the shapes, tracing memory, timing) happens once, in a process of its own, and is
cached on disk.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from serve.core.types import Bytes
from serve.errors import ConfigError, NotReady, ServeError, UnknownName
from serve.estimate.calibration import Calibration
from serve.estimate.estimator import ASSUMED_OVERHEAD, ModelEstimator, Overhead
from serve.estimate.interference import Interference
from serve.inputs import INPUTS, Size
from serve.ipc.messages import LoadModel, ProbeModel
from serve.models.cache import CalibrationCache
from serve.models.model_signature import PACKAGED, Signature
from serve.models.repository import (
    BrokenModel,
    ModelSpec,
    content_hash,
    find,
    is_version,
    scan,
    scan_model,
    unknown_names,
)
from serve.server.api import NODE_IDS, ModelInfo, TensorSpec
from serve.server.lanes.lane_models import LaneModels
from serve.server.lanes.pool import LanePool

_log = logging.getLogger(__name__)

#: More than a model may take to be compiled, so that this is told.
_PROBE_BEYOND_S = 30.0
_DRAIN_TIMEOUT_S = 60.0

#: Told what is being done, and how much of it is done, 0 to 1.
Progress = Callable[[str, float], None]


@dataclass(slots=True)
class ModelEntry:
    """One model as served. Mutable parts belong to the driver's lock."""

    spec: ModelSpec
    #: Hash of its content.
    digest: str
    #: Unique per content and executor, so that a changed model can be loaded beside the old one.
    key: str
    signature: Signature
    estimator: ModelEstimator
    executor: str
    #: Why it is this executor, for people.
    executor_reason: str
    #: Accepted and not yet answered.
    inflight: int = 0
    retired: bool = False
    idle: threading.Event = field(default_factory=threading.Event)
    cached_info: ModelInfo | None = None

    def describe(self, graphs: tuple[str, ...], qos_factor: float) -> ModelInfo:
        """What is told of it while it serves; `graphs` are those that it can be asked about."""
        spec, signature = self.spec, self.signature
        sizes: dict[Size, int] = {"F": signature.num_features, "D": signature.edge_dim or -1}
        inputs = [
            TensorSpec(each.name, each.datatype, each.shape_of(sizes), each.optional)
            for each in map(INPUTS.__getitem__, spec.inputs)
        ]
        if graphs:
            inputs.append(NODE_IDS)
        output = TensorSpec("output", "FP32", (-1, signature.num_outputs))
        properties = {
            "description": spec.description,
            "factory": spec.factory,
            "output_rows": signature.rows,
            "graphs": ", ".join(graphs),
            "deterministic": str(signature.deterministic).lower(),
            "replayed_up_to": str(self.estimator.calibration.replay_most or ""),
            "executor_reason": self.executor_reason,
        }
        return ModelInfo(
            name=spec.name,
            version=str(spec.version),
            state="READY",
            reason=self.estimator.calibration.remarks,
            inputs=tuple(inputs),
            outputs=(output,),
            rows=signature.rows,
            executor=self.executor,
            weights_bytes=spec.weights_bytes,
            qos_factor=qos_factor,
            properties={key: value for key, value in properties.items() if value},
        )


class Registry:
    """The models of one server. Loads are one at a time; look-ups need no lock."""

    def __init__(
        self,
        root: Path,
        cache: CalibrationCache,
        pool: LanePool,
        *,
        executor: str,
        qos_factor: float,
        calibration_s: float,
        start_timeout_s: float,
        budget_bytes: int,
        budget_changed: Callable[[Bytes], None],
        lock: threading.Lock,
        graphs_of: Callable[["ModelEntry"], tuple[str, ...]] = lambda _: (),
    ) -> None:
        """`lock` is the engine's, which guards what changes in an entry.

        `graphs_of` names the resident graphs that a model can be asked about.
        """
        self._graphs_of = graphs_of
        self._root = root
        self._cache = cache
        self._pool = pool
        self._lanes = LaneModels(pool, start_timeout_s)
        self._executor = executor
        self._qos_factor = qos_factor
        self._calibration_s = calibration_s
        self._start_timeout_s = start_timeout_s
        self._budget_bytes = budget_bytes
        self._budget_changed = budget_changed
        self._lock = lock
        #: Everything served, by name and version; and the newest of each name.
        self._entries: dict[tuple[str, int], ModelEntry] = {}
        self._newest: dict[str, ModelEntry] = {}
        self._by_key: dict[str, ModelEntry] = {}
        #: Models being loaded or let go, and why those that are not served are not.
        self._states: dict[str, tuple[str, str]] = {}
        #: Why versions are not served as they lie in the repository, since they last were tried.
        self._failed: dict[tuple[str, int], str] = {}
        self._load_lock = threading.Lock()
        #: For the driver, which hears of lanes.
        self.lane_up = self._lanes.up
        self.lane_answered = self._lanes.answered
        self.lane_lost = self._lanes.lost
        self.interrupt = self._lanes.interrupt
        #: Why a model is in quarantine, by its entry's key; empty when it is not.
        self.quarantine_reason: Callable[[str], str] = lambda key: ""
        #: What the server adds to a run, shared by all models.
        self.overhead = Overhead(*ASSUMED_OVERHEAD)
        self.interference = Interference()

    @property
    def weights_bytes(self) -> int:
        """Weights and code of all models the lanes hold."""
        return self._lanes.weights_bytes

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        """Everything served now."""
        return tuple(self._entries.values())

    def factor_of(self, entry: ModelEntry) -> float:
        """QoS target ÷ solo time of the model."""
        return entry.spec.qos_factor or self._qos_factor

    def get(self, name: str, version: str = "") -> ModelEntry:
        """The served model, the newest version unless given; raises UnknownName or NotReady."""
        entry = self._newest.get(name)
        number = int(version) if is_version(version) else None
        if entry is not None and version not in ("", str(entry.spec.version)):
            entry = None if number is None else self._entries.get((name, number))
        if entry is not None:
            return entry
        state, reason = self._states.get(name, ("", ""))
        if state in ("", "UNAVAILABLE") and (name, number) in self._failed:
            state, reason = "UNAVAILABLE", self._failed[name, number]  # type: ignore[index]
        if not state or (version and number is None):
            state, reason = "UNAVAILABLE", "not loaded"
            try:
                find(self._root, name, version)
            except ConfigError as error:
                reason = str(error)
            version = "" if number is None else version
        wanted = f"version {version} of model '{name}'" if version else f"model '{name}'"
        raise NotReady(f"{wanted} is {state}" + (f": {reason}" if reason else ""))

    def by_key(self, key: str) -> ModelEntry | None:
        """The served model of that key; None when it is served no more."""
        return self._by_key.get(key)

    def load(self, name: str, progress: Progress | None = None) -> ModelEntry:
        """Serve every version of `name` that loads as it is on disk now; returns the newest.

        Does nothing for a version that is served as it is. A changed one is loaded beside the
        old one, takes over, and the old one is let go once its requests are answered, as are
        versions that are gone. One that does not load is logged, told by `infos`, and leaves the
        old one serving. When that is the newest on disk its error is raised, after the others
        were loaded, and versions that are gone stay.
        """
        with self._load_lock:
            try:
                return self._load(name, progress or (lambda step, fraction: None))
            except ServeError as error:
                if isinstance(error, UnknownName) or name in self._newest:
                    self._states.pop(name, None)
                else:
                    self._states[name] = ("UNAVAILABLE", str(error))
                if not isinstance(error, UnknownName):  # a name that a client made up
                    _log.error("loading %s: %s", name, error)
                raise

    def _load(self, name: str, progress: Progress) -> ModelEntry:
        found = scan_model(self._root, name)
        #: By version, the newest first: where the device has no room for all, it has for that.
        on_disk = {one.version: one for one in reversed(found) if one.version is not None}
        if not on_disk:
            raise ConfigError(found[-1].reason if isinstance(found[-1], BrokenModel) else "")
        newest = next(iter(on_disk))
        self._states[name] = ("LOADING", "")
        self._forget_failures(name)
        failures: dict[int, ServeError] = {}
        for version, one in on_disk.items():
            try:
                if isinstance(one, BrokenModel):
                    raise ConfigError(one.reason)
                self._load_version(one, progress)
            except ServeError as error:
                if version != newest:  # whose error is raised
                    _log.error("loading %s: version %d: %s", name, version, error)
                failures[version] = error
                self._failed[name, version] = str(error)
        served = {version for key, version in self._entries if key == name}
        if not served:
            raise failures[newest]
        default = max(served) if newest in failures else newest
        self._newest[name] = self._entries[name, default]
        self._states.pop(name, None)
        if (failure := failures.get(newest)) is not None:
            raise type(failure)(
                f"version {newest} of model '{name}' does not load, version {default} serves: "
                f"{failure}"
            ) from failure
        for version in served - on_disk.keys():
            self._let_go(self._entries.pop((name, version)))
        return self._newest[name]

    def _forget_failures(self, name: str) -> None:
        self._failed = {key: told for key, told in self._failed.items() if key[0] != name}

    def _load_version(self, spec: ModelSpec, progress: Progress) -> None:
        old = self._entries.get((spec.name, spec.version))
        if old is not None and old.digest == content_hash(spec):
            return
        needed_bytes = self.weights_bytes + spec.weights_bytes
        if needed_bytes > self._budget_bytes:
            raise NotReady(
                f"model {spec.key}: weights of all models would take {needed_bytes} bytes, "
                f"the device has {self._budget_bytes} (device.memory_budget)"
            )
        own = self._lanes.own_files(spec)
        try:
            entry = self._load_own(own, progress)
        except BaseException:
            self._lanes.close_files_of(own)
            raise
        self._serve(entry, old)
        if old is not None:
            self._let_go(old)
        _log.info("model %s: serving version %d", spec.name, spec.version)
        if warning := entry.estimator.calibration.warning:
            _log.warning("model %s: %s", spec.key, warning)

    def _load_own(self, spec: ModelSpec, progress: Progress) -> ModelEntry:
        """Calibrate the model, unless it was before, and load it on the lanes."""
        digest = content_hash(spec)
        signature, calibration = self._calibrated(spec, digest, progress)
        return self._on_every_lane(spec, digest, signature, calibration)

    def _serve(self, entry: ModelEntry, old: ModelEntry | None) -> None:
        """Requests get `entry` from now on, in place of `old`."""
        spec = entry.spec
        self._entries[spec.name, spec.version] = self._by_key[entry.key] = entry
        if old is not None and self._newest[spec.name] is old:
            self._newest[spec.name] = entry

    def _on_every_lane(
        self,
        spec: ModelSpec,
        digest: str,
        signature: Signature,
        calibration: Calibration,
    ) -> ModelEntry:
        """Load the model on all lanes as it was calibrated."""
        cache, executor = self._cache, calibration.executor
        content = f"{spec.key}@{digest[:12]}"
        message = LoadModel(
            f"{content} {executor}", spec, signature, executor, content=content,
            replay_most=calibration.replay_most,
        )  # fmt: skip
        if executor in PACKAGED:
            message = msgspec.structs.replace(
                message, package=cache.package(digest), package_bytes=cache.package_bytes(digest)
            )
        key = message.key
        self._lanes.add(message)
        self._budget_changed(Bytes(self.weights_bytes))
        try:
            self._lanes.load(message)
        except ServeError:
            self._forget(key)
            raise
        estimator = ModelEstimator(calibration, self.overhead, self.interference)
        reason = calibration.executor_reason
        return ModelEntry(spec, digest, key, signature, estimator, executor, reason)

    def unload(self, name: str) -> None:
        """Stop serving `name`; returns when its accepted requests are answered."""
        with self._load_lock:
            if self._newest.pop(name, None) is None:
                scan_model(self._root, name)
                return
            self._states[name] = ("UNLOADING", "")
            self._forget_failures(name)
            for key in [key for key in self._entries if key[0] == name]:
                self._let_go(self._entries.pop(key))
            self._states[name] = ("UNAVAILABLE", "unloaded")

    def infos(self) -> tuple[ModelInfo, ...]:
        """Every model and version of the repository, served or not, and what else is served."""
        rows = [self._info_of(found) for found in scan(self._root)]
        there = {(row.name, row.version) for row in rows}
        rows += [
            self.info(entry)  # its folder is gone
            for (name, version), entry in tuple(self._entries.items())
            if (name, str(version)) not in there
        ]
        return tuple(sorted(rows, key=lambda row: (row.name, int(row.version or 0))))

    def _info_of(self, found: ModelSpec | BrokenModel) -> ModelInfo:
        """What is told of a version, or of a model that has none."""
        name, version = found.name, found.version
        state, reason = self._states.get(name, ("UNAVAILABLE", "not loaded"))
        failure = "" if version is None else self._failed.get((name, version), "")
        entry = None if version is None else self._entries.get((name, version))
        if entry is not None:
            info = self.info(entry)
            if failure and info.state == "READY":
                info = replace(info, reason=f"serves as it was, what is there now fails: {failure}")
            return info
        if isinstance(found, BrokenModel):
            state, reason = "UNAVAILABLE", found.reason
        elif failure and state == "UNAVAILABLE":
            reason = failure
        return ModelInfo(name, "" if version is None else str(version), state, reason)

    def info(self, entry: ModelEntry) -> ModelInfo:
        """What is told of a served model."""
        reason = self.quarantine_reason(entry.key)
        if entry.cached_info is None:
            entry.cached_info = entry.describe(self._graphs_of(entry), self.factor_of(entry))
        if reason:
            return replace(entry.cached_info, state="UNAVAILABLE", reason=reason)
        return entry.cached_info

    def forget_infos(self) -> None:
        """What is told of models depends on the graphs that are there, which have changed."""
        for entry in self._entries.values():
            entry.cached_info = None

    def _calibrated(
        self, spec: ModelSpec, digest: str, progress: Progress
    ) -> tuple[Signature, Calibration]:
        """Signature and calibration, from the cache or found out now."""
        cached = self._cache.get(digest)
        if cached is not None:
            return cached
        _log.info("model %s: calibrating, once for these weights on this machine", spec.key)
        message = ProbeModel(
            spec,
            self._calibration_s,
            self._budget_bytes // 2,
            self._executor,
            self._cache.package(digest),
            self._start_timeout_s,
        )
        try:
            with self._pool.calibrator() as calibrator:
                found = calibrator.probe(message, self._start_timeout_s + _PROBE_BEYOND_S, progress)
        except (OSError, EOFError) as error:
            raise NotReady(f"model {spec.key}: no process to calibrate it: {error}") from error
        self._cache.put(digest, *found)
        return found

    def _let_go(self, entry: ModelEntry) -> None:
        """Wait until nothing of the model runs or waits, then drop it from the lanes."""
        with self._lock:
            entry.retired = True
            if entry.inflight == 0:
                entry.idle.set()
        if not entry.idle.wait(_DRAIN_TIMEOUT_S):
            _log.warning("model %s: still has requests; its memory is kept", entry.key)
            return
        self._forget(entry.key)

    def _forget(self, key: str) -> None:
        self._by_key.pop(key, None)
        self._lanes.drop(key)
        self._budget_changed(Bytes(self.weights_bytes))

    def close(self) -> None:
        """Let go of all files; for when no lane runs any more."""
        self._lanes.close()

    def names_to_load(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """`wanted`, or every model of the repository; raises ConfigError on an unknown one."""
        if wrong := unknown_names(self._root, wanted):
            raise ConfigError("\n".join(wrong))
        return wanted or tuple(dict.fromkeys(found.name for found in scan(self._root)))
