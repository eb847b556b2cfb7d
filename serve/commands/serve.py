"""`gnnserve serve`: the server process, from its configuration until it has drained."""

import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
from rich.text import Text

import serve
from serve.access.certificates import Certificates
from serve.access.front_stamps import FrontStamps, read_key
from serve.access.watching import FileWatcher, WatchedFiles
from serve.commands.configured import (
    access_settings,
    calibration_cache,
    certificate_files,
    device_of,
    tenant_rules,
)
from serve.commands.reload import ConfigReload
from serve.commands.rescan import rescan_of
from serve.commands.service_manager import ServiceManager
from serve.config import Config, ServerConfig
from serve.errors import ConfigError, ServeError
from serve.obs.access_log import AccessLog
from serve.obs.http import HttpPort, listening_socket, private_socket
from serve.obs.journal import JournalWriter
from serve.obs.live.tally import ServerState
from serve.obs.log import change_logging
from serve.obs.lost_calls import LostCalls
from serve.obs.metrics import Metrics
from serve.obs.offline import make_report
from serve.obs.ownership import DatabaseOwner
from serve.obs.payload_recorder import PayloadRecorder
from serve.obs.record import ServerRun
from serve.obs.recorder import TrafficRecorder
from serve.obs.retention import Retention
from serve.obs.scraped import PortSnapshot
from serve.obs.selection import last
from serve.obs.sink import RecordSink
from serve.obs.store import RecordStore
from serve.payloads import beside
from serve.progress import Progress
from serve.rest.process import GatewayProcess, missing_packages
from serve.rpc.server import GrpcServer
from serve.server import clock
from serve.server.device import Device
from serve.server.engine import Engine
from serve.server.heap import HeapTrimmer
from serve.server.lanes.processes import kill_all, log_printed
from serve.server.printed_lines import PrintedLines
from serve.server.signals import StopSignals
from serve.server.tracing.sender import TraceSender
from serve.server.training.job_facts import shown_jobs

if TYPE_CHECKING:
    from serve.cluster.forwarding import OtherServers
    from serve.cluster.shared_rows import SharedRows

_log = logging.getLogger(__name__)


