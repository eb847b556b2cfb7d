"""What the lanes hold: every model they were told to load, and the files that these read."""

import threading

from serve.core.types import LaneId
from serve.errors import ModelError, NotReady
from serve.ipc.messages import LoadModel, UnloadModel
from serve.models.repository import ModelSpec
from serve.models.sealed_copies import SealedCopies
from serve.server.lanes.pool import LanePool


class LaneModels:
    """The models on all lanes of a server. Any thread."""

    def __init__(self, pool: LanePool, start_timeout_s: float) -> None:
        """`start_timeout_s`: how long a lane may take to load one model."""
        self._pool = pool
        self._start_timeout_s = start_timeout_s
        self._answers = threading.Condition()
        #: Lanes that have not yet answered a LoadModel, by key; and the failures told.
        self._waiting: dict[str, set[LaneId]] = {}
        self._failures: dict[str, str] = {}
        #: Lanes whose process is up, with what was sent to them so far.
        self._lanes_up: set[LaneId] = set()
        #: Every model the lanes hold or are about to, by key.
        self.held: dict[str, LoadModel] = {}
        #: What they read, by where their weights are.
        self._own_files: dict[str, SealedCopies] = {}

    @property
    def weights_bytes(self) -> int:
        """Weights and code of all models the lanes hold; their pages are shared between lanes."""
        held = tuple(self.held.values())
        # A model on two executors has its weights once.
        weights = {message.content: message.spec.weights_bytes for message in held}
        return sum(weights.values()) + sum(message.package_bytes for message in held)

    def add(self, message: LoadModel) -> None:
        """Lanes that come up from now on load this too; those that are up hear of it by `load`."""
        self.held[message.key] = message

    def drop(self, key: str) -> None:
        """Have every lane forget the model; nothing of it runs or waits."""
        with self._answers:
            message = self.held.pop(key, None)
            self._waiting.pop(key, None)
            lanes = tuple(self._lanes_up)
        for lane_id in lanes:
            self._pool.send(lane_id, UnloadModel(key))
        if message is not None:
            self.close_files_of(message.spec)

    def own_files(self, spec: ModelSpec) -> ModelSpec:
        """Copy what the version is served from; the spec that names the copies.

        They are kept until what reads them is dropped.
        """
        own = SealedCopies(spec)
        self._own_files[own.spec.copied_weights] = own
        return own.spec

    def close_files_of(self, spec: ModelSpec) -> None:
        """Let go of its copies, unless lanes hold or will be told to load what reads them."""
        with self._answers:
            used = any(one.spec.copied_weights == spec.copied_weights for one in self.held.values())
        if not used and (own := self._own_files.pop(spec.copied_weights, None)) is not None:
            own.close()

    def close(self) -> None:
        """Let go of all files; for when no lane runs any more."""
        while self._own_files:
            self._own_files.popitem()[1].close()

    def up(self, lane_id: LaneId) -> bool:
        """A lane's process started; send it all models. True when it needs none."""
        with self._answers:
            self._lanes_up.add(lane_id)
            wanted = tuple(self.held.values())
            for message in wanted:
                self._waiting.setdefault(message.key, set()).add(lane_id)
        for message in wanted:
            self._pool.send(lane_id, message)
        return not wanted

    def answered(self, lane_id: LaneId, key: str, failure: str = "") -> bool:
        """A lane loaded a model, or says why not. True when it waits for nothing more."""
        with self._answers:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(lane_id)
            if failure:
                self._failures[key] = failure
            self._answers.notify_all()
            return not any(lane_id in lanes for lanes in self._waiting.values())

    def lost(self, lane_id: LaneId) -> None:
        """A lane's process ended; it answers nothing more."""
        with self._answers:
            self._lanes_up.discard(lane_id)
            for waiting in self._waiting.values():
                waiting.discard(lane_id)
            self._answers.notify_all()

    def interrupt(self) -> None:
        """Have whoever waits for lanes to load a model look at whether the pool is interrupted."""
        with self._answers:
            self._answers.notify_all()

    def load(self, message: LoadModel) -> None:
        """Load on every lane that is up; the others get it when they come up."""
        with self._answers:
            lanes = self._lanes_up.copy()
            self._failures.pop(message.key, None)
            self._waiting.setdefault(message.key, set()).update(lanes)
        for lane_id in lanes:
            self._pool.send(lane_id, message)
        with self._answers:
            done = self._answers.wait_for(
                lambda: (
                    not self._waiting[message.key]
                    or message.key in self._failures
                    or self._pool.calibrators.interrupted
                ),
                self._start_timeout_s,
            )
            failure = self._failures.pop(message.key, "")
            if self._waiting[message.key] and self._pool.calibrators.interrupted:
                failure = failure or "the server stops"
        if failure:
            prefix = f"model {message.spec.key}: "
            raise ModelError(f"{prefix}does not load: {failure.removeprefix(prefix)}")
        if not done:
            raise NotReady(
                f"model {message.spec.key} did not load within server.start_timeout_s = "
                f"{self._start_timeout_s:g} seconds"
            )
