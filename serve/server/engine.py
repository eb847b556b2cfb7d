"""The server's engine: its parts, its life cycle, and the calls of the transport.

A request goes through ``serve.server.intake`` to ``serve.server.driver``, which takes it over the
lanes.
"""

import secrets
from collections.abc import Callable, Sequence

import msgspec

from serve.config import Config
from serve.core.events import DrainStarted, TenantsChanged
from serve.core.types import TenantRules
from serve.errors import ConfigError, NotReady, ServeError
from serve.estimate.estimator import ModelEstimator
from serve.graphs.shared_column import RowSource
from serve.graphs.typed_updates import TypedChange
from serve.graphs.updates import Change
from serve.models.cache import CalibrationCache
from serve.obs.journal import JournalWriter
from serve.obs.record import RequestRecord
from serve.obs.scraped import EngineSnapshot
from serve.server import clock
from serve.server.api import (
    Fanouts,
    GraphInfo,
    InferCall,
    InferResult,
    ModelEstimate,
    ModelInfo,
    Moving,
    Training,
)
from serve.server.assembly import assemble
from serve.server.device import Device
from serve.server.engine_snapshot import take_snapshot
from serve.server.joint_ticket import WaitingTickets
from serve.server.learning.alone import Arrays, Send, call_of
from serve.server.learning.at_start import learn_at_start
from serve.server.learning.beside import DeviceRoom
from serve.server.learning.in_gaps import CalibrationsInGaps
from serve.server.load_turns import LoadCancellation
from serve.server.models_at_start import ModelsAtStart
from serve.server.plain_requests import PlainRequests
from serve.server.ticket import WaitingTicket
from serve.server.version_facts import VersionChange, VersionFacts

#: Upper bound of the server's own requests, as a share of the largest message.
_OWN_SHARE = 0.9
#: Time that new models have to load before the server serves without them.
_PATIENCE_S = 3.0


