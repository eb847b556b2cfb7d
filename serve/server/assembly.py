"""The parts of the engine, made and connected."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from serve.config import Config
from serve.core.events import LimitsChanged
from serve.errors import ConfigError
from serve.graphs.shared_column import RowSource
from serve.ipc.shared_pool import SharedPool
from serve.models.cache import CalibrationCache
from serve.obs.journal import JournalWriter
from serve.obs.record import RequestRecord
from serve.server.budget import TaskBudget
from serve.server.calibrations import RolloutSettings
from serve.server.catalogue import ModelCatalogue
from serve.server.confining import Confining
from serve.server.device import Device
from serve.server.driver import Driver
from serve.server.estimates import Estimates
from serve.server.graphs import GraphStore
from serve.server.intake import Intake
from serve.server.lane_monitor import LaneCallbacks, LaneMonitor
from serve.server.lanes.lane_folders import LaneFolders
from serve.server.lanes.pool import LanePool
from serve.server.learning.learner import Learner
from serve.server.model_info import ModelInfos
from serve.server.node_requests import NodeRequests
from serve.server.report_rows import RecordKeeper, Scheduling
from serve.server.rollout import ModelRollout
from serve.server.scheduling import scheduler_params
from serve.server.shadows import Shadows
from serve.server.table_offers import TableOffers
from serve.server.training.trainer import Trainer
from serve.server.versions import ModelVersions

#: Blocks in the shared pool for each lane, of twice the largest message, as int32 edges are widened
#: to int64.
_STAGED_PER_LANE = 4
#: Memory of a lane's process for what is in no budget: libraries, the models' objects, threads.
_UNPLANNED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of one engine."""

    #: Held for every step of the scheduler; guards estimators and the entries of models as well.
    lock: threading.Lock
    shared: SharedPool
    pool: LanePool
    lane_folders: LaneFolders
    catalogue: ModelCatalogue
    versions: ModelVersions
    rollout: ModelRollout
    infos: ModelInfos
    graphs: GraphStore
    tables: TableOffers
    node_requests: NodeRequests
    estimates: Estimates
    records: RecordKeeper
    learner: Learner
    driver: Driver
    intake: Intake
    shadows: Shadows
    trainer: Trainer

    def interrupt(self) -> None:
        """Have what a start or a load waits for end soon."""
        self.graphs.interrupt()
        self.pool.calibrators.interrupt()
        self.rollout.interrupt()

    def begin_stop(self) -> None:
        """Have what is done beside requests end."""
        self.trainer.stop()
        self.shadows.begin_stop()

    def take(self, config: Config) -> None:
        """Take the new values of a configuration that differs in reloadable keys only."""
        server, scheduling = config.server, config.scheduling
        self.catalogue.qos_factor = scheduling.qos_factor
        self.infos.forget()
        limits = LimitsChanged(server.max_queue, scheduling.shed_late, server.max_run_ns)
        self.driver.handle(limits)


