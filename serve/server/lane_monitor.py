"""State of the lanes: what each runs, and its messages as events of the scheduler."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from serve.core.events import (
    Event,
    LaneLost,
    LaneMeasured,
    LaneReady,
    LaneRemoved,
    LaneReplaced,
    RunTakesLess,
    TaskFailed,
    TaskFinished,
    TaskOverran,
)
from serve.core.types import Bytes, FailReason, LaneId, RecycleReason, TaskId
from serve.ipc.messages import (
    HotSetHeld,
    LaneHolds,
    MemoryTaken,
    ModelFailed,
    ModelLoaded,
    SettingsRestored,
    TableMapped,
    TakesLess,
    TaskDone,
    TaskError,
)
from serve.server.catalogue import ModelCatalogue
from serve.server.lane_run import LaneRun
from serve.server.lanes.lane_models import LaneModels
from serve.server.lanes.listener import LaneDown, LaneGone, LaneUp, SuccessorReady
from serve.server.lanes.pool import LanePool
from serve.server.ticket import RequestTicket

_log = logging.getLogger(__name__)

#: Gives the scheduler an event; under the lock.
CarryOut = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class LaneCallbacks:
    """Receivers of messages of lanes that are not about runs; called without the lock."""

    #: Gets a lane's messages on the features of resident graphs.
    tables: Callable[[TableMapped | HotSetHeld], None] = lambda message: None
    #: Gets a lane that is up, at first or again.
    lane_up: Callable[[LaneId], None] = lambda lane_id: None
    #: Gets the bytes of its device that a lane holds beside what was planned.
    memory_taken: Callable[[LaneId, int], None] = lambda lane_id, unplanned_bytes: None


class LaneMonitor:
    """Knows which lanes are ready and what each runs, and makes events of their messages."""

    def __init__(
        self,
        pool: LanePool,
        catalogue: ModelCatalogue,
        models: LaneModels,
        lock: threading.Lock,
        callbacks: LaneCallbacks,
    ) -> None:
        self._pool = pool
        self._catalogue = catalogue
        self._models = models
        self._lock = lock
        self._callbacks = callbacks
        self._ready: set[LaneId] = set()
        self._ready_changed = threading.Condition(lock)
        self._runs: dict[LaneId, LaneRun] = {}
        #: Lanes whose successors wait for the end of a run.
        self._replaceable: set[LaneId] = set()
        #: Model that each lane ran last, and memory that it held by its last word: for the log.
        self._last_model: dict[LaneId, str] = {}
        self._held_bytes: dict[LaneId, int] = {}
        #: Lanes restarted for what they held or had run, by reason.
        self.recycled: dict[RecycleReason, int] = dict.fromkeys(get_args(RecycleReason), 0)
        #: Runs and loads, by model, that changed settings which all models of a lane share.
        self.restored: Counter[str] = Counter()

    @property
    def ready_count(self) -> int:
        """Number of lanes that have all models and may be given tasks."""
        return len(self._ready)

    def running_ns(self, now_ns: int) -> dict[LaneId, int]:
        """Return for how long each lane has had its run; 0 for one without. Under the lock."""
        runs = self._runs
        return {
            lane: now_ns - runs[lane].launched_ns if lane in runs else 0
            for lane in self._pool.lane_ids
        }

    def wait_ready(self, timeout_s: float) -> int:
        """Wait until all lanes are ready or time runs out; return how many are."""
        with self._ready_changed:
            lanes = len(self._pool.lane_ids)
            self._ready_changed.wait_for(lambda: len(self._ready) == lanes, timeout_s)
            return len(self._ready)

    def launch(
        self,
        lane_id: LaneId,
        tickets: Sequence[RequestTicket],
        reserve_bytes: int,
        *,
        bounded: bool = False,
    ) -> None:
        """Have the lane run the staged requests within `reserve_bytes`. Under the lock.

        `bounded`: see ``LaunchTask``.
        """
        self._runs[lane_id] = run = LaneRun(tickets, lane_id)
        for ticket in tickets:
            ticket.run = run
        self._last_model[lane_id] = run.entry.spec.key
        self._pool.launch(lane_id, run.message(reserve_bytes, bounded=bounded))

    def remove(self, lane_id: LaneId) -> None:
        """End a lane that runs nothing for good. Under the lock."""
        self._ready.discard(lane_id)
        self._replaceable.discard(lane_id)
        self._last_model.pop(lane_id, None)
        self._held_bytes.pop(lane_id, None)
        self._pool.remove_lane(lane_id)
        self._models.lane_lost(lane_id)

    def recycle(self, lane_id: LaneId, reason: RecycleReason) -> None:
        """Restart an idle lane for what it holds or has run. Under the lock."""
        self.recycled[reason] += 1
        if reason == "requests":
            _log.info("lane %d is restarted: it has run device.max_lane_requests", lane_id)
        else:
            _log.warning(
                "lane %d is restarted: it holds %d MiB between runs (device.max_lane_memory); "
                "the last was of model %s",
                lane_id, self._held_bytes.get(lane_id, 0) >> 20, self._last_model.get(lane_id, "?"),
            )  # fmt: skip
        self._pool.recycle(lane_id)

    def quarantined(self, model: str, reason: str) -> None:
        """Log that the model of that key is not run for a while."""
        entry = self._catalogue.by_key(model)
        _log.error("model %s: %s", model if entry is None else entry.spec.key, reason)

    def hear(self, lane_id: LaneId, message: object, carry_out: CarryOut) -> None:
        """Handle a message of a lane. For the driver's thread, without the lock."""
        if self._pool.domain_of(lane_id) is None and not isinstance(message, LaneGone):
            return  # it is being removed, and was not as it said so
        match message:
            case TaskDone() | TaskError():
                with self._lock:
                    event = self._ended(lane_id, message)
                    if lane_id in self._replaceable and lane_id not in self._runs:
                        self._replace(lane_id, carry_out)
                    if event is not None:
                        carry_out(event)
            case SuccessorReady():
                with self._lock:
                    self._replaceable.add(lane_id)
                    if lane_id not in self._runs:
                        self._replace(lane_id, carry_out)
            case ModelLoaded(key):
                if self._models.answered(lane_id, key):
                    self._set_ready(lane_id, carry_out)
            case ModelFailed(key, reason):
                _log.error("lane %d: %s: %s", lane_id, key, reason)
                if self._models.answered(lane_id, key, reason):
                    self._set_ready(lane_id, carry_out)
            case LaneHolds(held_bytes):
                with self._lock:
                    self._held_bytes[lane_id] = held_bytes
                    carry_out(LaneMeasured(lane_id, Bytes(held_bytes)))
            case SettingsRestored(key, changed):
                with self._lock:
                    self._restored(key, changed)
            case TableMapped() | HotSetHeld():
                self._callbacks.tables(message)
            case TakesLess(task_id, memory_bytes):
                with self._lock:
                    run = self._runs.get(lane_id)
                    if run is None or run.task_id != task_id:
                        self._pool.kill(lane_id, f"told of task {task_id}, which it does not run")
                    else:
                        carry_out(RunTakesLess(TaskId(task_id), lane_id, Bytes(memory_bytes)))
            case MemoryTaken(unplanned_bytes):
                self._callbacks.memory_taken(lane_id, unplanned_bytes)
            case LaneUp():
                if self._models.lane_up(lane_id):
                    self._set_ready(lane_id, carry_out)
                self._callbacks.lane_up(lane_id)
            case LaneDown(lane_ids=lane_ids):
                self._lost(lane_ids, carry_out)
            case LaneGone():
                with self._lock:
                    carry_out(LaneRemoved(lane_id))

    def _ended(self, lane_id: LaneId, end: TaskDone | TaskError) -> Event | None:
        """Return how a run ended; None for a lane that reports what cannot be, which is killed."""
        run = self._runs.get(lane_id)
        complaint = "ended a run when it had none" if run is None else run.complaint(end)
        if complaint or run is None:
            self._pool.kill(lane_id, complaint)
            return None
        del self._runs[lane_id]
        self._pool.ended(lane_id)
        task_id = TaskId(end.task_id)
        if isinstance(end, TaskDone):
            return TaskFinished(task_id, lane_id, run.ended(end))
        if end.reason == FailReason.OUT_OF_MEMORY.value:
            return TaskOverran(task_id, lane_id, end.message)
        return TaskFailed(task_id, lane_id, FailReason(end.reason), end.message)

    def _replace(self, lane_id: LaneId, carry_out: CarryOut) -> None:
        """Put the successor of an idle lane in its place."""
        self._replaceable.discard(lane_id)
        successors, keys = self._pool.successors, None
        if successors is not None and lane_id in self._ready:
            keys = successors.take_over(lane_id)
        if keys is not None:
            self._held_bytes.pop(lane_id, None)
            carry_out(LaneReplaced(lane_id))
        self._models.taken_over(lane_id, keys)

    def _restored(self, key: str, changed: str) -> None:
        """Count a change of shared settings; logged at the first of each model."""
        if not (spec := self._models.spec_of(key)):
            return
        self.restored[spec.name] += 1
        if self.restored[spec.name] == 1:
            _log.warning(
                "model %s changed settings that all models share; the lane has restored them: %s",
                spec.key, changed,
            )  # fmt: skip

    def _set_ready(self, lane_id: LaneId, carry_out: CarryOut) -> None:
        with self._ready_changed:
            if lane_id not in self._ready:
                self._ready.add(lane_id)
                carry_out(LaneReady(lane_id))
                self._ready_changed.notify_all()

    def _lost(self, lane_ids: Sequence[LaneId], carry_out: CarryOut) -> None:
        """A process ended, and with it all its lanes."""
        for lane_id in lane_ids:
            self._models.lane_lost(lane_id)
        with self._lock:
            self._replaceable.difference_update(lane_ids)
            lost = [lane_id for lane_id in lane_ids if lane_id in self._ready]
            self._ready.difference_update(lost)
            for lane_id in lost:
                self._runs.pop(lane_id, None)
            if lost:
                carry_out(LaneLost(lost[0], tuple(lost[1:])))
