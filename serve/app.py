"""The server put together: a configuration in, a process that serves until told to stop out."""

import ctypes
import gc
import logging
import os
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec

import serve
from serve.config import Config
from serve.core.disciplines import get_discipline
from serve.core.policies import get_policy
from serve.core.types import Estimate
from serve.errors import ConfigError, ServeError
from serve.estimate.estimator import ModelEstimator
from serve.graphs.pool import GraphPool
from serve.journal import decode
from serve.models.cache import CalibrationCache
from serve.models.model_signature import PACKAGED, compiler
from serve.models.repository import BrokenModel, scan
from serve.obs.http import HttpPort
from serve.obs.journal import JournalWriter
from serve.obs.metrics import Metrics, PortSnapshot
from serve.obs.offline import make_report
from serve.obs.record import ServerRun
from serve.obs.sink import RecordSink
from serve.obs.store import RecordStore
from serve.rpc.parameters import parse_fanouts
from serve.rpc.server import GrpcServer
from serve.server import clock
from serve.server.api import ModelEstimate
from serve.server.device import Device, find_device
from serve.server.engine import Engine
from serve.server.lanes.processes import allocator_facts, kill_all
from serve.server.signals import StopSignals
from serve.sim.engine import simulate
from serve.sim.replay import budget_of, first_difference, recorded
from serve.sim.report import SimReport
from serve.sim.workload import BASELINES, make_system, mean_solo_ns, offered
from serve.workload import PoolSpec, TraceHeader, build_trace, rate_for_rho, workload_tasks

_log = logging.getLogger(__name__)

#: Threads hand over the interpreter lock this often while two compete for it. Python's 5 ms is
#: as long as many requests take.
_SWITCH_INTERVAL_S = 0.0002
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

Progress = Callable[[str, float], None]


class Application:
    """Everything one `gnnserve serve` runs."""

    _engine: Engine

    def __init__(self, config: Config, device: Device | None = None) -> None:
        """Put the parts together; raises ConfigError when a file or a port cannot be had.

        `device`: None for the one the configuration asks for.
        """
        server, scheduling = config.server, config.scheduling
        device = device or device_of(config)
        database = config.path(config.report.database)
        run = ServerRun(
            started_unix_ns=clock.wall_ns(),
            version=serve.__version__,
            device=device.title,
            lanes=device.parallelism * device.count,
            budget_bytes=device.budget_bytes * device.count,
            policy=scheduling.policy,
            discipline=scheduling.discipline,
            window=scheduling.window,
            qos_factor=scheduling.qos_factor,
            pid=os.getpid(),
        )
        self._drain_timeout_s = server.drain_timeout_s
        self._host_cores = device.host_cores
        self._signals = StopSignals(
            lambda: self._engine.interrupt(),
            server.drain_timeout_s + server.stop_timeout_s,
            self._left,
            kill_all,
        )
        with ExitStack() as undo:
            metrics = Metrics(run, lambda: self._engine.snapshot(sink.dropped))
            observers = metrics.observe, lambda record: self._engine.learn(record)
            sink: RecordSink = RecordSink(RecordStore(database, run), observers)
            undo.callback(sink.close)
            journal = None
            if config.report.journal is not None:
                journal = JournalWriter(config.path(config.report.journal))
                undo.callback(journal.close)
            cache = calibration_cache(config, device)
            self._engine = Engine(config, device, sink.put, cache, journal)
            undo.callback(self._engine.stop)
            http = HttpPort(
                server.host,
                server.http_port,
                live=lambda: self._engine.live and self._rpc.answers,
                ready=lambda: self._engine.ready and self._rpc.answers,
                metrics=metrics.text,
                database=database,
            )
            undo.callback(http.stop)
            self._http = http
            self._rpc = GrpcServer(
                self._engine,
                lambda: msgspec.structs.replace(
                    run, budget_bytes=self._engine.snapshot().budget_bytes
                ),
                lambda since_s: msgspec.json.decode(make_report(database, "json", since_s)),
                host=server.host,
                port=server.grpc_port,
                max_message_bytes=server.max_message_bytes,
                max_queue=server.max_queue,
                receive_timeout_s=server.receive_timeout_s,
                shared_memory=server.offers_shared_memory,
            )
            metrics.show_port(
                lambda: PortSnapshot(answers=self._rpc.answers, refused=self._rpc.refused)
            )
            #: Undoes all of the above, in reverse.
            self._close = undo.pop_all().close

    def run(self, ready: Callable[[int, int], None], progress: Progress) -> None:
        """Serve until told to stop by a signal, then answer what was accepted and end.

        Calls `ready(grpc_port, http_port)` once warmed up. A second signal ends at once; so does
        the process, with exit code 1, when it has not ended some time after the first.
        """
        self._signals.listen()
        tune_process()
        try:
            self._start(ready, progress)
            self._signals.wait()
        except ServeError as error:
            if not self._signals.told:
                raise
            _log.info("the start was interrupted: %s", error)
        finally:
            self._shut_down()

    def _start(self, ready: Callable[[int, int], None], progress: Progress) -> None:
        port = self._rpc.start()
        self._http.start()
        self._engine.start(progress)
        # What lives now lives as long as the server: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        keep_threads_to(self._host_cores)
        with self._rpc.own_requests() as send:
            self._engine.open(progress, send)
        if not self._signals.told:
            _log.info("serving: gRPC on port %d, HTTP on port %d", port, self._http.port)
            ready(port, self._http.port)

    def _shut_down(self) -> None:
        self._signals.stop_by_itself()
        waiting = self._engine.begin_drain()
        _log.info("draining: %d accepted requests are being finished", waiting)
        given_up = self._rpc.stop(self._drain_timeout_s)
        self._close()
        _log.info("stopped; %d requests were given up on", given_up)

    def _left(self) -> str:
        """What a stop that takes too long has not done."""
        threads = ", ".join(sorted({thread.name for thread in threading.enumerate()}))
        return (
            f"requests in flight: {self._rpc.in_flight}; processes of lanes: "
            f"{sorted(set(self._engine.pool.pids().values()))}; threads: {threads}"
        )


