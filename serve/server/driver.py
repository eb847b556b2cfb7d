"""The live driver of the scheduler: one lock, one thread, and every handler thread lends a hand.

Whoever has an event (the thread a request came in on; the driver's own thread, which listens to the
lanes and keeps the timers) takes the lock, asks the scheduler what to do and does it. The work
under the lock is a few microseconds of dictionary work, a packet to a lane, or a word to a waiting
thread; nothing there blocks. See ``serve.core.scheduler`` for the decisions and
``docs/architecture.md`` for a request's way through all this.
"""

import itertools
import logging
import os
import threading
import uuid
from collections.abc import Callable
from typing import NoReturn

from serve.core.commands import (
    AnswerTask,
    Command,
    KillLane,
    LaunchTask,
    LookAtLane,
    PrepareTask,
    QuarantineModel,
    RecycleLane,
    ReleaseTask,
    ResumeTask,
    StopTask,
    SuspendTask,
)
from serve.core.events import (
    Event,
    LaneLost,
    LaneMeasured,
    LaneReady,
    LaneSeen,
    ModelUnloaded,
    SlowdownChanged,
    TaskArrived,
    TaskCancelled,
    TaskFailed,
    TaskFinished,
    TaskOverran,
    Tick,
)
from serve.core.fleet.fleet import make_scheduler
from serve.core.params import SchedulerParams
from serve.core.types import (
    Bytes,
    Completed,
    FailReason,
    LaneId,
    Nanos,
    Outcome,
    QoS,
    Sized,
    Task,
    TaskId,
)
from serve.errors import InvalidInput
from serve.ipc.messages import (
    HotSetHeld,
    LaneHolds,
    MemoryTaken,
    ModelFailed,
    ModelLoaded,
    TableMapped,
    TaskDone,
    TaskError,
)
from serve.ipc.shared_pool import SharedPool
from serve.obs.journal import JournalWriter
from serve.obs.record import RequestRecord
from serve.server import clock
from serve.server.api import InferCall
from serve.server.catalogue import ModelEntry, Registry
from serve.server.lanes.pool import LaneDown, LanePool, LaneUp
from serve.server.launch import Launch, Lesson
from serve.server.learning.alone import IDLE_NS
from serve.server.learning.beside import is_news
from serve.server.node_requests import NodeRequest
from serve.server.report_rows import Scheduling
from serve.server.staging import Layout, Prepared, count_loops, stage
from serve.server.ticket import RequestTicket

_log = logging.getLogger(__name__)

#: Runs that ended are learned from so many at a time, as long as nobody asks for more: one lesson
#: by itself finds all it needs out of the caches.
_LESSONS = 8
#: Of the process, when the driver's thread is lost.
EXIT_BUG = 70
_TO_LANES = (LaunchTask, SuspendTask, ResumeTask, StopTask)


