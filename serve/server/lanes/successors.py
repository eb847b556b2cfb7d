"""Successors of lanes: processes that load models beside the lanes in service, then replace them.

So a lane that serves never runs what a model does while it is imported, which may take long, hang
or end the process. A successor takes its lane's place between two runs.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

from serve.core.types import LaneId
from serve.errors import ModelError, NotReady
from serve.ipc.messages import LoadModel, ModelFailed, ModelLoaded
from serve.ipc.setup import LaneSetup
from serve.ipc.shared_pool import SharedPool
from serve.server import clock
from serve.server.lanes.calibrators import Calibrator, Calibrators
from serve.server.lanes.lane_handle import LaneHandle
from serve.server.lanes.listener import LaneListener
from serve.server.lanes.restarts import Started
from serve.server.load_turns import LoadCancellation


class Successors:
    """The successors of a pool's lanes, of which each has a process of its own."""

    def __init__(
        self,
        lanes: Mapping[LaneId, LaneHandle],
        listener: LaneListener,
        helpers: Calibrators,
        shared: SharedPool,
        setup: Callable[[LaneHandle, int], LaneSetup],
    ) -> None:
        """`setup` returns the setup of a lane's process that has the words of a number."""
        self._lanes = lanes
        self._listener = listener
        self._helpers = helpers
        self._shared = shared
        self._setup = setup
        self._lock = threading.Lock()
        #: Successors with the keys of the models that they hold.
        self._offered: dict[LaneId, tuple[Started, frozenset[str]]] = {}

    def load(
        self,
        lane_ids: Collection[LaneId],
        messages: Sequence[LoadModel],
        timeout_s: float,
        cancellation: LoadCancellation,
    ) -> None:
        """Start a successor of each lane that holds the models, and offer them to the listener.

        All are offered or none. Blocks. Raises ModelError when the last of the models does not
        load, NotReady when a process dies, takes longer or cannot be started, and RequestCancelled.
        """
        wanted = messages[-1]
        ends_ns = clock.now_ns() + int(timeout_s * 1e9)
        try:
            with ExitStack() as stack:
                started: dict[LaneId, Calibrator] = {}
                for lane_id in lane_ids:
                    lane = self._lanes[lane_id]
                    setup = self._setup(lane, self._words(lane))
                    helper = stack.enter_context(self._helpers.start(setup, self._shared.fd))
                    stack.enter_context(cancellation.calling(helper.kill))
                    for message in messages:
                        helper.send(message)
                    started[lane_id] = helper
                for helper in started.values():
                    _await_loaded(helper, messages, ends_ns)
                cancellation.check()
                keys = frozenset(message.key for message in messages)
                for lane_id, helper in started.items():
                    with self._lock:
                        self._offered[lane_id] = helper.hand_over(), keys
                    self._listener.successor_is_ready(lane_id)
        except NotReady as error:
            cancellation.check()
            raise NotReady(f"model {wanted.spec.key}: {error}") from error
        except (OSError, EOFError) as error:
            raise NotReady(f"model {wanted.spec.key}: no process to load it: {error}") from error

    def take_over(self, lane_id: LaneId) -> frozenset[str] | None:
        """Put the lane's successor in its place; the polling thread, for an idle lane.

        Returns the keys of the models that it holds. Returns None when there is no successor, or
        the lane's process has ended or is about to: then it is restarted anyway.
        """
        lane = self._lanes[lane_id]
        process = lane.process
        if process.child is None or process.gone_at_ns is not None:
            self.withdraw([lane_id])
            return None
        with self._lock:
            offer = self._offered.pop(lane_id, None)
        if offer is None:
            return None
        started, keys = offer
        words = self._words(lane)
        self._listener.restarts.dismiss(process, self._listener.detach(process))
        lane.words = words
        # It may name a task that the lane's process before the last one ran.
        self._shared.write_stop(words, 0)
        lane.told_to_stop = False
        self._listener.attach(process, *started)
        lane.up = True  # as `load` has heard
        return keys

    def withdraw(self, lane_ids: Collection[LaneId]) -> None:
        """End the lanes' successors that have not taken over. Any thread; never waits."""
        for lane_id in lane_ids:
            with self._lock:
                offer = self._offered.pop(lane_id, None)
            if offer is not None:
                child, channels = offer[0]
                for channel in channels:
                    channel.close()
                self._listener.restarts.dismiss(self._lanes[lane_id].process, child)

    def close(self) -> None:
        """End all successors that have not taken over."""
        self.withdraw(tuple(self._lanes))

    def _words(self, lane: LaneHandle) -> int:
        """Return the number of the words that the lane's process does not use."""
        return lane.words + 1 if lane.words % 2 else lane.words - 1


def _await_loaded(helper: Calibrator, messages: Sequence[LoadModel], ends_ns: int) -> None:
    """Wait until the process has answered for all models; raises as `Successors.load`."""
    left = {message.key for message in messages}
    wanted = messages[-1]
    while left:
        said = helper.receive(max(0.001, (ends_ns - clock.now_ns()) / 1e9))
        if isinstance(said, ModelFailed) and said.key == wanted.key:
            prefix = f"model {wanted.spec.key}: "
            raise ModelError(f"{prefix}does not load: {said.message.removeprefix(prefix)}")
        if isinstance(said, ModelLoaded | ModelFailed):
            left.discard(said.key)
