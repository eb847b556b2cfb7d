"""Which models are served: read, calibrated, loaded on every lane, replaced and let go.

Loading never takes a lane from its tasks for longer than reading the weights: what is slow
(finding the shapes, tracing memory, timing) happens once, in a process of its own, and is
cached on disk.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

import msgspec

from serve.core.types import Bytes, LaneId
from serve.errors import ConfigError, ModelError, NotFound, NotReady, ServeError
from serve.estimate.calibration import Calibration
from serve.estimate.estimator import ModelEstimator, Overhead
from serve.estimate.interference import Interference
from serve.models.cache import CalibrationCache
from serve.models.facts import PACKAGED, Signature
from serve.models.repository import BrokenModel, ModelSpec, content_hash, find, scan
from serve.runtime import clock
from serve.runtime.api import NODE_IDS, ModelInfo, TensorSpec
from serve.runtime.messages import LoadModel, ProbeModel
from serve.runtime.messages import UnloadModel as UnloadFromLane
from serve.runtime.overhead import ASSUMED
from serve.runtime.pool import LanePool
from serve.runtime.quarantine import Quarantine

_log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 180.0
_LOAD_TIMEOUT_S = 120.0
_DRAIN_TIMEOUT_S = 60.0

#: Told what is being done, and how much of it is done, 0 to 1.
Progress = Callable[[str, float], None]

_INPUT_SPECS = {
    "x": ("FP32", (-1, -1)),
    "edge_index": ("INT64", (2, -1)),
    "edge_weight": ("FP32", (-1,)),
    "edge_attr": ("FP32", (-1, -1)),
    "batch": ("INT64", (-1,)),
}
#: Inputs a request may leave out: the model's own default is used.
_OPTIONAL_INPUTS = frozenset({"edge_weight", "batch"})


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
    quarantine: Quarantine = field(default_factory=Quarantine)
    cached_info: ModelInfo | None = None


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
        self._executor = executor
        self._qos_factor = qos_factor
        self._calibration_s = calibration_s
        self._budget_bytes = budget_bytes
        self._budget_changed = budget_changed
        self._lock = lock
        #: Everything served, by name and version; and the newest of each name.
        self._entries: dict[tuple[str, int], ModelEntry] = {}
        self._newest: dict[str, ModelEntry] = {}
        self._by_key: dict[str, ModelEntry] = {}
        #: Models being loaded or let go, and why those that are not served are not.
        self._states: dict[str, tuple[str, str]] = {}
        self._load_lock = threading.Lock()
        self._answers = threading.Condition()
        #: Lanes that have not yet answered a LoadModel, by key; and the failures told.
        self._waiting: dict[str, set[LaneId]] = {}
        self._failures: dict[str, str] = {}
        #: Lanes whose process is up, with what was sent to them so far.
        self._lanes_up: set[LaneId] = set()
        #: Every model the lanes hold or are about to, by key.
        self._on_lanes: dict[str, LoadModel] = {}
        #: What serves until it is compiled in the background; None ends whoever waits for it.
        self.to_compile: SimpleQueue[ModelEntry | None] = SimpleQueue()
        #: What the server adds to a run, shared by all models.
        self.overhead = Overhead(*ASSUMED)
        self.interference = Interference()

    @property
    def weights_bytes(self) -> int:
        """Weights and code of all models the lanes hold; their pages are shared between lanes."""
        held = tuple(self._on_lanes.values())
        # A model on two executors has its weights once.
        weights = {message.content: message.spec.weights_bytes for message in held}
        return sum(weights.values()) + sum(message.package_bytes for message in held)

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        """Everything served now."""
        return tuple(self._entries.values())

    def factor_of(self, entry: ModelEntry) -> float:
        """QoS target ÷ solo time of the model."""
        return entry.spec.qos_factor or self._qos_factor

    def get(self, name: str, version: str = "") -> ModelEntry:
        """The served model, the newest version unless given; raises NotFound or NotReady."""
        entry = self._newest.get(name)
        if entry is not None and version not in ("", str(entry.spec.version)):
            is_number = version.isascii() and version.isdecimal() and len(version) < 20
            entry = self._entries.get((name, int(version))) if is_number else None
        if entry is not None:
            return entry
        state, reason = self._states.get(name, ("", ""))
        if not state:
            find(self._root, name, version)
            state, reason = "UNAVAILABLE", "not loaded"
        wanted = f"version {version} of model '{name}'" if version else f"model '{name}'"
        raise NotReady(f"{wanted} is {state}" + (f": {reason}" if reason else ""))

    def by_key(self, key: str) -> ModelEntry | None:
        """The served model of that key; None when it is served no more."""
        return self._by_key.get(key)

    def load(self, name: str, progress: Progress | None = None) -> ModelEntry:
        """Serve every version of `name` as it is on disk now; returns the newest.

        Does nothing for a version that is served as it is. A changed one is loaded beside the
        old one, takes over, and the old one is let go once its requests are answered, as are
        versions that are gone.
        """
        with self._load_lock:
            try:
                return self._load(name, progress or (lambda step, fraction: None))
            except ServeError as error:
                if isinstance(error, NotFound) or name in self._newest:
                    self._states.pop(name, None)
                else:
                    self._states[name] = ("UNAVAILABLE", str(error))
                raise

    def _load(self, name: str, progress: Progress) -> ModelEntry:
        newest = find(self._root, name)
        self._states[name] = ("LOADING", "")
        versions = set()
        for found in scan(self._root):
            if found.name == name and isinstance(found, ModelSpec):
                self._load_version(found, progress)
                versions.add(found.version)
        self._newest[name] = self._entries[name, newest.version]
        self._states.pop(name, None)
        for key in [key for key in self._entries if key[0] == name and key[1] not in versions]:
            self._let_go(self._entries.pop(key))
        return self._newest[name]

    def _load_version(self, spec: ModelSpec, progress: Progress) -> None:
        digest = content_hash(spec)
        old = self._entries.get((spec.name, spec.version))
        if old is not None and old.digest == digest:
            return
        needed_bytes = self.weights_bytes + spec.weights_bytes
        if needed_bytes > self._budget_bytes:
            raise NotReady(
                f"model {spec.key}: weights of all models would take {needed_bytes} bytes, "
                f"the device has {self._budget_bytes} (device.memory_budget)"
            )
        later = self._cache.later
        found = None if later is None else later.get(digest)
        cache = self._cache if later is None or found is None else later
        signature, calibration = found or self._calibrated(spec, digest, progress)
        entry = self._on_every_lane(spec, digest, signature, calibration, cache)
        self._serve(entry, old)
        if old is not None:
            self._let_go(old)
        _log.info("model %s: serving version %d", spec.name, spec.version)
        if calibration.warning:
            _log.warning("model %s: %s", spec.key, calibration.warning)
        if later is not None and cache is not later:
            self.to_compile.put(entry)

    def recompiled(
        self,
        entry: ModelEntry,
        signature: Signature,
        calibration: Calibration,
        before_each: Callable[[], None],
    ) -> None:
        """The model was tried compiled, and is to serve so from the next request on, if it does.

        Lanes load it one after the other, each after `before_each`. Does nothing when the entry
        serves no more. Raises ModelError or NotReady, and all stays as it was, when it does not
        load.
        """
        spec, later = entry.spec, self._cache.later
        assert later is not None
        with self._load_lock:
            if self._entries.get((spec.name, spec.version)) is not entry:
                return
            if calibration.executor == entry.executor:
                entry.executor_reason, entry.cached_info = calibration.executor_reason, None
            else:
                new = self._on_every_lane(
                    spec, entry.digest, signature, calibration, later, before_each
                )
                with self._lock:
                    new.estimator.take_over(entry.estimator)
                new.quarantine = entry.quarantine
                self._serve(new, entry)
            later.put(entry.digest, signature, calibration)
        if calibration.executor != entry.executor:
            self._let_go(entry)
        _log.info("model %s: served by %s", spec.key, calibration.executor)

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
        cache: CalibrationCache,
        before_each: Callable[[], None] | None = None,
    ) -> ModelEntry:
        """Load the model on all lanes as it was calibrated, what was compiled from `cache`."""
        executor = calibration.executor
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
        self._on_lanes[key] = message
        self._budget_changed(Bytes(self.weights_bytes))
        try:
            self._send_to_lanes(message, before_each)
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
                find(self._root, name)
                return
            self._states[name] = ("UNLOADING", "")
            for key in [key for key in self._entries if key[0] == name]:
                self._let_go(self._entries.pop(key))
            self._states[name] = ("UNAVAILABLE", "unloaded")

    def infos(self) -> tuple[ModelInfo, ...]:
        """Every model and version of the repository, served or not."""
        rows = []
        for found in scan(self._root):
            version = "" if found.version is None else str(found.version)
            entry = (
                None if found.version is None else self._entries.get((found.name, found.version))
            )
            if entry is not None:
                rows.append(self.info(entry))
            elif isinstance(found, BrokenModel):
                rows.append(ModelInfo(found.name, version, "UNAVAILABLE", found.reason))
            else:
                state, reason = self._states.get(found.name, ("UNAVAILABLE", "not loaded"))
                rows.append(ModelInfo(found.name, version, state, reason))
        return tuple(rows)

    def info(self, entry: ModelEntry) -> ModelInfo:
        """What is told of a served model."""
        reason = entry.quarantine.reason(clock.now_ns())
        if reason:
            return replace(self._usual_info(entry), state="UNAVAILABLE", reason=reason)
        return self._usual_info(entry)

    def _usual_info(self, entry: ModelEntry) -> ModelInfo:
        if entry.cached_info is not None:
            return entry.cached_info
        spec, signature = entry.spec, entry.signature
        inputs = []
        for name in spec.inputs:
            datatype, shape = _INPUT_SPECS[name]
            if name == "x":
                shape = (-1, signature.num_features)
            elif name == "edge_attr" and signature.edge_dim is not None:
                shape = (-1, signature.edge_dim)
            inputs.append(TensorSpec(name, datatype, shape, name in _OPTIONAL_INPUTS))
        graphs = self._graphs_of(entry)
        if graphs:
            inputs.append(NODE_IDS)
        output = TensorSpec("output", "FP32", (-1, signature.num_outputs))
        properties = {
            "description": spec.description,
            "factory": spec.factory,
            "output_rows": signature.rows,
            "graphs": ", ".join(graphs),
            "deterministic": str(signature.deterministic).lower(),
            "replayed_up_to": str(entry.estimator.calibration.replay_most or ""),
            "executor_reason": entry.executor_reason,
        }
        entry.cached_info = ModelInfo(
            name=spec.name,
            version=str(spec.version),
            state="READY",
            reason=entry.estimator.calibration.remarks,
            inputs=tuple(inputs),
            outputs=(output,),
            rows=signature.rows,
            executor=entry.executor,
            weights_bytes=spec.weights_bytes,
            qos_factor=self.factor_of(entry),
            properties={key: value for key, value in properties.items() if value},
        )
        return entry.cached_info

    def forget_infos(self) -> None:
        """What is told of models depends on the graphs that are there, which have changed."""
        for entry in self._entries.values():
            entry.cached_info = None

    def lane_up(self, lane_id: LaneId) -> bool:
        """A lane's process started; send it all models. True when it needs none."""
        with self._answers:
            self._lanes_up.add(lane_id)
            wanted = tuple(self._on_lanes.values())
            for message in wanted:
                self._waiting.setdefault(message.key, set()).add(lane_id)
        for message in wanted:
            self._pool.send(lane_id, message)
        return not wanted

    def lane_answered(self, lane_id: LaneId, key: str, failure: str = "") -> bool:
        """A lane loaded a model, or says why not. True when it waits for nothing more."""
        with self._answers:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(lane_id)
            if failure:
                self._failures[key] = failure
            self._answers.notify_all()
            return not any(lane_id in lanes for lanes in self._waiting.values())

    def lane_lost(self, lane_id: LaneId) -> None:
        """A lane's process ended; it answers nothing more."""
        with self._answers:
            self._lanes_up.discard(lane_id)
            for waiting in self._waiting.values():
                waiting.discard(lane_id)
            self._answers.notify_all()

    def _send_to_lanes(
        self, message: LoadModel, before_each: Callable[[], None] | None = None
    ) -> None:
        """Load on every lane that is up; the others get it when they come up.

        On all at once, or with `before_each` on one after the other, from the last to the first.
        """
        with self._answers:
            lanes = sorted(self._lanes_up, reverse=True)
            self._failures.pop(message.key, None)
        for some in [lanes] if before_each is None else [[lane_id] for lane_id in lanes]:
            if before_each is not None:
                before_each()
            self._load_on(message, some)

    def _load_on(self, message: LoadModel, lanes: Sequence[LaneId]) -> None:
        with self._answers:
            waiting = self._waiting.setdefault(message.key, set())
            waiting |= self._lanes_up.intersection(lanes)
        for lane_id in lanes:
            self._pool.send(lane_id, message)
        with self._answers:
            done = self._answers.wait_for(
                lambda: not self._waiting[message.key] or message.key in self._failures,
                _LOAD_TIMEOUT_S,
            )
            failure = self._failures.pop(message.key, "")
        if failure:
            raise ModelError(f"model {message.spec.key} does not load: {failure}")
        if not done:
            raise NotReady(f"model {message.spec.key} did not load within {_LOAD_TIMEOUT_S:g} s")

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
        )
        with self._pool.calibrator() as calibrator:
            found = calibrator.probe(message, _PROBE_TIMEOUT_S, progress)
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
        with self._answers:
            self._on_lanes.pop(key, None)
            self._waiting.pop(key, None)
            lanes = tuple(self._lanes_up)
        for lane_id in lanes:
            self._pool.send(lane_id, UnloadFromLane(key))
        self._budget_changed(Bytes(self.weights_bytes))

    def names_to_load(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """`wanted`, or every model of the repository; raises ConfigError on an unknown one."""
        known = {found.name for found in scan(self._root)}
        for name in wanted:
            if name not in known:
                raise ConfigError(
                    f"models.load: '{name}' is not in {self._root}; it holds: "
                    f"{', '.join(sorted(known)) or 'nothing'}"
                )
        return wanted or tuple(sorted(known))
