"""The server's engine: what it is made of, its life, and what the transport asks of it.

Requests are checked and sized here and handed to the driver, see ``serve.server.driver``, which
takes them over the lanes.
"""

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from serve.config import Config
from serve.core.events import BudgetChanged, DrainStarted
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.slowdown import NO_SLOWDOWN
from serve.core.types import Bytes, DeviceId, Estimate, LaneId, Nanos, Sized
from serve.errors import ConfigError, InvalidInput, NotReady, ServeError, UnknownName
from serve.estimate.estimator import Breakdown, ModelEstimator
from serve.graphs.updates import Change
from serve.ipc.shared_pool import SharedPool
from serve.models.cache import CalibrationCache
from serve.obs.journal import JournalWriter
from serve.obs.metrics import EngineSnapshot
from serve.obs.record import RequestRecord
from serve.server.api import (
    GraphInfo,
    InferCall,
    ModelEstimate,
    ModelInfo,
    SampleEstimate,
)
from serve.server.catalogue import ModelEntry, Registry
from serve.server.device import Device
from serve.server.driver import Driver
from serve.server.graphs import GraphStore
from serve.server.lanes.pool import LanePool
from serve.server.launch import LAUNCH_NS
from serve.server.learning.alone import Arrays, LoneRequests, Send, call_of, shows_solo_time
from serve.server.learning.beside import learn_interference
from serve.server.node_requests import Fanouts, NodeRequests
from serve.server.report_rows import Scheduling, refusal_record
from serve.server.staging import plan_layout
from serve.server.ticket import RequestTicket

_log = logging.getLogger(__name__)

