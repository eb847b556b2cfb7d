"""The models on the lanes, and the files they are loaded from."""

import logging
import threading

from serve.core.types import LaneId
from serve.errors import ModelError, NotReady
from serve.ipc.messages import LoadModel, UnloadModel
from serve.models.repository import ModelSpec
from serve.models.sealed_copies import SealedCopies
from serve.server.lanes.pool import LanePool
from serve.server.load_turns import LoadCancellation

_log = logging.getLogger(__name__)


class LaneModels:
    """The models on all lanes of a server. Any thread."""

    def __init__(self, pool: LanePool, start_timeout_s: float) -> None:
        """Hold no model yet; `start_timeout_s` limits the loading of one model on all lanes."""
        self._pool = pool
        self._start_timeout_s = start_timeout_s
        self._answers = threading.Condition()
        #: Lanes that have not yet answered a ``LoadModel``, by its key.
        self._waiting: dict[str, set[LaneId]] = {}
        #: Failures that lanes reported, by key.
        self._failures: dict[str, str] = {}
        #: Lanes whose process is up.
        self._lanes_up: set[LaneId] = set()
        #: Every model that lanes hold or are to hold, by key.
        self._held: dict[str, LoadModel] = {}
        #: Files that models are loaded from, by the path of the weights.
        self._copies: dict[str, SealedCopies] = {}

    @property
    def weights_bytes(self) -> int:
        """Weights and code of all models that lanes hold; lanes share the pages."""
        held = tuple(self._held.values())
        # Two executors of a model share its weights.
        weights = {message.content: message.spec.weights_bytes for message in held}
        return sum(weights.values()) + sum(message.package_bytes for message in held)

    def add(self, message: LoadModel) -> None:
        """Have lanes that come up from now on load the model; see `load` for those that are up."""
        self._held[message.key] = message

    def drop(self, key: str) -> None:
        """Unload the model from every lane, once none of its requests is left."""
        with self._answers:
            message = self._held.pop(key, None)
            self._waiting.pop(key, None)
            lanes = tuple(self._lanes_up)
        for lane_id in lanes:
            self._pool.send(lane_id, UnloadModel(key))
        if message is not None:
            self.close_files_of(message.spec)

    def copy_files(self, spec: ModelSpec) -> ModelSpec:
        """Copy the files that the version is served from; return the spec with their paths.

        The copies are kept until the models that read them are dropped, see `close_files_of`.
        Raises as ``SealedCopies``.
        """
        copies = SealedCopies(spec)
        self._copies[copies.spec.copied_weights] = copies
        if names := copies.spec.nonfinite_weights:
            _log.warning("model %s: weights hold NaN or infinity: %s", spec.key, ", ".join(names))
        return copies.spec

    def close_files_of(self, spec: ModelSpec) -> None:
        """Close the copies of the version unless a model on the lanes reads them."""
        with self._answers:
            read = [message.spec.copied_weights for message in self._held.values()]
        if spec.copied_weights in read:
            return
        if (copies := self._copies.pop(spec.copied_weights, None)) is not None:
            copies.close()

    def close(self) -> None:
        """Close all copies, once no lane runs any more."""
        while self._copies:
            self._copies.popitem()[1].close()

    def lane_up(self, lane_id: LaneId) -> bool:
        """Send all models to a lane whose process started; return True when there are none."""
        with self._answers:
            self._lanes_up.add(lane_id)
            wanted = tuple(self._held.values())
            for message in wanted:
                self._waiting.setdefault(message.key, set()).add(lane_id)
        for message in wanted:
            self._pool.send(lane_id, message)
        return not wanted

    def answered(self, lane_id: LaneId, key: str, failure: str = "") -> bool:
        """Note a lane's answer to a load; return True when the lane has answered for all models."""
        with self._answers:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(lane_id)
            if failure:
                self._failures[key] = failure
            self._answers.notify_all()
            return not any(lane_id in lanes for lanes in self._waiting.values())

    def lane_lost(self, lane_id: LaneId) -> None:
        """Expect no more answers of a lane whose process ended."""
        with self._answers:
            self._lanes_up.discard(lane_id)
            for waiting in self._waiting.values():
                waiting.discard(lane_id)
            self._answers.notify_all()

    def interrupt(self) -> None:
        """Wake the threads that wait in `load`, so that they see that they are to end."""
        with self._answers:
            self._answers.notify_all()

    def load(self, message: LoadModel, cancellation: LoadCancellation) -> None:
        """Load the model on every lane that is up, and wait; others load it when they come up.

        Raises ModelError when a lane reports a failure or the server stops, NotReady after the time
        limit, and RequestCancelled.
        """
        with self._answers:
            lanes = self._lanes_up.copy()
            self._failures.pop(message.key, None)
            self._waiting.setdefault(message.key, set()).update(lanes)
        for lane_id in lanes:
            self._pool.send(lane_id, message)
        with cancellation.calling(self.interrupt), self._answers:
            done = self._answers.wait_for(
                lambda: (
                    not self._waiting[message.key]
                    or message.key in self._failures
                    or self._pool.calibrators.interrupted
                    or cancellation.cancelled
                ),
                self._start_timeout_s,
            )
            failure = self._failures.pop(message.key, "")
            if self._waiting[message.key] and self._pool.calibrators.interrupted:
                failure = failure or "the server stops"
        cancellation.check()
        if failure:
            prefix = f"model {message.spec.key}: "
            raise ModelError(f"{prefix}does not load: {failure.removeprefix(prefix)}")
        if not done:
            raise NotReady(
                f"model {message.spec.key} did not load within server.start_timeout_s = "
                f"{self._start_timeout_s:g} seconds"
            )