def device_of(config: Config) -> Device:
    """The device of the configuration, with lanes to spare where tasks are suspended."""
    suspends = get_discipline(config.scheduling.discipline).suspends
    return find_device(config.device, spare_lanes=suspends)


def calibration_cache(config: Config, device: Device) -> CalibrationCache:
    """Where calibrations of this configuration are kept."""
    folder, budget_s = config.cache_path(), config.models.calibration_s
    limit_bytes = config.models.cache_limit_bytes
    if device.places:
        return CalibrationCache(
            folder, budget_s=budget_s, device=device.name, limit_bytes=limit_bytes
        )
    executor, compiles = config.models.executor, config.models.compile

    def cache(*, compiles: bool) -> CalibrationCache:
        return CalibrationCache(
            folder,
            executor=executor,
            compiles=compiles,
            budget_s=budget_s,
            allocator=allocator_facts(device.keep_bytes),
            limit_bytes=limit_bytes,
        )

    if executor != "auto" or compiles != "background":
        return cache(compiles=executor in PACKAGED or (executor == "auto" and compiles is True))
    found = cache(compiles=False)
    if shutil.which(compiler()) is None:
        _log.info("models are not compiled: there is no %s (models.compile)", compiler())
    else:
        found.later = cache(compiles=True)
    return found


@contextmanager
def _offline(config: Config, device: Device) -> Iterator[Engine]:
    """An engine without lanes, which can estimate and not run; calibrates what is not cached."""
    engine = Engine(config, device, lambda _: None, calibration_cache(config, device))
    try:
        yield engine
    finally:
        engine.stop()


def estimate_offline(
    config: Config, model: str, num_nodes: int, num_edges: int, progress: Progress
) -> ModelEstimate:
    """The estimate a server of this configuration would make."""
    with _offline(config, device_of(config)) as engine:
        engine.load_offline(model, progress)
        return engine.estimate(model, "", num_nodes, num_edges)


def estimate_sample_offline(
    config: Config, model: str, graph: str, num_ids: int, fanouts: str | None, progress: Progress
) -> ModelEstimate:
    """The same for a request by so many node ids; `fanouts` as in such a request."""
    held = [one for one in config.graph if one.name == graph]
    if not held:
        names = ", ".join(one.name for one in config.graph) or "none"
        raise ConfigError(f"--graph: '{graph}' is not in the configuration, which has: {names}")
    alone = msgspec.structs.replace(config, graph=tuple(held))
    with _offline(alone, device_of(config)) as engine:
        engine.load_offline(model, progress, with_graphs=True)
        return engine.estimate_sample(model, "", graph, num_ids, parse_fanouts(fanouts))


def offline_estimators(
    config: Config, device: Device, names: Iterable[str], progress: Progress
) -> dict[str, ModelEstimator]:
    """Estimators of these models without a server."""
    with _offline(config, device) as engine:
        found = {}
        for name in names:
            engine.load_offline(name, progress)
            found[name] = engine.estimator(name)
        return found


