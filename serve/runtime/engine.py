"""The live driver of the scheduler: one lock, one thread, and every handler thread lends a hand.

Whoever has an event (the thread a request came in on, the engine's own thread that listens to
the lanes and keeps the timers) takes the lock, asks the scheduler what to do and does it. All
that is done under the lock is a few microseconds of dictionary work, a packet to a lane, or a
word to a waiting thread; nothing there blocks. See ``serve.core.scheduler`` for the decisions
and ``docs/architecture.md`` for a request's way through all this.
"""

import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Sequence

from serve.config import Config
from serve.core.commands import (
    AnswerTask,
    Command,
    LaunchTask,
    PrepareTask,
    ReleaseTask,
    ResumeTask,
    StopTask,
    SuspendTask,
)
from serve.core.events import (
    BudgetChanged,
    DrainStarted,
    Event,
    LaneLost,
    LaneReady,
    TaskArrived,
    TaskCancelled,
    TaskFailed,
    TaskFinished,
    TaskOverran,
    Tick,
)
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.scheduler import Scheduler
from serve.core.types import (
    Bytes,
    Completed,
    Estimate,
    FailReason,
    LaneId,
    Nanos,
    QoS,
    Sized,
    Task,
    TaskId,
)
from serve.errors import ConfigError, InvalidInput, NotFound, NotReady, ServeError
from serve.estimate.estimator import ModelEstimator
from serve.estimate.sampling import SampleProbe
from serve.graphs.change import Change
from serve.models.cache import CalibrationCache
from serve.obs.journal import JournalWriter
from serve.obs.metrics import EngineSnapshot
from serve.obs.record import RequestRecord
from serve.runtime import clock
from serve.runtime.api import GraphInfo, InferCall, ModelEstimate, ModelInfo
from serve.runtime.device import Device
from serve.runtime.graphs import GraphStore, NodeRequest
from serve.runtime.launch import LAUNCH_NS, Launch
from serve.runtime.messages import ModelFailed, ModelLoaded, TaskDone, TaskError
from serve.runtime.overhead import time_overhead
from serve.runtime.pool import LaneDown, LanePool, LaneUp
from serve.runtime.records import Scheduling, refusal_record
from serve.runtime.registry import ModelEntry, Registry
from serve.runtime.shm import SharedPool
from serve.runtime.staging import Layout, plan_layout
from serve.runtime.ticket import RequestTicket

_log = logging.getLogger(__name__)

_LANES_START_TIMEOUT_S = 120.0
#: Staged at once: what runs, as much again prepared, at the largest message (widened to int64).
_STAGED_PER_LANE = 4


