"""The models on the lanes, and the files they are loaded from."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Set

from serve.core.types import LaneId
from serve.errors import ModelError, NotReady
from serve.ipc.messages import LoadModel, UnloadModel
from serve.models.repository import ModelSpec
from serve.models.sealed_copies import SealedCopies
from serve.server import clock
from serve.server.lanes.load_watch import LoadWatch
from serve.server.lanes.pool import LanePool
from serve.server.lanes.successors import Successors
from serve.server.load_turns import LoadCancellation

_log = logging.getLogger(__name__)


class LaneModels:
    """The models on all lanes of a server. Any thread."""

    def __init__(self, pool: LanePool, start_timeout_s: float) -> None:
        """Hold no model yet; `start_timeout_s` limits the loading of one model on all lanes."""
        self._pool, self._start_timeout_s = pool, start_timeout_s
        self.watch = LoadWatch(lambda lane_id, why: pool.kill(lane_id, why), start_timeout_s)
        self._answers = threading.Condition()
        #: Lanes that have not yet answered a ``LoadModel``, by its key.
        self._waiting: dict[str, set[LaneId]] = {}
        #: Failures that lanes reported, by key.
        self._failures: dict[str, str] = {}
        #: Lanes whose process is up.
        self._lanes_up: set[LaneId] = set()
        #: Every model that lanes hold or are to hold, by key.
        self._held: dict[str, LoadModel] = {}
        #: Those of them that are loaded for good.
        self._loaded: set[str] = set()
        #: Models that each lane's process has answered for.
        self._known: dict[LaneId, set[str]] = {}
        #: True once lanes serve requests: from then on successors of theirs load models.
        self.in_service = False
        #: Lanes whose successors are loaded and have not taken over; and whether any are loading.
        self._changing: set[LaneId] = set()
        self._replacing = False
        #: Files that models are loaded from, by the path of the weights.
        self._copies: dict[str, SealedCopies] = {}
        #: Number of processes that may still read them though their model is dropped.
        self._readers: Counter[str] = Counter()
        #: Models that were dropped before a lane had answered for them, by lane and key.
        self._dropped: dict[tuple[LaneId, str], list[ModelSpec]] = {}

    @property
    def _successors(self) -> Successors | None:
        """What replaces lanes for a load; None while, or where, lanes load models themselves."""
        return self._pool.successors if self.in_service else None

    @property
    def weights_bytes(self) -> int:
        """Weights and code of all models that lanes hold; lanes share the pages."""
        held = tuple(self._held.values())
        # Two executors of a model share its weights.
        weights = {message.content: message.spec.weights_bytes for message in held}
        return sum(weights.values()) + sum(message.package_bytes for message in held)

    def spec_of(self, key: str) -> ModelSpec | None:
        """Return the spec of a model that lanes hold or are to hold; None for another."""
        message = self._held.get(key)
        return None if message is None else message.spec

    def add(self, message: LoadModel) -> None:
        """Have lanes that come up from now on load the model; see `load` for those that are up."""
        self._held[message.key] = message

    def wait_lanes(self, spec: ModelSpec, cancellation: LoadCancellation) -> None:
        """Wait until a lane of the model's trust domain is up; raises as `load`."""
        ends_ns = clock.now_ns() + int(self._start_timeout_s * 1e9)
        lanes = self._pool.lanes_of(spec.domain)
        self._wait(lambda: not self._lanes_up.isdisjoint(lanes), spec, cancellation, ends_ns)

    def drop(self, key: str) -> None:
        """Unload the model from every lane, once none of its requests is left."""
        with self._answers:
            message, waiting = self._held.pop(key, None), self._waiting.pop(key, set())
            if message is not None:
                for lane_id in waiting:
                    self._dropped.setdefault((lane_id, key), []).append(message.spec)
                    self._readers[message.spec.copied_weights] += 1
            self._loaded.discard(key)
            for known in self._known.values():
                known.discard(key)
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
        """Close the copies of the version unless a model on the lanes reads them.

        Their descriptors may be other files afterwards, so no lane may still have to open them.
        """
        with self._answers:
            read = [message.spec.copied_weights for message in self._held.values()]
            if spec.copied_weights in read or self._readers[spec.copied_weights] > 0:
                return
        if (copies := self._copies.pop(spec.copied_weights, None)) is not None:
            copies.close()

    def _end_reading(self, specs: Iterable[ModelSpec]) -> None:
        """Take note that a process has read the copies, and close those that nobody needs."""
        specs = tuple(specs)
        with self._answers:
            self._readers.subtract(spec.copied_weights for spec in specs)
        for spec in specs:
            self.close_files_of(spec)

    def _forget_dropped(self, lane_id: LaneId) -> None:
        """Expect no answers for dropped models of a lane whose process is gone. Under the lock."""
        for lane_and_key in [one for one in self._dropped if one[0] == lane_id]:
            self._end_reading(self._dropped.pop(lane_and_key))

    def close(self) -> None:
        """Close all copies, once no lane runs any more."""
        while self._copies:
            self._copies.popitem()[1].close()

    def lane_up(self, lane_id: LaneId) -> bool:
        """Send all models to a lane whose process started; return True when there are none."""
        with self._answers:
            self._lanes_up.add(lane_id)
            self._answers.notify_all()
            self._known[lane_id] = set()
            wanted = tuple(
                message
                for key, message in tuple(self._held.items())
                if (key in self._loaded or self._successors is None)
                and _is_for(self._pool, lane_id, message)
            )
            for message in wanted:
                self._waiting.setdefault(message.key, set()).add(lane_id)
        for message in wanted:
            self._pool.send(lane_id, message)
        return self.watch.heard(lane_id, not wanted, begins=True)

    def answered(self, lane_id: LaneId, key: str, failure: str = "") -> bool:
        """Note a lane's answer to a load; return True when the lane has answered for all models."""
        with self._answers:
            dropped = self._dropped.get((lane_id, key), [])
            if dropped:  # before the same model was to be loaded again
                self._end_reading((dropped.pop(0),))
            else:
                self._waiting.get(key, set()).discard(lane_id)
                self._known.setdefault(lane_id, set()).add(key)
                if failure:
                    self._failures[key] = failure
            self._answers.notify_all()
            has_all = not any(lane_id in lanes for lanes in self._waiting.values())
        return self.watch.heard(lane_id, has_all)

    def lane_lost(self, lane_id: LaneId) -> None:
        """Expect no more answers of a lane whose process ended."""
        with self._answers:
            self._lanes_up.discard(lane_id)
            self.watch.heard(lane_id, has_all=True)
            self._known.pop(lane_id, None)
            self._changing.discard(lane_id)
            for waiting in self._waiting.values():
                waiting.discard(lane_id)
            self._forget_dropped(lane_id)
            self._answers.notify_all()

    def interrupt(self) -> None:
        """Wake the threads that wait in `load`, so that they see that they are to end."""
        with self._answers:
            self._answers.notify_all()

    def taken_over(self, lane_id: LaneId, keys: Set[str] | None) -> None:
        """Note that a successor that holds `keys` has replaced the lane; None: it never will."""
        with self._answers:
            self._changing.discard(lane_id)
            if keys is not None:
                self._known[lane_id] = set(keys)
                self._forget_dropped(lane_id)
            gone = set() if keys is None else keys - self._held.keys()
            self._answers.notify_all()
        for key in gone:
            self._pool.send(lane_id, UnloadModel(key))

    def load(self, message: LoadModel, cancellation: LoadCancellation) -> None:
        """Load the model on every lane that is up, and wait; others load it when they come up.

        Lanes that serve are replaced by successors that hold it, each between two runs. Raises
        ModelError when a lane reports a failure or the server stops, NotReady after the time
        limit, and RequestCancelled.
        """
        ends_ns = clock.now_ns() + int(self._start_timeout_s * 1e9)
        if (successors := self._successors) is None:
            self._load_in_place(message, cancellation, ends_ns)
        else:
            self._load_beside(message, successors, cancellation, ends_ns)

    def _load_in_place(
        self, message: LoadModel, cancellation: LoadCancellation, ends_ns: int
    ) -> None:
        """Have every lane that is up load the model itself."""
        key = message.key
        with self._answers:
            lanes = {lane_id for lane_id in self._lanes_up if _is_for(self._pool, lane_id, message)}
            self._failures.pop(key, None)
            self._waiting.setdefault(key, set()).update(lanes)
        for lane_id in lanes:
            self._pool.send(lane_id, message)

        def answered() -> bool:
            return not self._waiting[key] or key in self._failures

        try:
            self._wait(answered, message.spec, cancellation, ends_ns)
        finally:
            with self._answers:
                failure = self._failures.pop(key, "")
        if failure:
            prefix = f"model {message.spec.key}: "
            raise ModelError(f"{prefix}does not load: {failure.removeprefix(prefix)}")
        with self._answers:
            self._loaded.add(key)

    def _load_beside(
        self,
        message: LoadModel,
        successors: Successors,
        cancellation: LoadCancellation,
        ends_ns: int,
    ) -> None:
        """Replace every lane that is up by a successor that has the model loaded."""

        def my_turn() -> bool:
            # Two at once would each undo what the other did.
            before, self._replacing = self._replacing, True
            return not before

        self._wait(my_turn, message.spec, cancellation, ends_ns)
        try:
            while lanes := self._lanes_without(message, cancellation, ends_ns):
                with self._answers:
                    models = [self._held[key] for key in self._held.keys() & self._loaded]
                    models = [one for one in models if one.spec.domain == message.spec.domain]
                    self._readers.update(one.spec.copied_weights for one in models)
                    self._changing = set(lanes)
                left_s = (ends_ns - clock.now_ns()) / 1e9
                try:
                    successors.load(lanes, (*models, message), left_s, cancellation)
                    self._wait(lambda: not self._changing, message.spec, cancellation, ends_ns)
                finally:
                    successors.withdraw(lanes)
                    self._end_reading(one.spec for one in models)
        finally:
            with self._answers:
                self._replacing, self._changing = False, set()
                self._answers.notify_all()

    def _lanes_without(
        self, message: LoadModel, cancellation: LoadCancellation, ends_ns: int
    ) -> tuple[LaneId, ...]:
        """Return the lanes that are up and lack the model, once none of them loads others.

        With none, lanes that come up from now on load it.
        """
        found: set[LaneId] = set()

        def settled() -> bool:
            found.clear()
            found.update(
                lane_id
                for lane_id in self._lanes_up
                if _is_for(self._pool, lane_id, message) and message.key not in self._known[lane_id]
            )
            if not found:
                self._loaded.add(message.key)
            return all(found.isdisjoint(lanes) for lanes in self._waiting.values())

        self._wait(settled, message.spec, cancellation, ends_ns)
        return tuple(sorted(found))

    def _wait(
        self,
        happened: Callable[[], bool],
        spec: ModelSpec,
        cancellation: LoadCancellation,
        ends_ns: int,
    ) -> None:
        """Wait until `happened`, which is called under the lock, returns True; raises as `load`."""
        done = False

        def over() -> bool:
            nonlocal done
            done = happened()
            return done or self._pool.calibrators.interrupted or cancellation.cancelled

        with cancellation.calling(self.interrupt), self._answers:
            self._answers.wait_for(over, max(0.0, (ends_ns - clock.now_ns()) / 1e9))
        cancellation.check()
        if done:
            return
        if self._pool.calibrators.interrupted:
            raise ModelError(f"model {spec.key}: does not load: the server stops")
        raise _too_late(spec, self._start_timeout_s)


def _is_for(pool: LanePool, lane_id: LaneId, message: LoadModel) -> bool:
    """Return True when the lane runs the models of that trust domain."""
    return pool.domain_of(lane_id) == message.spec.domain


def _too_late(spec: ModelSpec, limit_s: float) -> NotReady:
    return NotReady(
        f"model {spec.key} did not load within server.start_timeout_s = {limit_s:g} seconds"
    )