class Driver:
    """Takes accepted requests through the scheduler and over the lanes to their answers."""

    def __init__(
        self,
        params: SchedulerParams,
        pool: LanePool,
        shared: SharedPool,
        registry: Registry,
        *,
        lock: threading.Lock,
        sink: Callable[[RequestRecord], None],
        scheduling: Scheduling,
        check_finite: bool,
        journal: JournalWriter | None = None,
        of_tables: Callable[[TableMapped | HotSetHeld], None] = lambda said: None,
        lane_came_back: Callable[[LaneId], None] = lambda lane_id: None,
        memory_taken: Callable[[LaneId, int], None] = lambda lane_id, unplanned_bytes: None,
    ) -> None:
        """`lock` is held for every step; the registry guards its entries with it as well.

        `sink` gets the record of every request answered once the server serves, `of_tables` what
        lanes say of resident graphs' features; `lane_came_back` is told of one started again,
        `memory_taken` what a lane says is held of its device beside what was planned.
        """
        self.shared = shared
        self.scheduling = scheduling
        self.check_finite = check_finite
        self.scheduler = make_scheduler(params if journal is None else journal.begin(params))
        #: Requests are the clients', not the server's own: their records are kept.
        self.serving = False
        #: What became of the server's own request that was answered last.
        self.own_record: RequestRecord | None = None
        self.boot_id = uuid.uuid4().hex[:8]
        self._pool = pool
        self._registry = registry
        self._lock = lock
        self._sink = sink
        self._journal = journal
        self._of_tables, self._lane_came_back = of_tables, lane_came_back
        self._memory_taken = memory_taken
        self._tickets: dict[TaskId, RequestTicket] = {}
        self._task_ids = itertools.count(1)
        #: When the driver's thread looks at the clock at the latest; None: when something happens.
        self._armed_ns: int | None = None
        #: Of runs that ended.
        self._lessons: list[Lesson] = []
        #: By number of co-runners, as the scheduler knows it.
        self._slowdown = params.device.slowdown
        self._lanes_ready: set[LaneId] = set()
        self._lanes_changed = threading.Condition(lock)
        #: What each lane runs.
        self._on_lane: dict[LaneId, Launch] = {}
        #: What each lane ran last, and what it said last of the memory it holds: for the log.
        self._last_model: dict[LaneId, str] = {}
        self._held_bytes: dict[LaneId, int] = {}
        #: Lanes started anew since they held too much.
        self.recycled = 0
        self._newest: RequestTicket | None = None
        self._idle_since_ns = 0
        #: What came of commands at once, to be told when all of them are done.
        self._next: list[Event] = []
        self._drained = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._listen, name="driver", daemon=True)

    # --- life ---------------------------------------------------------------------------

    def start(self, timeout_s: float) -> int:
        """Start to listen to the lanes, wait until all are up or time ran out; how many are."""
        self._thread.start()
        with self._lanes_changed:
            lanes = len(self._pool.lane_ids)
            self._lanes_changed.wait_for(lambda: len(self._lanes_ready) == lanes, timeout_s)
            return len(self._lanes_ready)

    def stop(self) -> None:
        """Cancel what is not answered and stop listening."""
        self.serving = False
        for ticket in self.tickets():
            ticket.cancel()
        self._stopping = True
        if self._thread.is_alive():
            self._pool.wake()
            self._thread.join()

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until everything accepted is answered; False when time ran out."""
        return self._drained.wait(timeout_s)

    @property
    def lanes_up(self) -> int:
        """Lanes that have all models and may be given tasks."""
        return len(self._lanes_ready)

    @property
    def lanes_able(self) -> int:
        """Those that no run holds which takes far longer than expected."""
        return len(self._lanes_ready) - self.scheduler.overdue_count

    @property
    def alive(self) -> bool:
        """False when the listening thread has died."""
        return not self._thread.ident or self._thread.is_alive()

    def tickets(self) -> tuple[RequestTicket, ...]:
        """Accepted and not yet released."""
        return tuple(self._tickets.values())

    # --- requests -----------------------------------------------------------------------

    def prepare_early(self, call: InferCall, entry: ModelEntry, layout: Layout) -> Prepared | None:
        """Stage a request that the scheduler would have prepared at once, before it hears of it.

        Then it arrives prepared, which is one step of the scheduler and not two. None: the
        scheduler is to say when, and it cannot be staged now, if that is why, is told then. Whoever
        does not `accept` it then frees its block. Any thread.
        """
        # NOTE: without the lock, as nothing goes wrong when it is otherwise by now.
        if not self.scheduler.prepares_at_once:
            return None
        started_ns = clock.now_ns()
        block = self.shared.allocate(layout.size_bytes)
        if block is None:
            return None
        try:
            staged = stage(call, layout, self.shared, block, check_finite=self.check_finite)
        except InvalidInput:
            self.shared.free(block)
            return None
        except BaseException:
            self.shared.free(block)
            raise
        loops = count_loops(staged, self.shared) if entry.estimator.counts_loops else None
        return Prepared(staged, loops, started_ns)

    def accept(
        self,
        call: InferCall,
        entry: ModelEntry,
        size: Sized,
        source: Layout | NodeRequest,
        prepared: Prepared | None = None,
    ) -> RequestTicket:
        """Make the task and hand it to the scheduler. Under the lock."""
        estimate = size.estimate
        target_ns = call.qos_target_ns or int(self._registry.factor_of(entry) * estimate.solo_ns)
        timeout_ns = None if call.timeout_ns is None else Nanos(max(1, call.timeout_ns))
        task = Task(
            task_id=TaskId(next(self._task_ids)),
            model=entry.key,
            num_nodes=size.num_nodes,
            num_edges=size.num_edges,
            arrived_ns=Nanos(call.arrived_ns),
            estimate=estimate,
            qos=QoS(Nanos(target_ns), timeout_ns, call.priority),
            tenant=call.tenant,
        )
        uid = f"{self.boot_id}-{task.task_id}"
        ticket = RequestTicket(self, call, entry, task, source, uid, prepared)
        if self._newest is not None:
            self._newest.alone = False
        ticket.alone = not self._tickets and call.arrived_ns - self._idle_since_ns >= IDLE_NS
        self._newest = ticket
        self._tickets[task.task_id] = ticket
        entry.inflight += 1
        self._carry_out(TaskArrived(task, None if prepared is None else prepared.started_ns))
        return ticket

    def handle(self, event: Event) -> None:
        """Give the scheduler an event and carry out what it answers. Any thread."""
        with self._lock:
            self._carry_out(event)

    def unloaded(self, model: str) -> None:
        """Forget what was decided of a model that is served no longer. Any thread."""
        self.handle(ModelUnloaded(model))

    def quarantine_reason(self, model: str) -> str:
        """Return why the model is not run now; empty when it may run. Any thread."""
        return self.scheduler.quarantine_reason(model, clock.now_ns())

    def cancel(self, task_id: TaskId) -> None:
        """Give up on a task that may long be answered. Any thread."""
        with self._lock:
            if task_id in self._tickets:
                self._carry_out(TaskCancelled(task_id))

    def unhold(self, ticket: RequestTicket, outcome: Outcome | None) -> None:
        """The serving thread is done with the ticket's buffers; how it ended, if it was told."""
        with self._lock:
            self._unhold(ticket)
            if isinstance(outcome, Completed) and ticket.run is not None:
                lesson = ticket.run.lesson(outcome)
                if lesson is not None:
                    self._lessons.append(lesson)
            if len(self._lessons) >= (_LESSONS if self.serving else 1):
                self._learn()
            entry = ticket.entry
            entry.inflight -= 1
            if entry.retired and entry.inflight == 0:
                entry.idle.set()

    def sized(self, exact: Callable[[], Sized]) -> Sized:
        """What a request turned out to be, by estimates that belong to the lock."""
        with self._lock:
            return exact()

    def keep(self, task: Task, record: RequestRecord) -> None:
        """A request was answered: keep its record, unless it was the server's own."""
        if self._journal is not None:
            self._journal.left(task.arrived_ns + record.latency_ns, task.task_id)
        if self.serving:
            self._sink(record)
        else:
            self.own_record = record

    # --- the scheduler's commands ---------------------------------------------------------

    def _carry_out(self, event: Event) -> None:
        """Under the lock."""
        now_ns = clock.now_ns()
        commands = self.scheduler.handle(event, now_ns)
        if self._journal is not None:
            self._journal.step(now_ns, event, commands)
        # Lanes first: a thread that is told something takes the core and the interpreter lock for
        # it, while a lane waits that could run.
        for command in commands:
            if isinstance(command, _TO_LANES):
                self._execute(command)
        for command in commands:
            if not isinstance(command, _TO_LANES):
                self._execute(command)
        while self._next:
            self._carry_out(self._next.pop())
        if self.scheduler.drained:
            self._drained.set()
        wakeup_ns = self.scheduler.next_wakeup()
        if wakeup_ns is not None and (self._armed_ns is None or wakeup_ns < self._armed_ns):
            self._armed_ns = wakeup_ns
            if threading.get_ident() != self._thread.ident:
                self._pool.wake()

    def _execute(self, command: Command) -> None:
        """Under the lock."""
        if isinstance(command, RecycleLane):
            self._recycle(command.lane_id)
            return
        if isinstance(command, QuarantineModel):
            entry = self._registry.by_key(command.model)
            name = command.model if entry is None else entry.spec.key
            _log.error("model %s: %s", name, command.reason)
            return
        ticket = self._tickets[command.task_id]
        match command:
            case PrepareTask():
                ticket.command_prepare()
            case LaunchTask(_, lane_id, reserve_bytes=reserve_bytes, companions=companions):
                members = ticket, *(self._tickets[task_id] for task_id in companions)
                self._on_lane[lane_id] = run = Launch(members, lane_id)
                self._last_model[lane_id] = run.entry.spec.key
                self._pool.launch(lane_id, run.message(reserve_bytes))
            case SuspendTask(_, lane_id):
                self._pool.suspend(lane_id)
            case ResumeTask(_, lane_id):
                self._pool.resume(lane_id)
            case StopTask(task_id, lane_id):
                self._pool.stop_run(lane_id, task_id)
            case LookAtLane(task_id, lane_id):
                look = self._pool.look(lane_id, task_id)
                if look is not None:
                    self._next.append(LaneSeen(task_id, lane_id, look))
            case KillLane(_, lane_id):
                self._pool.kill(lane_id, f"a run of {ticket.entry.spec.key} stands still")
            case AnswerTask(_, outcome):
                ticket.command_answer(outcome)
            case ReleaseTask():
                del self._tickets[command.task_id]
                if ticket is self._newest:
                    self._newest = None  # or its tensors would stay
                if not self._tickets:
                    self._idle_since_ns = clock.now_ns()
                self._unhold(ticket)

    def _recycle(self, lane_id: LaneId) -> None:
        self.recycled += 1
        _log.warning(
            "lane %d is started anew: it holds %d MiB between runs (device.max_lane_memory); "
            "the last was of model %s",
            lane_id, self._held_bytes.get(lane_id, 0) >> 20, self._last_model.get(lane_id, "?"),
        )  # fmt: skip
        self._pool.recycle(lane_id)

    def _unhold(self, ticket: RequestTicket) -> None:
        block = ticket.unhold()
        if block is not None:
            self.shared.free(block)

    # --- the driver's thread ------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while not self._stopping:
                for lane_id, said in self._pool.poll(self._armed_ns):
                    self._hear_safely(lane_id, said)
                with self._lock:
                    self._keep_time()
        except BaseException:
            # Without it no request is ever answered again: whoever watches starts another server.
            _log.critical("a bug ended the driver's thread; the server ends", exc_info=True)
            _end_process()

    def _hear_safely(self, lane_id: LaneId, said: object) -> None:
        try:
            self._hear(lane_id, said)
        except Exception:
            # A bug; the server goes on with the requests it does not concern.
            _log.exception("lane %d: message %s cannot be handled", lane_id, said)

    def learn(self) -> None:
        """Correct the estimates by all runs that ended. Any thread."""
        if self._lessons:
            with self._lock:
                self._learn()

    def _learn(self) -> None:
        """Under the lock."""
        lessons, self._lessons = self._lessons, []
        for lesson in lessons:
            try:
                lesson()
            except Exception:
                # A bug, which no thread that serves must end for.
                _log.exception("a run that ended cannot be learned from")
        self._tell_slowdown()

    def _tell_slowdown(self) -> None:
        """What runs do to one another, to the scheduler if it is news. Under the lock."""
        learned = self._registry.interference.table
        if is_news(learned, self._slowdown):
            self._slowdown = learned
            self._carry_out(SlowdownChanged(learned))

    def _keep_time(self) -> None:
        """Tick when it is time, and arm for the next. Under the lock."""
        now_ns = clock.now_ns()
        wakeup_ns = self.scheduler.next_wakeup()
        if wakeup_ns is not None and wakeup_ns <= now_ns:
            self._carry_out(Tick())
            wakeup_ns = self.scheduler.next_wakeup()
        # A time for which nobody waits any more is kept: to arm for the deadline of each request
        # that is alone would take a wake-up of this thread for each.
        armed_ns = self._armed_ns
        if armed_ns is None or armed_ns <= now_ns or (wakeup_ns or armed_ns) < armed_ns:
            self._armed_ns = wakeup_ns

    def _hear(self, lane_id: LaneId, said: object) -> None:
        match said:
            case TaskDone() | TaskError():
                with self._lock:
                    self._end(lane_id, self._on_lane.get(lane_id), said)
            case ModelLoaded(key):
                if self._registry.lane_answered(lane_id, key):
                    self._lane_ready(lane_id)
            case ModelFailed(key, message):
                _log.error("lane %d: %s: %s", lane_id, key, message)
                if self._registry.lane_answered(lane_id, key, message):
                    self._lane_ready(lane_id)
            case LaneHolds(held_bytes):
                self._held_bytes[lane_id] = held_bytes
                self.handle(LaneMeasured(lane_id, Bytes(held_bytes)))
            case TableMapped() | HotSetHeld():
                self._of_tables(said)
            case MemoryTaken(unplanned_bytes):
                self._memory_taken(lane_id, unplanned_bytes)
            case LaneUp():
                if self._registry.lane_up(lane_id):
                    self._lane_ready(lane_id)
                if self.serving:
                    self._lane_came_back(lane_id)
            case LaneDown(lane_ids=lane_ids):
                for lost_id in lane_ids:
                    self._registry.lane_lost(lost_id)
                with self._lock:
                    lost = [lost_id for lost_id in lane_ids if lost_id in self._lanes_ready]
                    self._lanes_ready.difference_update(lost)
                    for lost_id in lost:
                        self._on_lane.pop(lost_id, None)
                    if lost:
                        self._carry_out(LaneLost(lost[0], tuple(lost[1:])))

    def _end(self, lane_id: LaneId, run: Launch | None, said: TaskDone | TaskError) -> None:
        """The lane says that a run ended, and should be running `run`. Under the lock."""
        wrong = "ended a run when it had none" if run is None else run.complaint(said)
        if wrong or run is None:
            self._pool.kill(lane_id, wrong)
            return
        del self._on_lane[lane_id]
        self._pool.ended(lane_id)
        task_id = TaskId(said.task_id)
        if isinstance(said, TaskDone):
            self._carry_out(TaskFinished(task_id, lane_id, run.ended(said)))
        else:
            self._carry_out(_how_failed(task_id, lane_id, said.reason, said.message))

    def _lane_ready(self, lane_id: LaneId) -> None:
        with self._lanes_changed:
            if lane_id not in self._lanes_ready:
                self._lanes_ready.add(lane_id)
                self._carry_out(LaneReady(lane_id))
                self._lanes_changed.notify_all()


def _end_process() -> NoReturn:
    logging.shutdown()
    os._exit(EXIT_BUG)


def _how_failed(
    task_id: TaskId, lane_id: LaneId, reason: str, message: str
) -> TaskFailed | TaskOverran:
    if reason == FailReason.OUT_OF_MEMORY.value:
        return TaskOverran(task_id, lane_id, message)
    return TaskFailed(task_id, lane_id, FailReason(reason), message)