def _servable(config: Config) -> tuple[str, ...]:
    """Names of the models that a server of this configuration would load; raises ConfigError."""
    wanted = config.models.load
    repository = config.path(config.models.repository)
    names = dict.fromkeys(
        found.name
        for found in scan(repository)
        if not isinstance(found, BrokenModel) and (not wanted or found.name in wanted)
    )
    if not names:
        raise ConfigError(f"models.repository: {repository} has no model to serve")
    return tuple(names)


def simulate_workload(
    config: Config,
    workload: str,
    rho: float,
    *,
    policy: str,
    discipline: str,
    requests: int,
    seed: int,
    devices: int,
    progress: Progress,
) -> SimReport:
    """Serve a workload on a virtual clock, with the times calibrated for `config`'s models.

    By so many devices like this machine's; ρ counts them all. `policy` may also be a baseline's
    name. Raises ConfigError for an unknown one.
    """
    device = device_of(config)
    system = make_system(
        policy,
        discipline,
        cores=device.parallelism,
        budget_bytes=device.budget_bytes,
        devices=devices,
    )
    models = _servable(config)
    tasks = workload_tasks(workload, GraphPool(PoolSpec()).refs, seed, models)
    names = sorted({task.model for task in tasks})
    estimators = offline_estimators(config, device, names, progress)

    def estimator(model: str, num_nodes: int, num_edges: int) -> Estimate:
        return estimators[model].estimate(num_nodes, num_edges)

    shapes = [(task.model, task.graph.num_nodes, task.graph.num_edges) for task in tasks]
    solo_s = mean_solo_ns(shapes, estimator) / 1e9
    header = TraceHeader(
        workload=workload,
        seed=seed,
        rate_hz=rate_for_rho(rho, solo_s, device.parallelism * devices),
        rho=rho,
        mean_solo_s=solo_s,
    )
    progress("simulating", 1.0)
    trace = build_trace(header, tasks, count=requests)
    offers = offered(trace, estimator, config.scheduling.qos_factor)
    return simulate(offers, system.params, system.device)


def replay_journal(
    path: Path, policy: str | None, discipline: str | None
) -> tuple[str, SimReport, str]:
    """Check the journal at `path` for parity and simulate its requests.

    Returns where a scheduler of today answers something else, empty when nowhere; the report of the
    recorded requests under `policy` and `discipline` (None: the recorded ones); and its title.
    Raises ConfigError when there is no such journal or name.
    """
    try:
        with path.open("rb") as lines:
            journal = decode(lines, str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    found = first_difference(journal)
    told = ""
    if found is not None:
        told = (
            f"call {found.index}, {found.event}: recorded {found.recorded.decode()}, "
            f"replayed {found.replayed.decode()}"
        )
    recording = recorded(journal)
    if policy in BASELINES:
        device = journal.params.device
        system = make_system(policy, "rolling", cores=device.slots, budget_bytes=1)
        chosen = system.params
        device_model = replace(recording.device, slowdown=system.device.slowdown)
    else:
        chosen = replace(
            journal.params,
            policy=policy or journal.params.policy,
            discipline=discipline or journal.params.discipline,
        )
        get_policy(chosen.policy)
        get_discipline(chosen.discipline)
        device_model = recording.device
        first, *more = (
            replace(d, budget_bytes=budget_of(journal), slowdown=device_model.slowdown)
            for d in chosen.devices
        )
        chosen = replace(chosen, device=first, more_devices=tuple(more))
    late = recording.late / len(recording.requests)
    title = f"{path.name}, {late:.2%} late when recorded: {policy or chosen.policy}"
    report = simulate(recording.requests, chosen, device_model)
    return told, report, f"{title}/{chosen.discipline}"


def keep_threads_to(cores: tuple[int, ...]) -> None:
    """Pin this process's threads, and those they start, to `cores`; none: leave them as they are.

    They hand a request from one to the next and hold one interpreter lock. On one core that is a
    switch; between cores each step wakes an idle core and moves the lock's cache lines
    (docs/measurements/host.md). The main thread, which only waits for signals, keeps all cores: it
    stands for the process where that is asked what it may use.
    """
    if not cores:
        return
    for thread_id in map(int, os.listdir("/proc/self/task")):
        if thread_id != os.getpid():
            # It may have ended meanwhile.
            with suppress(OSError):
                os.sched_setaffinity(thread_id, cores)


def tune_process() -> None:
    """Settings of the serving process that no library sets by itself."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # Connections, regions and lanes are open files. The soft limit is low for the sake of programs
    # that use select(), which none of these do.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    # Keep freed message buffers: handing their pages back and faulting them in again costs more
    # than copying what they hold. Does nothing where the C library has no mallopt.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)