#: Staged at once: what runs, as much again prepared, at the largest message (widened to int64).
_STAGED_PER_LANE = 4
#: The server's own requests at most, in messages of the largest size.
_OWN_SHARE = 0.9
#: Lone requests for a model and size: what runs side by side take is told by what they take alone,
#: and leaves its mark on it, which as many runs must take away as corrections look at.
_LONE_FIRST, _LONE_LAST = 2, 3


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
        self._device = device
        self._sink = sink
        chosen = config.scheduling
        lanes = len(device.lane_cores) * device.count
        shared = SharedPool(
            _STAGED_PER_LANE * lanes * max(2 * config.server.max_message_bytes, 64 << 20)
        )
        self._shared = shared
        self.pool = LanePool(
            device.lane_cores,
            shared,
            device.keep_bytes,
            places=device.places,
            niceness=config.device.lane_niceness,
        )
        # Graphs are held by the host, so they count where its memory is the device's.
        self._graphs_count = not device.places
        #: By lane, see ``MemoryTaken``.
        self._unplanned_bytes: dict[LaneId, int] = {}
        graphs_bytes = device.budget_bytes if self._graphs_count else None
        self._graphs = GraphStore(
            config,
            graphs_bytes,
            self._graphs_changed,
            hot_budget_bytes=0 if self._graphs_count else device.budget_bytes,
        )
        self._node_requests = NodeRequests(self._graphs)
        self._lock = threading.Lock()
        self._registry = Registry(
            config.path(config.models.repository),
            cache,
            self.pool,
            executor=config.models.executor,
            qos_factor=chosen.qos_factor,
            calibration_s=config.models.calibration_s,
            start_timeout_s=config.server.start_timeout_s,
            budget_bytes=device.budget_bytes,
            budget_changed=self._weights_changed,
            lock=self._lock,
            graphs_of=self._graphs.fitting,
        )
        limit_bytes = None if device.lane_limit_bytes is None else Bytes(device.lane_limit_bytes)
        facts, *more = (
            DeviceFacts(
                budget_bytes=Bytes(device.budget_bytes),
                lane_ids=lane_ids,
                parallelism=device.parallelism,
                can_suspend=device.can_suspend,
                launch_ns=LAUNCH_NS,
                lane_limit_bytes=limit_bytes,
            )
            for lane_ids in self.pool.lane_ids_by_device
        )
        params = SchedulerParams(
            policy=chosen.policy,
            discipline=chosen.discipline,
            window=chosen.window,
            window_ns=Nanos(int(chosen.window_ms * 1e6)),
            device=facts,
            more_devices=tuple(more),
            max_queue=config.server.max_queue,
            shed_late=chosen.shed_late,
            unions=self._union if chosen.merge else None,
            watched=True,
            run_limit_ns=config.server.max_run_ns,
        )
        self.driver = Driver(
            params,
            self.pool,
            shared,
            self._registry,
            lock=self._lock,
            sink=sink,
            scheduling=Scheduling(
                chosen.policy, chosen.discipline, device.names, len(device.lane_cores)
            ),
            check_finite=config.server.reject_nonfinite,
            journal=journal,
            of_tables=self._graphs.tables.answered,
            lane_came_back=self._offer_tables_to,
            memory_taken=self._memory_taken,
        )
        self._registry.quarantine_reason = self.driver.quarantine_reason
        self._refusals = itertools.count(1)
        #: Nobody else knows it, so that nobody else is let in before the server serves.
        self._own_id = secrets.token_hex()
        self._draining = False
        self._stopped = False

    # --- life ---------------------------------------------------------------------------

    def start(self, progress: Callable[[str, float], None] | None = None) -> None:
        """Start lanes and load models; `open` comes next.

        A model that does not load is logged and stays UNAVAILABLE; raises NotReady when no
        lane starts or no model can be served.
        """
        names = self._registry.names_to_load(self._config.models.load)
        tell = progress or (lambda step, fraction: None)
        self._graphs.open(tell)
        tell("starting lanes", 0.0)
        self.pool.start()
        lanes = len(self.pool.lane_ids)
        limit_s = self._config.server.start_timeout_s
        if (started := self.driver.start(limit_s)) < lanes:
            raise NotReady(
                f"{started} of {lanes} lanes started within server.start_timeout_s = {limit_s:g} "
                "seconds; see the log"
            )
        for index, name in enumerate(names):
            if self.pool.calibrators.interrupted:
                raise NotReady("told to stop")
            share = index / len(names)
            tell(f"loading {name}", share)
            # What does not load is in the log, and in what is told of the model.
            with suppress(ServeError):
                self._registry.load(
                    name,
                    lambda step, fraction, name=name, share=share: tell(  # type: ignore[misc]
                        f"{name}: {step}", share + fraction / len(names)
                    ),
                )
        if names and not self._registry.entries:
            raise NotReady(f"none of {len(names)} models can be served; see the log")
        for entry in self._registry.entries:
            self._node_requests.warm(entry)
        self._offer_tables()

    def open(
        self,
        progress: Callable[[str, float], None] | None = None,
        send: Send | None = None,
    ) -> None:
        """Time requests of the server's own, then take everybody's.

        `send` has them come the way all requests come; None: there is no transport.
        """
        send = send or self._send
        tell = progress or (lambda step, fraction: None)

        def ask(model: str, tensors: Arrays) -> RequestRecord:
            send(model, tensors, self._own_id)
            assert self.driver.own_record is not None
            return self.driver.own_record

        most_bytes = int(_OWN_SHARE * self._config.server.max_message_bytes)
        lone = LoneRequests(self._registry.entries, ask, most_bytes)
        tell("timing lone requests", 1.0)
        lone.send(_LONE_FIRST)
        tell("timing requests side by side", 1.0)
        first, *others = self.driver.scheduler.devices
        learn_interference(
            self._registry.entries,
            self._submit,
            slots=first.params.device.slots,
            budget_bytes=first.budget_bytes,
            devices=1 + len(others),
        )
        if (table := self._registry.interference.table) != NO_SLOWDOWN:
            _log.info("runs beside 0, 1, … others take %s times as long", table)
        tell("timing lone requests", 1.0)
        lone.send(_LONE_LAST)
        lone.teach(self._registry.overhead)
        self.driver.serving = True
        self.pool.calibrators.niceness = self._config.device.lane_niceness

    def load_offline(
        self, name: str, progress: Callable[[str, float], None], *, with_graphs: bool = False
    ) -> None:
        """Read and calibrate one model without lanes: it can be estimated, not run."""
        if with_graphs:
            self._graphs.open(progress)
        self._registry.load(name, progress)

    def estimator(self, name: str) -> ModelEstimator:
        """The newest version's estimator, to be asked without a request."""
        return self._registry.get(name).estimator

    def interrupt(self) -> None:
        """Have a start or a load that is under way end soon, as it may hang."""
        self.pool.calibrators.interrupt()
        self._registry.interrupt()

    def begin_drain(self) -> int:
        """Accept nothing new from now on; how many accepted requests are unanswered."""
        self._draining = True
        self.driver.handle(DrainStarted())
        return len(self.driver.tickets())

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until everything accepted is answered; False when time ran out."""
        return self.driver.wait_drained(timeout_s)

    def stop(self) -> None:
        """End every lane. Requests that still wait are cancelled. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self.driver.stop()
        self.pool.stop()
        self._registry.close()
        self._shared.close()

    # --- api.Inference --------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """See ``api.Inference``."""
        return self.driver.serving and not self._draining and self.driver.lanes_able > 0

    @property
    def live(self) -> bool:
        """See ``api.Inference``."""
        return self.driver.alive

    def submit(self, call: InferCall) -> RequestTicket:
        """See ``api.Inference``."""
        if not self.driver.serving and call.client_id != self._own_id:
            raise NotReady("the server is starting or has stopped")
        return self._submit(call)

    def refused(
        self, model: str, version: str, client_id: str, arrived_ns: int, error: ServeError
    ) -> None:
        """See ``api.Inference``."""
        if client_id == self._own_id:
            return
        if isinstance(error, UnknownName):
            # Names that clients make up must not become labels of metrics.
            model, version = "unknown", ""
        uid = f"{self.driver.boot_id}-r{next(self._refusals)}"
        self._sink(refusal_record(uid, model, version, client_id, arrived_ns, error))

    def models(self) -> tuple[ModelInfo, ...]:
        """See ``api.Inference``."""
        return self._registry.infos()

    def served(self) -> tuple[ModelInfo, ...]:
        """See ``api.Inference``."""
        return tuple(self._registry.info(entry) for entry in self._registry.entries)

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
        keys = [entry.key for entry in self._registry.entries if entry.spec.name == name]
        self._registry.unload(name)
        for key in keys:
            self.driver.unloaded(key)

    def estimate(self, name: str, version: str, num_nodes: int, num_edges: int) -> ModelEstimate:
        """See ``api.Inference``."""
        if num_nodes < 0 or num_edges < 0:
            raise InvalidInput(f"nodes {num_nodes} and edges {num_edges} must be at least 0")
        entry = self._registry.get(name, version)
        with self._lock:
            found = entry.estimator.describe(num_nodes, num_edges)
        return self._model_estimate(entry, found, num_nodes, num_edges)

    def estimate_sample(
        self,
        name: str,
        version: str,
        graph: str,
        num_ids: int,
        fanouts: Fanouts | None = None,
    ) -> ModelEstimate:
        """See ``api.Inference``."""
        entry = self._registry.get(name, version)
        request = self._node_requests.make(graph, num_ids, fanouts, entry)
        with self._lock:
            size = request.sizes.expected(num_ids)
            usual = entry.estimator.describe(size.num_nodes, size.num_edges)
            large = entry.estimator.describe(size.num_nodes_high, size.num_edges_high)
        found = replace(
            large,
            run_ns=usual.run_ns,
            run_high_ns=usual.run_high_ns,
            solo_ns=usual.solo_ns + size.prepare_ns,
            solo_high_ns=usual.solo_high_ns + size.prepare_ns,
        )
        sample = SampleEstimate(graph, num_ids, request.fanouts, size)
        return replace(
            self._model_estimate(entry, found, size.num_nodes, size.num_edges), sample=sample
        )

    def _model_estimate(
        self, entry: ModelEntry, found: Breakdown, num_nodes: int, num_edges: int
    ) -> ModelEstimate:
        budgets_bytes = [one.budget_bytes for one in self.driver.scheduler.devices]
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
            budget_bytes=sum(budgets_bytes),
            fit_count=sum(size // max(1, found.reserve_bytes) for size in budgets_bytes),
            output_bytes=found.output_bytes,
            workspace_bytes=found.workspace_bytes,
            peak_where=found.peak_where,
            warning=found.warning,
        )

    def graphs(self, name: str = "") -> tuple[GraphInfo, ...]:
        """See ``api.Inference``."""
        return self._graphs.infos(name)

    def update_graph(self, name: str, change: Change, if_version: int | None) -> GraphInfo:
        """See ``api.Inference``."""
        return self._graphs.update(name, change, if_version)

    # --- what was learned, and how it stands --------------------------------------------

    def learn(self, record: RequestRecord) -> None:
        """Correct what requests take; for the sink's thread, not the answer's."""
        self.driver.learn()
        if record.graph:
            # Sampling is learned by itself; which nodes are asked for most, beside.
            if self._graphs.tables.reconsider(record.graph):
                self._offer_tables()
            return
        if not shows_solo_time(record):
            return
        try:
            entry = self._registry.get(record.model, record.version)
        except ServeError:
            return  # unloaded meanwhile
        with self._lock:
            entry.estimator.observe_solo(record.num_nodes, record.num_edges, record.latency_ns)

    def snapshot(self, rows_dropped: int = 0) -> EngineSnapshot:
        """The engine at this moment, for metrics; the report's lost rows are the caller's."""
        pending: dict[tuple[str, str], int] = {}
        entries = self._registry.entries
        with self._lock:
            for ticket in self.driver.tickets():
                spec = ticket.entry.spec
                key = spec.name, str(spec.version)
                pending[key] = pending.get(key, 0) + (not ticket.launched)
            return EngineSnapshot(
                pending=pending,
                quarantined=tuple(
                    sorted({e.spec.name for e in entries if self.driver.quarantine_reason(e.key)})
                ),
                lanes_up=self.driver.lanes_up,
                lane_restarts=self.pool.restarts,
                lanes_recycled=self.driver.recycled,
                lane_bytes={int(lane): size for lane, size in self.pool.memory_bytes().items()},
                memory_bytes=tuple(
                    (one.budget_bytes, one.reserved_bytes) for one in self.driver.scheduler.devices
                ),
                rows_dropped=rows_dropped,
                executors={(e.spec.name, str(e.spec.version)): e.executor for e in entries},
                gathered_rows=self._graphs.tables.gathered_rows(),
            )

    def _send(self, model: str, tensors: Arrays, own_id: str) -> None:
        self.submit(call_of(model, tensors, own_id)).result()

    def _submit(self, call: InferCall) -> RequestTicket:
        while True:
            entry = self._registry.get(call.model, call.version)
            if call.graph is not None:
                num_ids = call.tensors["node_ids"].shape[0]
                request = self._node_requests.make(call.graph, num_ids, call.fanouts, entry)
                with self._lock:
                    if not entry.retired:
                        size = request.expected(entry.estimator)
                        return self.driver.accept(call, entry, size, request)
            elif (ticket := self._submit_tensors(call, entry)) is not None:
                return ticket

    def _submit_tensors(self, call: InferCall, entry: ModelEntry) -> RequestTicket | None:
        """A request that brings its graph; None: the model was replaced just now."""
        num_nodes, num_edges = self._size(call, entry)
        estimator = entry.estimator
        edges = call.tensors.get("edge_index")
        is_int32 = edges is not None and edges.datatype == "INT32"
        narrow = is_int32 and entry.signature.narrow_edges
        layout = plan_layout(
            {name: tensor.shape for name, tensor in call.tensors.items()},
            entry.spec.inputs,
            estimator.output_bytes(num_nodes, num_edges),
            narrow_edges=narrow,
        )
        prepared = self.driver.prepare_early(call, entry, layout)
        try:
            with self._lock:
                if not entry.retired:
                    num_loops = None if prepared is None else prepared.num_loops
                    estimate = estimator.estimate(
                        num_nodes, num_edges, num_loops, narrow_edges=narrow
                    )
                    size = Sized(num_nodes, num_edges, estimate)
                    ticket = self.driver.accept(call, entry, size, layout, prepared)
                    prepared = None  # the ticket's
                    return ticket
            return None
        finally:
            if prepared is not None:
                self._shared.free(prepared.staged.block)

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

    def _union(self, key: str, sizes: Sequence[tuple[int, int]]) -> Estimate | None:
        """The scheduler's ``UnionEstimate``. Under the lock."""
        entry = self._registry.by_key(key)
        if entry is None or not entry.signature.mergeable:
            return None
        return entry.estimator.union(sizes)

    def _weights_changed(self, weights_bytes: Bytes) -> None:
        taken_bytes = weights_bytes + self._graphs.tables.hot_bytes
        taken_bytes += self._graphs.held_bytes if self._graphs_count else 0
        left_bytes = self._device.budget_bytes - taken_bytes
        for number, lane_ids in enumerate(self.pool.lane_ids_by_device):
            # Each lane tells of the whole device: the most that any knows of.
            unplanned_bytes = max(self._unplanned_bytes.get(lane_id, 0) for lane_id in lane_ids)
            budget_bytes = Bytes(max(0, left_bytes - unplanned_bytes))
            self.driver.handle(BudgetChanged(budget_bytes, DeviceId(number)))

    def _memory_taken(self, lane_id: LaneId, unplanned_bytes: int) -> None:
        self._unplanned_bytes[lane_id] = unplanned_bytes
        self._weights_changed(Bytes(self._registry.weights_bytes))

    def _offer_tables(self) -> None:
        """Have every device map the graphs' features as they are now, before requests need them."""
        for lane_ids in self.pool.lane_ids_by_device:
            self._offer_tables_to(lane_ids[0])

    def _offer_tables_to(self, lane_id: LaneId) -> None:
        """The same for one device, if the lane is its first."""
        if any(lane_id == lane_ids[0] for lane_ids in self.pool.lane_ids_by_device):
            for message in self._graphs.tables.offers():
                self.pool.send(lane_id, message)

    def _graphs_changed(self) -> None:
        self._registry.forget_infos()
        if self.driver.serving:
            self._offer_tables()
        self._weights_changed(Bytes(self._registry.weights_bytes))