class Application:
    """One server: the engine, its gRPC and HTTP ports, the report and the handling of signals."""

    _engine: Engine

    def __init__(
        self,
        config: Config,
        device: Device | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        read_again: Callable[[], Config] | None = None,
    ) -> None:
        """Build every part; raises ConfigError for a file or port that cannot be used.

        Args:
            config: What to serve, and how.
            device: Replaces the configured device.
            environment: By it a service manager is found, and the level of the log.
            read_again: Reads the configuration at SIGHUP, raises ConfigError; None: it stays.
        """
        server, scheduling = config.server, config.scheduling
        device = device or device_of(config)
        database = config.path(config.report.database)
        access = access_settings(config)
        callers = access.callers()
        files = certificate_files(config)
        certificates = None if files is None else Certificates(files)
        run = ServerRun(
            started_unix_ns=clock.wall_ns(),
            version=serve.__version__,
            device=device.title,
            lanes=device.parallelism * device.count,
            lanes_started=len(device.lane_cores) * device.count,
            budget_bytes=device.budget_bytes * device.count,
            policy=scheduling.policy,
            discipline=scheduling.discipline,
            window=scheduling.window,
            qos_factor=scheduling.qos_factor,
            pid=os.getpid(),
        )
        self._server = server
        self._log_level = environment.get("GNNSERVE_LOG", "").upper()
        self._config_reload = ConfigReload(config, read_again or (lambda: config), self._take)
        self._rescan = rescan_of(config, lambda *told: self._engine.load(*told))
        self._manager = ServiceManager(environment, lambda: self._live)
        self._signals = StopSignals(
            lambda: self._engine.interrupt(),
            _stop_limit_s(server),
            self._left,
            kill_all,
            self._reload,
        )
        self._run = run
        with ExitStack() as undo:
            #: Reads what the server's processes print.
            self.printed = PrintedLines()
            undo.callback(self.printed.close)
            log_printed(self.printed)
            undo.callback(log_printed, None)
            metrics = Metrics(run, lambda: self._engine.snapshot(sink.dropped))
            observers = [metrics.observe, lambda record: self._engine.learn(record)]
            flushes: list[Callable[[], None]] = []
            self._access_log: AccessLog | None = None
            if config.report.access_log is not None:
                path = config.path(config.report.access_log)
                self._access_log = AccessLog(path, config.report.access_log_share)
                undo.callback(self._access_log.close)
                observers.append(self._access_log.write)
                flushes.append(self._access_log.flush)
            if config.report.record is not None:
                recorder = TrafficRecorder(
                    config.path(config.report.record),
                    config.report.record_share,
                    config.report.record_bytes,
                    run.started_unix_ns,
                )
                undo.callback(recorder.close)
                observers.append(recorder.write)
            self._payloads: PayloadRecorder | None = None
            if config.report.record is not None and config.report.record_payloads:
                self._payloads = PayloadRecorder(
                    beside(config.path(config.report.record)),
                    config.report.record_share,
                    config.report.record_payloads_bytes,
                    config.report.record_redacted,
                )
                undo.callback(self._payloads.close)
            tracer: TraceSender | None = None
            if config.traces.endpoint is not None:
                endpoint, share = config.traces.endpoint, config.traces.share
                tracer = TraceSender(endpoint, share, serve.__version__, self.printed)
                undo.callback(tracer.close)
                observers.append(tracer.observe)
            self._tracer = tracer
            undo.callback(DatabaseOwner(database).close)
            store = RecordStore(database, run, retention=_retention(config))
            self._sink = sink = RecordSink(store, observers, flushes=flushes)
            undo.callback(sink.close)
            journal = None
            if config.report.journal is not None:
                journal = JournalWriter(
                    config.path(config.report.journal), config.report.journal_bytes
                )
                undo.callback(journal.close)
            cache = calibration_cache(config, device)
            rows = _shared_rows(config)
            if rows is not None:
                undo.callback(rows.close)
            self._engine = Engine(config, device, sink.put, cache, journal, rows)
            undo.callback(self._engine.stop)
            listener = listening_socket(server.host, server.http_port)
            undo.callback(listener.close)
            self.http_port: int = listener.getsockname()[1]
            self._gateway: GatewayProcess | None = None
            if _offers_rest(server):
                private_name, private = private_socket()
                self._gateway = GatewayProcess(
                    listener,
                    private_name,
                    max_message_bytes=server.max_message_bytes,
                    receive_timeout_s=server.receive_timeout_s,
                    # The rest of a stop takes time too.
                    stop_s=server.stop_timeout_s / 2,
                    access=access,
                    certificates=files,
                    inside=callers.inside,
                    database=database,
                )
                self._gateway.printed = self.printed
                listener = private
            http = HttpPort(
                listener,
                live=lambda: self._live,
                ready=lambda: self._engine.ready and self._rpc.answers,
                metrics=metrics.text,
                database=database,
                callers=callers if self._gateway is None else None,
                certificates=certificates if self._gateway is None else None,
            )
            undo.callback(http.stop)
            if self._gateway is not None:
                undo.callback(self._gateway.stop)
            undo.callback(self._manager.close)
            self._http = http
            self._rpc = GrpcServer(
                self._engine,
                lambda: msgspec.structs.replace(
                    self._run, budget_bytes=self._engine.snapshot().budget_bytes
                ),
                lambda since_s: msgspec.json.decode(make_report(database, "json", last(since_s))),
                _with_socket_path(config),
                self._engine.plain,
                callers,
                certificates,
            )
            self._callers = callers
            stamps = _front_stamps(config)
            if stamps is not None:
                self._rpc.believe(stamps)
            elsewhere = _elsewhere(config, self._engine, stamps)
            if elsewhere is not None:
                undo.callback(elsewhere.close)
                self._engine.moving.moves = elsewhere.better
                self._rpc.pass_on(elsewhere)
            self._watched = [*callers.watched, *_watched_servers(elsewhere, rows)]
            if certificates is not None:
                self._watched.append(certificates.watched)
            watcher = FileWatcher(*self._watched)
            watcher.start()
            undo.callback(watcher.stop)
            trimmer = HeapTrimmer()
            trimmer.start()
            undo.callback(trimmer.stop)
            metrics.show_port(
                lambda: PortSnapshot(
                    answers=self._rpc.answers,
                    inside=self._rpc.in_flight,
                    own_calls=self._rpc.own_calls,
                    refused=self._rpc.refused,
                    front=self._rpc.front,
                    ways=self._rpc.ways,
                    passed_on=None if elsewhere is None else elsewhere.counts,
                    rows=None if rows is None else rows.told(),
                    rest_restarts=None if self._gateway is None else self._gateway.restarts,
                    lines_left_out=self.printed.left_out,
                    traces=None if tracer is None else tracer.totals,
                )
            )
            sink.watch_state(self._live_state)
            sink.watch_jobs(lambda: shown_jobs(self._engine.training.jobs()))
            sink.count_lost(LostCalls(lambda: self._rpc.refused).records)
            #: Stops all of the above, in reverse order.
            self._close = undo.pop_all().close

    def run(self, ready: Callable[[int, int], None], progress: Progress) -> None:
        """Serve until a signal asks to stop; then answer the accepted requests and return.

        Calls `ready(grpc_port, http_port)` once warmed up. A second signal ends the process at
        once. The process also ends, with exit code 1, when it is still running `drain_timeout_s`
        and `stop_timeout_s` after the first.
        """
        self._signals.listen()
        try:
            self._start(ready, self._manager.watch(progress))
            self._signals.wait()
        except ServeError as error:
            if not self._signals.stop_requested:
                raise
            _log.info("the start was interrupted: %s", error)
        finally:
            self._shut_down()

    def _start(self, ready: Callable[[int, int], None], progress: Progress) -> None:
        port = self._rpc.start()
        self._http.start()
        if self._gateway is not None:
            self._gateway.start(self._rpc.own_address)
        self._rescan.look()
        self._engine.start(progress)
        self._callers.on_change(
            lambda tenants: self._engine.limit_tenants(tuple(map(tenant_rules, tenants)))
        )
        # These objects live as long as the server: the collector need not visit them again.
        gc.collect()
        gc.freeze()
        with self._rpc.own_requests() as send:
            self._engine.open(progress, send)
            if self._payloads is not None:
                self._engine.plain.record_payloads(self._payloads)
        if self._gateway is not None:
            self._gateway.wait_serving(self._server.start_timeout_s)
        if not self._engine.ready:
            self._engine.wait_loaded()
        if not self._signals.stop_requested:
            where = f"gRPC on port {port}, HTTP on port {self.http_port}"
            _log.info("serving: %s", where)
            self._manager.ready(where)
            ready(port, self.http_port)
            self._rescan.watch()

    def _shut_down(self) -> None:
        self._signals.stop_by_itself()
        self._rescan.stop()
        delay_s = self._server.shutdown_delay_s
        if self._engine.announce_drain() and delay_s:
            delay = f"ready no more, and serving for {delay_s:g} s"
            self._manager.stopping(delay)
            _log.info("stopping: %s", delay)
            time.sleep(delay_s)
        waiting = self._engine.begin_drain()
        self._manager.stopping(f"{waiting} accepted requests are being finished")
        _log.info("draining: %d accepted requests are being finished", waiting)
        given_up = self._rpc.stop(self._server.drain_timeout_s)
        self._close()
        _log.info("stopped; %d requests were given up on", given_up)

    def _reload(self) -> None:
        """Read configuration, tokens and certificates again, and load models that changed."""
        with self._manager.reloading():
            for files in self._watched:
                files.read()
            self._config_reload.again()
            if self._engine.serving:
                self._rescan.begin()

    def _take(self, config: Config) -> None:
        """Put a configuration into force that differs in reloadable keys only."""
        change_logging(config.log.format, self._log_level or config.log.level)
        self._server = server = config.server
        if not self._signals.stop_requested:
            self._signals.limit_s = _stop_limit_s(server)
        self._engine.take(config)
        self._rpc.accept(server.max_queue)
        if self._gateway is not None:
            self._gateway.stop_s = server.stop_timeout_s / 2
        if self._access_log is not None:
            self._access_log.share = config.report.access_log_share
        if self._tracer is not None:
            self._tracer.share = config.traces.share
        self._run = msgspec.structs.replace(self._run, qos_factor=config.scheduling.qos_factor)
        self._sink.change(lambda store: store.keep(_retention(config)))
        self._sink.change(lambda store: store.tell_target(config.scheduling.qos_factor))

    @property
    def _live(self) -> bool:
        """False when the server should be restarted."""
        return self._engine.live and self._rpc.answers

    def _live_state(self) -> ServerState | None:
        """Return what the live page shows of the state; None before the server is live."""
        return self._engine.driver.state() if self._engine.live else None

    def _left(self) -> str:
        """Describe what a stop that takes too long has not finished."""
        threads = ", ".join(sorted({thread.name for thread in threading.enumerate()}))
        return (
            f"requests in flight: {self._rpc.in_flight}; processes of lanes: "
            f"{sorted(set(self._engine.pool.pids().values()))}; threads: {threads}"
        )