class Engine:
    """Implements ``api.Inference``."""

    def __init__(
        self,
        config: Config,
        device: Device,
        sink: Callable[[RequestRecord], None],
        cache: CalibrationCache,
        journal: JournalWriter | None = None,
    ) -> None:
        self._config = config
        self._journal = journal
        self._device = device
        self._sink = sink
        self.check_finite = config.server.reject_nonfinite
        chosen = config.scheduling
        self.scheduling = Scheduling(chosen.policy, chosen.discipline, device.name)
        lanes = len(device.lane_cores)
        self.shared = SharedPool(
            _STAGED_PER_LANE * lanes * max(2 * config.server.max_message_bytes, 64 << 20)
        )
        self._pool = LanePool(device.lane_cores, self.shared, device.keep_bytes, place=device.place)
        params = SchedulerParams(
            policy=chosen.policy,
            discipline=chosen.discipline,
            window=chosen.window,
            window_ns=Nanos(int(chosen.window_ms * 1e6)),
            device=DeviceFacts(
                budget_bytes=Bytes(device.budget_bytes),
                lane_ids=self._pool.lane_ids,
                parallelism=device.parallelism,
                can_suspend=device.can_suspend,
                launch_ns=LAUNCH_NS,
            ),
            max_queue=config.server.max_queue,
            shed_late=chosen.shed_late,
            unions=self._union if chosen.merge else None,
        )
        self._scheduler = Scheduler(params if journal is None else journal.begin(params))
        self._lock = threading.Lock()
        self._tickets: dict[TaskId, RequestTicket] = {}
        self._task_ids = itertools.count(1)
        self._refusals = itertools.count(1)
        self._boot_id = uuid.uuid4().hex[:8]
        self._armed_ns: int | None = None
        self._lanes_ready: set[LaneId] = set()
        #: Whose task each lane holds.
        self._on_lane: dict[LaneId, ModelEntry] = {}
        #: Tasks that were to be launched and are refused, to be told when all commands are done.
        self._refused: list[TaskFailed] = []
        self._lanes_changed = threading.Condition(self._lock)
        self._drained = threading.Event()
        self._serving = False
        self._draining = False
        self._stopping = False
        self._thread = threading.Thread(target=self._listen, name="engine", daemon=True)
        # Graphs are held by the host, so they count where its memory is the device's.
        self._graphs_count = device.place is None
        graphs_bytes = device.budget_bytes if self._graphs_count else None
        self._graphs = GraphStore(config, graphs_bytes, self._graphs_changed)
        self._registry = Registry(
            config.path(config.models.repository),
            cache,
            self._pool,
            executor=config.models.executor,
            qos_factor=chosen.qos_factor,
            calibration_s=config.models.calibration_s,
            budget_bytes=device.budget_bytes,
            budget_changed=self._weights_changed,
            lock=self._lock,
            graphs_of=self._graphs.fitting,
        )

    # --- life ---------------------------------------------------------------------------

    def start(self, progress: Callable[[str, float], None] | None = None) -> None:
        """Start lanes, load models, time the way through; returns when requests may come.

        A model that does not load is logged and stays UNAVAILABLE; raises NotReady when no
        lane starts or no model can be served.
        """
        names = self._registry.names_to_load(self._config.models.load)
        tell = progress or (lambda step, fraction: None)
        self._graphs.open(tell)
        tell("starting lanes", 0.0)
        self._pool.start()
        self._thread.start()
        with self._lanes_changed:
            lanes = len(self._pool.lane_ids)
            if not self._lanes_changed.wait_for(
                lambda: len(self._lanes_ready) == lanes, _LANES_START_TIMEOUT_S
            ):
                raise NotReady(
                    f"{len(self._lanes_ready)} of {lanes} lanes started within "
                    f"{_LANES_START_TIMEOUT_S:g} s; see the log"
                )
        for index, name in enumerate(names):
            share = index / len(names)
            tell(f"loading {name}", share)
            try:
                self._registry.load(
                    name,
                    lambda step, fraction, name=name, share=share: tell(  # type: ignore[misc]
                        f"{name}: {step}", share + fraction / len(names)
                    ),
                )
            except ServeError as error:
                _log.error("model %s is not served: %s", name, error)
        if names and not self._registry.entries:
            raise NotReady(f"none of {len(names)} models can be served; see the log")
        for entry in self._registry.entries:
            self._graphs.warm(entry)
        tell("timing the server's own share", 1.0)
        self._registry.overhead.calibrate(time_overhead(self._registry.entries, self._submit))
        self._serving = True

    def load_offline(self, name: str, progress: Callable[[str, float], None]) -> None:
        """Read and calibrate one model without lanes: it can be estimated, not run."""
        self._registry.load(name, progress)

    def estimator(self, name: str) -> ModelEstimator:
        """The newest version's estimator, to be asked without a request."""
        return self._registry.get(name).estimator

    def begin_drain(self) -> int:
        """Accept nothing new from now on; how many accepted requests are unanswered."""
        self._draining = True
        with self._lock:
            self._carry_out(DrainStarted())
            return len(self._tickets)

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until everything accepted is answered; False when time ran out."""
        return self._drained.wait(timeout_s)

    def stop(self) -> None:
        """End every lane. Requests that still wait are cancelled. Idempotent."""
        if self._stopping:
            return
        self._serving = False
        for ticket in tuple(self._tickets.values()):
            ticket.cancel()
        self._stopping = True
        if self._thread.is_alive():
            self._pool.wake()
            self._thread.join()
        self._pool.stop()
        self.shared.close()

    # --- api.Inference --------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """See ``api.Inference``."""
        return self._serving and not self._draining and bool(self._lanes_ready)

    @property
    def live(self) -> bool:
        """See ``api.Inference``."""
        return not self._thread.ident or self._thread.is_alive()

    def submit(self, call: InferCall) -> RequestTicket:
        """See ``api.Inference``."""
        if not self._serving:
            raise NotReady("the server is starting or has stopped")
        return self._submit(call)

    def refused(
        self, model: str, version: str, client_id: str, arrived_ns: int, error: ServeError
    ) -> None:
        """See ``api.Inference``."""
        if isinstance(error, NotFound):
            # Names that clients make up must not become labels of metrics.
            model, version = "unknown", ""
        uid = f"{self._boot_id}-r{next(self._refusals)}"
        self._sink(refusal_record(uid, model, version, client_id, arrived_ns, error))

    def models(self) -> tuple[ModelInfo, ...]:
        """See ``api.Inference``."""
        return self._registry.infos()

    def model(self, name: str, version: str = "") -> ModelInfo:
        """See ``api.Inference``."""
        return self._registry.info(self._registry.get(name, version))

    def load(self, name: str) -> None:
        """See ``api.Inference``."""
        try:
            self._registry.load(name)
        except ConfigError as error:
            raise NotReady(f"model '{name}' cannot be loaded: {error}") from error

    def unload(self, name: str) -> None:
        """See ``api.Inference``."""
        self._registry.unload(name)

    def estimate(self, name: str, version: str, num_nodes: int, num_edges: int) -> ModelEstimate:
        """See ``api.Inference``."""
        if num_nodes < 0 or num_edges < 0:
            raise InvalidInput(f"nodes {num_nodes} and edges {num_edges} must be at least 0")
        entry = self._registry.get(name, version)
        with self._lock:
            found = entry.estimator.describe(num_nodes, num_edges)
            budget_bytes = self._scheduler.budget_bytes
        return ModelEstimate(
            model=entry.spec.name,
            version=str(entry.spec.version),
            executor=entry.executor,
            num_nodes=num_nodes,
            num_edges=num_edges,
            weights_bytes=entry.spec.weights_bytes,
            input_bytes=found.input_bytes,
            peak_bytes=found.peak_bytes,
            reserve_bytes=found.reserve_bytes,
            run_ns=found.run_ns,
            solo_ns=found.solo_ns,
            solo_high_ns=found.solo_high_ns,
            qos_target_ns=int(self._registry.factor_of(entry) * found.solo_ns),
            budget_bytes=budget_bytes,
            fit_count=budget_bytes // max(1, found.reserve_bytes),
            peak_where=found.peak_where,
            warning=found.warning,
        )

    def graphs(self, name: str = "") -> tuple[GraphInfo, ...]:
        """See ``api.Inference``."""
        return self._graphs.infos(name)

    def update_graph(self, name: str, change: Change, if_version: int | None) -> GraphInfo:
        """See ``api.Inference``."""
        return self._graphs.update(name, change, if_version)

    # --- the scheduler's driver -------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Give the scheduler an event and carry out what it answers. Any thread."""
        with self._lock:
            self._carry_out(event)

    def cancel(self, task_id: TaskId) -> None:
        """Give up on a task that may long be answered. Any thread."""
        with self._lock:
            if task_id in self._tickets:
                self._carry_out(TaskCancelled(task_id))

    def unhold(self, ticket: RequestTicket) -> None:
        """The serving thread is done with the ticket's buffers."""
        with self._lock:
            self._unhold(ticket)
            entry = ticket.entry
            entry.inflight -= 1
            if entry.retired and entry.inflight == 0:
                entry.idle.set()

    def sampled(self, ticket: RequestTicket, request: NodeRequest, found: SampleProbe) -> Sized:
        """What a request by node id turned out to be."""
        with self._lock:
            return request.exact(ticket.entry.estimator, found)

    def keep(self, task: Task, record: RequestRecord) -> None:
        """A request was answered: keep its record, unless it was the server's own."""
        if self._journal is not None:
            self._journal.left(task.arrived_ns + record.latency_ns, task.task_id)
        if self._serving:
            self._sink(record)

    def learn(self, record: RequestRecord) -> None:
        """Correct what the server adds to a run; for the sink's thread, not the answer's."""
        if (
            record.status != "OK"
            or record.co_runners
            or record.group_size != 1
            or record.merged != 1
        ):
            return
        if record.graph:
            return  # sampling is learned by itself
        try:
            entry = self._registry.get(record.model, record.version)
        except ServeError:
            return  # unloaded meanwhile
        overhead_ns = record.latency_ns - record.queue_ns - record.run_ns - record.suspended_ns
        with self._lock:
            entry.estimator.observe_solo(record.num_nodes, record.num_edges, overhead_ns)

    def snapshot(self, rows_dropped: int = 0) -> EngineSnapshot:
        """The engine at this moment, for metrics; the report's lost rows are the caller's."""
        pending: dict[tuple[str, str], int] = {}
        now_ns = clock.now_ns()
        entries = self._registry.entries
        with self._lock:
            for ticket in self._tickets.values():
                spec = ticket.entry.spec
                key = spec.name, str(spec.version)
                pending[key] = pending.get(key, 0) + (not ticket.launched)
            return EngineSnapshot(
                pending=pending,
                quarantined=tuple(
                    sorted({e.spec.name for e in entries if e.quarantine.left_s(now_ns)})
                ),
                lanes_up=len(self._lanes_ready),
                lane_restarts=self._pool.restarts,
                budget_bytes=self._scheduler.budget_bytes,
                reserved_bytes=self._scheduler.reserved_bytes,
                rows_dropped=rows_dropped,
            )

    def _submit(self, call: InferCall) -> RequestTicket:
        while True:
            entry = self._registry.get(call.model, call.version)
            source: Layout | NodeRequest
            if call.graph is not None:
                source = self._graphs.request(call, entry)
            else:
                num_nodes, num_edges = self._size(call, entry)
                output_bytes = entry.estimator.output_bytes(num_nodes, num_edges)
                source = plan_layout(call.tensors, entry.spec.inputs, output_bytes)
            with self._lock:
                reason = entry.quarantine.reason(clock.now_ns())
                if reason:
                    raise NotReady(f"model {entry.spec.key}: {reason}")
                # Just replaced by a newer one, or let go: then `get` says so.
                if entry.retired:
                    continue
                if isinstance(source, NodeRequest):
                    size = source.expected(entry.estimator)
                else:
                    estimate = entry.estimator.estimate(num_nodes, num_edges)
                    size = Sized(num_nodes, num_edges, estimate)
                return self._accept(call, entry, size, source)

    def _accept(
        self, call: InferCall, entry: ModelEntry, size: Sized, source: Layout | NodeRequest
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
        uid = f"{self._boot_id}-{task.task_id}"
        ticket = RequestTicket(self, call, entry, task, source, uid)
        self._tickets[task.task_id] = ticket
        entry.inflight += 1
        self._carry_out(TaskArrived(task))
        return ticket

    def _size(self, call: InferCall, entry: ModelEntry) -> tuple[int, int]:
        """(nodes, edges) of a request the model can take; raises InvalidInput."""
        edges = call.tensors.get("edge_index")
        num_nodes = call.tensors["x"].shape[0]
        num_edges = 0 if edges is None else edges.shape[1]
        if num_nodes == 0 and not entry.signature.accepts_empty:
            raise InvalidInput(f"input 'x' has 0 nodes, which model '{call.model}' cannot take")
        if num_edges == 0 and not entry.signature.accepts_edgeless:
            raise InvalidInput(
                f"input 'edge_index' has 0 edges, which model '{call.model}' cannot take"
            )
        return num_nodes, num_edges

    def _carry_out(self, event: Event) -> None:
        """Under the lock."""
        now_ns = clock.now_ns()
        commands = self._scheduler.handle(event, now_ns)
        if self._journal is not None:
            self._journal.step(now_ns, event, commands)
        for command in commands:
            self._execute(command)
        while self._refused:
            self._carry_out(self._refused.pop())
        if self._scheduler.drained:
            self._drained.set()
        wakeup_ns = self._scheduler.next_wakeup()
        if wakeup_ns is not None and (self._armed_ns is None or wakeup_ns < self._armed_ns):
            self._armed_ns = wakeup_ns
            if threading.get_ident() != self._thread.ident:
                self._pool.wake()

    def _execute(self, command: Command) -> None:
        """Under the lock."""
        ticket = self._tickets[command.task_id]
        match command:
            case PrepareTask():
                ticket.command_prepare()
            case LaunchTask(task_id, lane_id) if reason := ticket.entry.quarantine.reason(
                clock.now_ns()
            ):
                failed = FailReason.QUARANTINED
                message = f"model {ticket.entry.spec.key}: {reason}"
                self._refused.append(TaskFailed(task_id, lane_id, failed, message))
            case LaunchTask(_, lane_id, reserve_bytes=reserve_bytes, companions=companions):
                self._on_lane[lane_id] = ticket.entry
                run = Launch([ticket, *(self._tickets[task_id] for task_id in companions)])
                self._pool.launch(lane_id, run.message(reserve_bytes), run.limit_ns)
            case SuspendTask(_, lane_id):
                self._pool.suspend(lane_id)
            case ResumeTask(_, lane_id):
                self._pool.resume(lane_id)
            case StopTask(task_id, lane_id):
                self._pool.stop_run(lane_id, task_id)
            case AnswerTask(_, outcome):
                ticket.command_answer(outcome)
                # While the other thread wakes up.
                if isinstance(outcome, Completed) and ticket.run is not None:
                    ticket.run.learn(outcome)
            case ReleaseTask():
                del self._tickets[command.task_id]
                self._unhold(ticket)

    def _union(self, key: str, sizes: Sequence[tuple[int, int]]) -> Estimate | None:
        """The scheduler's ``UnionEstimate``. Under the lock."""
        entry = self._registry.by_key(key)
        if entry is None or not entry.signature.mergeable:
            return None
        return entry.estimator.union(sizes)

    def _unhold(self, ticket: RequestTicket) -> None:
        block = ticket.unhold()
        if block is not None:
            self.shared.free(block)

    def _weights_changed(self, weights_bytes: Bytes) -> None:
        taken_bytes = weights_bytes + (self._graphs.held_bytes if self._graphs_count else 0)
        self.handle(BudgetChanged(Bytes(max(0, self._device.budget_bytes - taken_bytes))))

    def _graphs_changed(self) -> None:
        self._registry.forget_infos()
        self._weights_changed(Bytes(self._registry.weights_bytes))

    # --- the engine's thread ------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._stopping:
            for lane_id, said in self._pool.poll(self._armed_ns):
                try:
                    self._hear(lane_id, said)
                except Exception:
                    # A bug; the server goes on with the requests it does not concern.
                    _log.exception("lane %d: message %s cannot be handled", lane_id, said)
            with self._lock:
                self._armed_ns = None
                wakeup_ns = self._scheduler.next_wakeup()
                if wakeup_ns is not None and wakeup_ns <= clock.now_ns():
                    self._carry_out(Tick())
                self._armed_ns = self._scheduler.next_wakeup()

    def _hear(self, lane_id: LaneId, said: object) -> None:
        match said:
            case TaskDone(task_id):
                with self._lock:
                    self._ended(lane_id)
                    run = self._tickets[TaskId(task_id)].run
                    assert run is not None
                    usage = run.ended(said)
                    self._carry_out(TaskFinished(TaskId(task_id), lane_id, usage))
            case TaskError(task_id, reason, message):
                with self._lock:
                    self._ended(lane_id)
                    self._carry_out(_how_failed(TaskId(task_id), lane_id, reason, message))
            case ModelLoaded(key):
                if self._registry.lane_answered(lane_id, key):
                    self._lane_ready(lane_id)
            case ModelFailed(key, message):
                _log.error("lane %d: %s: %s", lane_id, key, message)
                if self._registry.lane_answered(lane_id, key, message):
                    self._lane_ready(lane_id)
            case LaneUp():
                if self._registry.lane_up(lane_id):
                    self._lane_ready(lane_id)
            case LaneDown():
                self._registry.lane_lost(lane_id)
                with self._lock:
                    if lane_id in self._lanes_ready:
                        self._lanes_ready.discard(lane_id)
                        self._blame(lane_id)
                        self._carry_out(LaneLost(lane_id))

    def _ended(self, lane_id: LaneId) -> None:
        """The lane's task ended as it should. Under the lock."""
        self._pool.ended(lane_id)
        self._on_lane.pop(lane_id).quarantine.ran()

    def _blame(self, lane_id: LaneId) -> None:
        """A lane died: its model is perhaps put aside before it gets the next. Under the lock."""
        entry = self._on_lane.pop(lane_id, None)
        now_ns = clock.now_ns()
        if entry is not None and entry.quarantine.lane_lost(now_ns):
            _log.error("model %s: %s", entry.spec.key, entry.quarantine.reason(now_ns))

    def _lane_ready(self, lane_id: LaneId) -> None:
        with self._lanes_changed:
            if lane_id not in self._lanes_ready:
                self._lanes_ready.add(lane_id)
                self._carry_out(LaneReady(lane_id))
                self._lanes_changed.notify_all()


def _how_failed(
    task_id: TaskId, lane_id: LaneId, reason: str, message: str
) -> TaskFailed | TaskOverran:
    if reason == FailReason.OUT_OF_MEMORY.value:
        return TaskOverran(task_id, lane_id, message)
    return TaskFailed(task_id, lane_id, FailReason(reason), message)