def assemble(
    config: Config,
    device: Device,
    sink: Callable[[RequestRecord], None],
    cache: CalibrationCache,
    journal: JournalWriter | None,
    rows: RowSource | None,
) -> EngineParts:
    """Make all parts; nothing is started. `sink` gets the records of answered requests.

    `rows` has the features of other servers; None where no graph is shared out.
    Raises ConfigError when the device has nothing that training could take.
    """
    if config.training.workers and device.places:
        raise ConfigError("training.workers: jobs train on processors only, this server has a GPU")
    if config.training.memory_bytes >= device.budget_bytes:
        raise ConfigError(
            f"training.memory: {config.training.memory_bytes} bytes leave requests nothing of the"
            f" device's {device.budget_bytes} (device.memory_budget)"
        )
    lock = threading.Lock()
    most_bytes = max(2 * config.server.max_message_bytes, 64 << 20)
    shared = SharedPool(_STAGED_PER_LANE * len(device.lane_cores) * device.count * most_bytes)
    pool = LanePool(
        device.lane_cores,
        shared,
        device.keep_bytes,
        places=device.places,
        niceness=config.device.lane_niceness,
        confinement=Confining(config, device.budget_bytes + device.keep_bytes + _UNPLANNED_BYTES),
    )
    # Lanes of a GPU are not confined.
    pids = dict if device.places else pool.pids
    folders = LaneFolders(pids, pool.kill, config.device.max_lane_files_bytes)
    # Declared here for the callbacks of parts that are made before these.
    rollout: ModelRollout
    infos: ModelInfos
    tables: TableOffers
    driver: Driver

    def graphs_changed() -> None:
        infos.forget()
        if records.serving:
            tables.offer()
        budget.update()

    # Graphs are held by the host, so they count where its memory is the device's.
    graphs_count = not device.places
    graphs = GraphStore(
        config,
        device.budget_bytes if graphs_count else None,
        graphs_changed,
        hot_budget_bytes=device.budget_bytes if device.gathers else 0,
        rows=rows,
    )
    node_requests = NodeRequests(graphs)
    # What jobs may take is no part of what requests may.
    budget = TaskBudget(
        device.budget_bytes - config.training.memory_bytes,
        pool.lane_ids_by_device,
        weights_bytes=lambda: rollout.weights_bytes,
        graphs_bytes=lambda: graphs.tables.hot_bytes + (graphs.held_bytes if graphs_count else 0),
        tell=lambda event: driver.handle(event),
    )
    catalogue = ModelCatalogue(config.path(config.models.repository), config.scheduling.qos_factor)
    versions = ModelVersions(catalogue)
    rollout = ModelRollout(
        catalogue,
        cache,
        pool,
        RolloutSettings(
            executor=config.models.executor,
            calibration_s=config.models.calibration_s,
            start_timeout_s=config.server.start_timeout_s,
            budget_bytes=device.budget_bytes,
        ),
        budget_changed=budget.weights_changed,
        read_rules=versions.read,
        tell=lambda event: driver.handle(event),
        lock=lock,
    )
    estimates = Estimates(
        catalogue,
        node_requests,
        lock,
        lambda: [one.budget_bytes for one in driver.scheduler.devices],
    )
    params = scheduler_params(config, device, pool.lane_ids_by_device, estimates.union)
    per_device = len(params.device.lane_ids)
    scheduling = Scheduling(params.policy, params.discipline, device.names, per_device)
    records = RecordKeeper(scheduling, sink, versions.ended)
    tables = TableOffers(pool, graphs)
    learner = Learner(catalogue, lock, params.device.slowdown)
    callbacks = LaneCallbacks(
        tables=graphs.tables.answered,
        lane_up=lambda lane_id: tables.lane_up(lane_id) if records.serving else None,
        memory_taken=budget.memory_taken,
    )
    monitor = LaneMonitor(pool, catalogue, rollout.lane_models, lock, callbacks)
    trainer = Trainer(
        config.training,
        config.path(config.training.folder),
        catalogue,
        graphs,
        pool.trainers,
        lock,
        tell=lambda event: driver.handle_locked(event),
        load=lambda name: rollout.load(name),
    )
    driver = Driver(
        params, pool, monitor, learner, records, lock=lock, jobs=trainer, journal=journal
    )
    infos = ModelInfos(
        catalogue, graphs_of=graphs.fitting, quarantine_reason=driver.quarantine_reason
    )
    intake = Intake(
        catalogue,
        node_requests,
        shared,
        driver,
        lock=lock,
        check_finite=config.server.reject_nonfinite,
        counts_shared_once=not device.places,
    )

    def tell_when_idle(told: Callable[[], None] | None) -> None:
        driver.requests.on_idle = told

    shadows = Shadows(catalogue.router, intake.run_shadow, tell_when_idle)
    versions.shadow_counts = shadows.counts
    return EngineParts(
        lock=lock,
        shared=shared,
        pool=pool,
        lane_folders=folders,
        catalogue=catalogue,
        versions=versions,
        rollout=rollout,
        infos=infos,
        graphs=graphs,
        tables=tables,
        node_requests=node_requests,
        estimates=estimates,
        records=records,
        learner=learner,
        driver=driver,
        intake=intake,
        shadows=shadows,
        trainer=trainer,
    )