@contextmanager
def spare_stdout(printed: PrintedLines) -> Iterator[Callable[[], None]]:
    """Send what this process prints to the log, and yield what says `ready` on standard output.

    Processes that it starts meanwhile print to the log too. The first fork server was started
    before, and prints to standard error.
    """
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as stdout:
        pipes = printed.open("server")
        os.dup2(pipes[0], 1)
        for pipe in pipes:
            os.close(pipe)
        try:
            yield lambda: print("ready", file=stdout, flush=True)
        finally:
            sys.stdout.flush()
            os.dup2(stdout.fileno(), 1)


def addresses(host: str, grpc_port: int, http_port: int) -> Text:
    """Return the line that tells a person where the server listens."""
    return Text.assemble(
        "gRPC on ",
        (f"{host}:{grpc_port}", "bold"),
        ", HTTP on ",
        (f"http://{host}:{http_port}/", "bold"),
        "; press Ctrl-C to drain and stop",
    )


def _with_socket_path(config: Config) -> ServerConfig:
    """Return the section `[server]` with the admin socket's path from the file's folder."""
    server = config.server
    if server.admin_socket is None:
        return server
    return msgspec.structs.replace(server, admin_socket=str(config.path(server.admin_socket)))


def _front_stamps(config: Config) -> FrontStamps | None:
    """Return what believes the front; None where there is none. Raises ConfigError."""
    file = config.cluster.front_key_file
    return None if file is None else FrontStamps(read_key(config.path(file)))