class Engine:
    """Implements ``api.Inference``."""

    def __init__(
        self,
        config: Config,
        device: Device,
        sink: Callable[[RequestRecord], None],
        cache: CalibrationCache,
        journal: JournalWriter | None = None,
        rows: RowSource | None = None,
    ) -> None:
        parts = assemble(config, device, sink, cache, journal, rows)
        self._config = config
        self._sink = sink
        self._parts = parts
        self.pool = parts.pool
        self.driver = parts.driver
        self._catalogue = parts.catalogue
        self._rollout = parts.rollout
        self._graphs = parts.graphs
        self._intake = parts.intake
        self._records = parts.records
        self.training: Training = parts.trainer
        self.moving: Moving = parts.intake
        #: For a front that stages requests itself.
        self.plain = PlainRequests(
            parts.catalogue,
            parts.intake,
            parts.driver,
            parts.shared,
            self._admit,
            check_finite=config.server.reject_nonfinite,
        )
        #: Client id of the server's own requests, which are let in before it serves.
        self._own_id = secrets.token_hex()
        self._device = device
        self._starting = ModelsAtStart(
            parts.catalogue, parts.rollout, lambda: parts.pool.calibrators.interrupted
        )
        timed = parts.rollout.calibrations
        self._in_gaps = CalibrationsInGaps(
            lambda: parts.catalogue.entries, self._idle_s, timed.why_due, timed.complete
        )
        self._leaving = self._draining = self._stopped = False

    # --- life ---------------------------------------------------------------------------

    def start(self, progress: Callable[[str, float], None] | None = None) -> None:
        """Start lanes and load models; `open` comes next.

        New models that take long to calibrate load while the server serves, see ``ModelsAtStart``.
        Raises NotReady when a lane does not start in time or no model can be served.
        """
        names = self._catalogue.names_to_load(self._config.models.load)
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
        self._parts.lane_folders.start()
        self._rollout.lane_models.watch.start()
        # On a GPU a calibrator needs memory that requests have by then.
        self._rollout.calibrations.starts_rough = not self._device.places
        self._starting.load(names, _PATIENCE_S, tell)
        if names and not self._catalogue.entries:
            raise NotReady(f"none of {len(names)} models can be served; see the log")
        for entry in self._catalogue.entries:
            self._parts.node_requests.warm(entry)
        self._parts.tables.offer()

    def open(
        self, progress: Callable[[str, float], None] | None = None, send: Send | None = None
    ) -> None:
        """Time requests of the server's own, then take those of clients.

        `send` sends a request through the transport; by default it goes straight to the engine.
        """
        send = send or self._send

        def ask(model: str, tensors: Arrays) -> RequestRecord:
            send(model, tensors, self._own_id)
            assert self._records.own_record is not None
            return self._records.own_record

        first, *others = self.driver.scheduler.devices
        learn_at_start(
            self._catalogue,
            ask,
            self._intake.submit,
            DeviceRoom(first.params.device.slots, first.budget_bytes, 1 + len(others)),
            largest_bytes=int(_OWN_SHARE * self._config.server.max_message_bytes),
            progress=progress or (lambda step, fraction: None),
        )
        self._records.serving = True
        self._rollout.lane_models.in_service = True
        self.pool.calibrators.niceness = self._config.device.lane_niceness
        self._starting.go_on()
        self._in_gaps.start()
        self._parts.trainer.start()

    def wait_loaded(self) -> None:
        """Wait until each model has loaded or has failed to; raises NotReady when told to stop."""
        self._starting.wait()

    def load_offline(
        self, name: str, progress: Callable[[str, float], None], *, with_graphs: bool = False
    ) -> None:
        """Read and calibrate one model without lanes, to estimate its requests but not run them."""
        if with_graphs:
            self._graphs.open(progress)
        self._rollout.load(name, progress)

    def estimator(self, name: str) -> ModelEstimator:
        """Return the estimator of the version that answers most requests."""
        return self._catalogue.get(name).estimator

    def interrupt(self) -> None:
        """End a start, a load or a calibration that is under way soon, even if it hangs."""
        self._in_gaps.begin_stop()
        self._parts.interrupt()
        self._starting.interrupt()

    def announce_drain(self) -> bool:
        """Be ready no more, and go on serving; return whether it served."""
        serving, self._leaving = self.serving, True
        return serving

    def begin_drain(self) -> int:
        """Refuse new requests from now on; return the number of unanswered ones."""
        self._draining = True
        self.driver.handle(DrainStarted())
        return len(self.driver.requests.tickets())

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until all accepted requests are answered; return False when time runs out."""
        return self.driver.wait_drained(timeout_s)

    def stop(self) -> None:
        """Cancel requests that still wait and end every lane. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._records.serving = False
        self.interrupt()
        self._starting.close()
        self._in_gaps.stop()
        self._parts.begin_stop()
        self.driver.stop()
        self._parts.shadows.stop()
        self._rollout.lane_models.watch.stop()
        self._parts.lane_folders.stop()
        self.pool.stop()
        self._rollout.close()
        self._parts.shared.close()

    def limit_tenants(self, rules: tuple[TenantRules, ...]) -> None:
        """Replace weights and limits of tenants."""
        self.driver.handle(TenantsChanged(rules))

    def take(self, config: Config) -> None:
        """Take the new values of a configuration that differs in reloadable keys only."""
        self._config = config
        self._parts.take(config)

    # --- api.Inference --------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """See ``api.Inference``."""
        leaves = self._leaving or self._draining
        return self._records.serving and not leaves and self.driver.lanes_able > 0

    @property
    def ready(self) -> bool:
        """See ``api.Inference``."""
        loads = self._config.server.ready_when != "any" and not self._starting.done
        return self.serving and not loads and self._graphs.in_step

    @property
    def live(self) -> bool:
        """See ``api.Inference``."""
        return self.driver.alive

    def submit(self, call: InferCall) -> WaitingTicket:
        """See ``api.Inference``."""
        self._admit(call)
        return self._intake.submit(call)

    def answered(self, call: InferCall, result: InferResult) -> None:
        """See ``api.Inference``."""
        self._parts.shadows.answered(call, result)

    def submit_jointly(self, calls: Sequence[InferCall]) -> WaitingTickets:
        """See ``api.Inference``."""
        for call in calls:
            self._admit(call)
        return self._intake.submit_jointly(calls)

    def refused(
        self, model: str, version: str, client_id: str, arrived_ns: int, error: ServeError,
        trace_parent: str = "",
    ) -> None:  # fmt: skip
        """See ``api.Inference``."""
        if client_id != self._own_id:
            record = self._intake.refusal(model, version, client_id, arrived_ns, error)
            self._sink(msgspec.structs.replace(record, trace_parent=trace_parent))

    def models(self) -> tuple[ModelInfo, ...]:
        """See ``api.Inference``."""
        return self._parts.infos.all()

    def served(self) -> tuple[ModelInfo, ...]:
        """See ``api.Inference``."""
        return tuple(self._parts.infos.of(entry) for entry in self._catalogue.entries)

    def model(self, name: str, version: str = "", request_id: str | None = None) -> ModelInfo:
        """See ``api.Inference``."""
        return self._parts.infos.of(self._catalogue.get(name, version, request_id))

    def versions(self, name: str = "") -> tuple[VersionFacts, ...]:
        """See ``api.Inference``."""
        return self._parts.versions.facts(name)

    def change_versions(self, name: str, change: VersionChange) -> VersionFacts:
        """See ``api.Inference``."""
        return self._parts.versions.change(name, change)

    def load(self, name: str, cancellation: LoadCancellation | None = None) -> None:
        """See ``api.Inference``."""
        try:
            self._rollout.load(name, cancellation=cancellation)
        except ConfigError as error:
            raise NotReady(f"model '{name}' cannot be loaded: {error}") from error

    def unload(self, name: str, cancellation: LoadCancellation | None = None) -> None:
        """See ``api.Inference``."""
        keys = [entry.key for entry in self._catalogue.entries if entry.spec.name == name]
        self._rollout.unload(name, cancellation)
        for key in keys:
            self.driver.unloaded(key)

    def estimate(self, name: str, version: str, num_nodes: int, num_edges: int) -> ModelEstimate:
        """See ``api.Inference``."""
        return self._parts.estimates.of_graph(name, version, num_nodes, num_edges)

    def estimate_sample(
        self,
        name: str,
        version: str,
        graph: str,
        num_ids: int,
        fanouts: Fanouts | None = None,
        node_type: str | None = None,
    ) -> ModelEstimate:
        """See ``api.Inference``."""
        return self._parts.estimates.of_sample(name, version, graph, num_ids, fanouts, node_type)

    def graphs(self, name: str = "") -> tuple[GraphInfo, ...]:
        """See ``api.Inference``."""
        return self._graphs.infos(name)

    def update_graph(
        self, name: str, change: Change | TypedChange, if_version: int | None
    ) -> GraphInfo:
        """See ``api.Inference``."""
        return self._graphs.update(name, change, if_version)

    # --- what was learned, and how it stands --------------------------------------------

    def learn(self, record: RequestRecord) -> None:
        """Correct the estimates by an answered request; for the sink's thread."""
        self.driver.learn()
        if not record.graph:
            self._parts.learner.observe_solo(record)
        elif self._graphs.tables.reconsider(record.graph):
            self._parts.tables.offer()

    def snapshot(self, rows_dropped: int = 0) -> EngineSnapshot:
        """Return the state now, for metrics; the report's lost rows are the caller's."""
        return take_snapshot(self._parts, rows_dropped)

    def _idle_s(self) -> float:
        """Return for how long there has been no request, in seconds; 0 while there is one."""
        since_ns = self.driver.requests.idle_since_ns
        return 0.0 if since_ns is None else (clock.now_ns() - since_ns) / 1e9

    def _admit(self, call: InferCall) -> None:
        if not self._records.serving and call.client_id != self._own_id:
            raise NotReady("the server is starting or has stopped")

    def _send(self, model: str, tensors: Arrays, own_id: str) -> None:
        self.submit(call_of(model, tensors, own_id)).result()