def _elsewhere(config: Config, engine: Engine, stamps: FrontStamps | None) -> "OtherServers | None":
    """Return what passes requests on to other servers; None where none are to be known."""
    if config.cluster.servers_file is None:
        return None
    from serve.cluster.forwarding import OtherServers

    server = config.server
    return OtherServers(
        config.cluster.name or f"{socket.gethostname()}:{server.grpc_port or os.getpid()}",
        lambda: engine.moving.room,
        config.path(config.cluster.servers_file),
        server.max_message_bytes,
        stamps,
    )


def _watched_servers(*known: "OtherServers | SharedRows | None") -> list[WatchedFiles]:
    """Return the files that tell of other servers, read anew: a start takes long."""
    watched = [WatchedFiles((one.file,), one.reload) for one in known if one is not None]
    for files in watched:
        files.read()
    return watched


def _shared_rows(config: Config) -> "SharedRows | None":
    """Return what gives features to other servers and gets theirs; None where none are shared out.

    Raises ConfigError.
    """
    rows = config.cluster.rows
    if rows.listen is None or not config.shares_graphs:
        return None
    if rows.servers_file is None:
        raise ConfigError(
            "cluster.rows.servers_file is missing, which names the servers of all parts"
        )
    try:
        from serve.cluster.shared_rows import SharedRows
    except ImportError:
        raise ConfigError(
            "cluster.rows: pyzmq is not installed: pip install 'gnnserve[cluster]'"
        ) from None
    key_file = None if rows.key_file is None else config.path(rows.key_file)
    servers_file = config.path(rows.servers_file)
    found = SharedRows(rows.part, rows.listen, servers_file, key_file, rows.patience_ms)
    try:
        found.order_changes(rows.address or rows.listen, config.path(rows.log), rows.log_bytes)
    except ConfigError:
        found.close()
        raise
    return found


def _stop_limit_s(server: ServerConfig) -> float:
    """Return the time from a signal to stop until the process ends by force."""
    return server.shutdown_delay_s + server.drain_timeout_s + server.stop_timeout_s


def _retention(config: Config) -> Retention:
    """Return which rows of the report are kept."""
    return Retention(config.report.keep_ns, config.report.max_size_bytes)


def _offers_rest(server: ServerConfig) -> bool:
    """Return `server.rest`, or False when packages are missing, which is logged."""
    if server.rest and (missing := missing_packages()):
        _log.warning(
            "server.rest is off, and the HTTP port has health, metrics and report only: no package "
            "%s; install it with `pip install 'gnnserve[server]'`",
            " and ".join(missing),
        )
        return False
    return server.rest
