"""A server of a cluster on its machine: started, or found running, and looked at."""

import hashlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from serve.client.channel import address_of
from serve.client.several import CallWithdrawn
from serve.client.sync_cluster import probe
from serve.client.sync_connection import Channel
from serve.cluster.figures import FigureReader, Figures
from serve.cluster.servers_file import write_servers
from serve.cluster.stores_file import write_stores
from serve.cluster.supervised import Supervised
from serve.config import Config, load_config
from serve.config_cluster import host_port, is_loopback
from serve.config_settings import settings_of
from serve.core.cluster.probing import Probe
from serve.core.cluster.seats import OwnSeat, SeatAsked
from serve.errors import ConfigError, ServeError
from serve.undecodable import UNDECODABLE

_log = logging.getLogger(__name__)

#: Where the files of the servers of a machine are, by name of the cluster; by default in the
#: folder for the user's state.
FOLDER_VARIABLE = "GNNSERVE_CLUSTER_FOLDER"
#: While a server stops, a front still sends it requests until it has looked again.
_LEAST_DELAY_S = 1.0
#: What a stop may take beyond the limits of the configuration.
_STOP_SPARE_S = 5.0
_MESSAGE_BYTES = 1 << 16
_POLL_S = 0.1
#: How often a server that was found is asked before it is given up.
_LOOKS = 10


class ReplicaSpec(msgspec.Struct, frozen=True):
    """What every server of a pool is started with."""

    #: Name of the cluster.
    cluster: str
    #: The configuration file, at this path on every machine.
    config: str
    #: Values in place of those of the file, as `KEY=VALUE`.
    settings: tuple[str, ...] = ()
    #: A server of another generation is not taken over.
    generation: str = ""
    #: How long a server goes on when nobody looks at it.
    lease_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Running:
    """A server that runs, as those who take it over know it."""

    #: `host:port` for gRPC and for HTTP.
    address: str
    http_address: str
    #: Time of its start, Unix ns: a later server at the address has a larger one.
    incarnation: int
    #: Of what it was started with: generation, configuration, settings.
    fingerprint: str
    #: Its part of graphs that are shared out; None where none is.
    seat: OwnSeat | None = None


class ServerLost(ServeError):
    """A server of a cluster has ended or does not answer."""


class Replica:
    """The server of one machine."""

    def __init__(self, spec: ReplicaSpec, host: str, folder: Path | None = None) -> None:
        """Be the server that other machines reach at `host`; raises ConfigError.

        The configuration is read on this machine. Its files are in `folder`, or where those of the
        cluster's server on this machine are.
        """
        self._spec, self._host = spec, host
        self._config = load_config(Path(spec.config), settings_of({}, spec.settings))
        require_reachable(self._config, host)
        self._folder = folder or state_folder(spec.cluster) / "server"
        self._supervised = Supervised(self._folder)
        self._running: Running | None = None
        self._channel: Channel | None = None
        self._reader: FigureReader | None = None
        self._servers_file = self._folder / "servers"
        self._stores_file = self._folder / "stores"
        #: What these files say, where they were written here.
        self._known: dict[Path, object] = {}
        self._seat: OwnSeat | None = None
        self._rows_address = ""

    @property
    def running(self) -> Running | None:
        """What runs, or was to; None before `start`."""
        return self._running

    def start(self, progress: Callable[[], None] = lambda: None) -> None:
        """Return once the server is ready; one that runs is taken over when it is the same.

        Calls `progress` meanwhile. Raises ConfigError with what the server said when it does not
        start.
        """
        if (database := self._database) is not None:
            self._reader = FigureReader(database, int(time.time()))
        running = self._same()
        if running is None or running.seat != self._seat or not self._answers(running):
            self._supervised.end(self.stop_limit_s)
            running = self._launch()
            self._know(running)
        give_up_s = time.monotonic() + self._config.server.start_timeout_s
        while self.look() is not Probe.READY:
            if self._supervised.pid is None:
                raise ConfigError(f"the server did not start: {self._supervised.said().strip()}")
            if time.monotonic() > give_up_s:
                raise ConfigError(
                    f"the server was not ready in time: {self._supervised.said().strip()}"
                )
            progress()
            time.sleep(_POLL_S)

    def look(self) -> Probe:
        """Want the server on, and ask it whether it is ready."""
        self.renew()
        assert self._channel is not None
        try:
            return probe(self._channel)
        except (CallWithdrawn, ValueError):
            return Probe.UNREACHED

    def know(self, servers: Sequence[str], drained: Sequence[str] = ()) -> None:
        """Let the server know all servers of its cluster, to which it may pass requests on.

        Where its file cannot be written, it knows those that it knew; the next call tries again.
        """
        known = list(servers), list(drained)
        self._put(self._servers_file, known, lambda: write_servers(self._servers_file, *known))

    def know_stores(self, stores: Sequence[tuple[str, int]]) -> None:
        """Let the server know the servers of graphs that are shared out, as ``know`` does."""
        if stores:
            self._put(self._stores_file, stores, lambda: write_stores(self._stores_file, stores))

    @property
    def needs_seat(self) -> bool:
        """True when it serves graphs that are shared out: it has to `sit` before it starts."""
        return self._config.shares_graphs

    def seat_asked(self, machine: str) -> SeatAsked:
        """Return what to ask for a seat with, for the server of a machine of that name."""
        rows, running = self._config.cluster.rows, self._same()
        log = self._config.path(rows.log)
        if running is not None and (seat := running.seat) is not None:
            return SeatAsked(machine, seat.address, log.exists(), seat.number)
        if not self._rows_address:
            host, _, port = (rows.listen or "").rpartition(":")
            self._rows_address = host_port(self._host, int(port) or _free_port(host))
        return SeatAsked(machine, self._rows_address, log.exists())

    def sit(self, seat: OwnSeat, stores: Sequence[tuple[str, int]]) -> None:
        """Have the server take that seat among others when it starts."""
        self._seat = seat
        self.know_stores(stores)

    @property
    def seat(self) -> OwnSeat | None:
        """The seat that the server is to have; None where it needs none or has none yet."""
        return self._seat

    def figures(self) -> Figures:
        """Return what the server has done since `start`; nothing where it keeps no report."""
        return Figures() if self._reader is None else self._reader.read(int(time.time()))

    @property
    def _database(self) -> Path | None:
        given = self._config.report.database
        return None if given is None else self._folder / Path(given).name

    def renew(self) -> None:
        """Want the server on for another lease."""
        self._supervised.renew()

    def require_kept(self) -> None:
        """Raise ServerLost when the server has ended for good."""
        if self._supervised.pid is None:
            raise ServerLost(f"the server has ended: {self._supervised.said().strip()}")

    def stop(self) -> None:
        """End the server in order, with the requests that it has. Idempotent."""
        self._supervised.end(self.stop_limit_s)
        if self._channel is not None:
            self._channel.close()

    @property
    def stop_limit_s(self) -> float:
        """Time that a stop in order takes at most."""
        return stop_limit_s(self._config)

    def _put(self, file: Path, known: object, write: Callable[[], None]) -> None:
        """Write a file of the server unless it says that already."""
        if self._known.get(file) == known:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write()
        except OSError as error:
            _log.error("%s: %s", file, error.strerror)
        else:
            self._known[file] = known

    def _same(self) -> Running | None:
        """Return the server that runs, where one started now would not differ; or None."""
        running = _read(self._supervised.version) if self._supervised.pid is not None else None
        return running if running and running.fingerprint == self._fingerprint() else None

    def _answers(self, running: Running) -> bool:
        """Return True when a server that was found answers, or says that it is not ready."""
        self._know(running)
        for _ in range(_LOOKS):
            if self.look() in (Probe.READY, Probe.NOT_READY):
                return True
            time.sleep(_POLL_S)
        return False

    def _know(self, running: Running) -> None:
        if self._channel is not None:
            self._channel.close()
        self._running = running
        self._channel = Channel(address_of(running.address, max_message_bytes=_MESSAGE_BYTES))

    def _launch(self) -> Running:
        server = self._config.server
        grpc_port = server.grpc_port or _free_port(server.host)
        http_port = server.http_port or _free_port(server.host)
        running = Running(
            host_port(self._host, grpc_port), host_port(self._host, http_port),
            self._next_incarnation(), self._fingerprint(), self._seat,
        )  # fmt: skip
        self.know([running.address])
        settings = [*self._spec.settings, *self._own_settings(running)]
        command = [
            sys.executable, "-P", "-m", "gnnserve", "serve", "--config", self._spec.config,
            "--grpc-port", str(grpc_port), "--http-port", str(http_port),
            *(word for setting in settings for word in ("--set", setting)),
        ]  # fmt: skip
        version = msgspec.json.encode(running).decode()
        self._supervised.start(command, version, self._spec.lease_s)
        return running

    def _next_incarnation(self) -> int:
        """Return the time, or later than the machine's last server where the clock was set back."""
        last = _read(self._supervised.version)
        return max(time.time_ns(), 0 if last is None else last.incarnation + 1)

    def _own_settings(self, running: Running) -> list[str]:
        """Return settings by which servers with one file, on shared storage too, differ."""
        report, server = self._config.report, self._config.server
        files = {
            name: getattr(report, name) for name in ("database", "journal", "access_log", "record")
        }
        own = [
            f"report.{name}={self._folder / Path(file).name}"
            for name, file in files.items()
            if file is not None
        ]
        own.append(f"cluster.servers_file={self._servers_file}")
        if (name := self._config.cluster.name) is not None:
            own.append(f"cluster.name={name}@{running.address}")
        if (seat := self._seat) is not None:
            host = (self._config.cluster.rows.listen or "").rpartition(":")[0]
            own += [
                f"cluster.rows.part={seat.part}",
                f"cluster.rows.listen={host}:{seat.address.rpartition(':')[2]}",
                f"cluster.rows.address={seat.address}",
                f"cluster.rows.servers_file={self._stores_file}",
            ]
        if server.shutdown_delay_s < _LEAST_DELAY_S:
            own.append(f"server.shutdown_delay_s={_LEAST_DELAY_S}")
        return own

    def _fingerprint(self) -> str:
        """Return what differs where a server started now would differ from one that runs."""
        text = Path(self._spec.config).read_bytes()
        said = (self._spec.generation, text.hex(), *self._spec.settings, self._host)
        return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]


def state_folder(cluster: str) -> Path:
    """Return the folder of a cluster's files on this machine."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given) / cluster
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local/state") / "gnnserve" / cluster


def stop_limit_s(config: Config) -> float:
    """Return the time that a server takes at most to stop in order."""
    server = config.server
    delay_s = max(server.shutdown_delay_s, _LEAST_DELAY_S)
    return delay_s + server.drain_timeout_s + server.stop_timeout_s + _STOP_SPARE_S


def require_reachable(config: Config, host: str) -> None:
    """Raise ConfigError when other machines would not reach a server that is at `host`."""
    if config.server.on_loopback and not host.startswith("127.") and host != "::1":
        raise ConfigError(
            f"server.host: '{config.server.host}' is reached by its own machine alone, and the "
            f'machine is {host} to others; set server.host = "0.0.0.0", with server.tls or, '
            "where the network is trusted, server.insecure = true"
        )
    rows_host = (config.cluster.rows.listen or "").rpartition(":")[0]
    if config.shares_graphs and is_loopback(rows_host) and not is_loopback(host):
        raise ConfigError(
            f"cluster.rows.listen: '{rows_host}' is reached by its own machine alone, and the "
            f'machine is {host} to others; listen at "0.0.0.0:PORT", with cluster.rows.key_file'
        )
    if config.server.tls.certificate is not None:
        raise ConfigError(
            "server.tls: a front does not encrypt what it passes on; use a network that is "
            "trusted, with server.insecure = true"
        )


def _read(version: str) -> Running | None:
    """Return what was written of a server; None when it is of another release."""
    try:
        return msgspec.json.decode(version, type=Running)
    except UNDECODABLE:
        return None


def _free_port(host: str) -> int:
    family, _, _, _, address = socket.getaddrinfo(
        host.strip("[]") or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family) as one:
        one.bind(address)
        return int(one.getsockname()[1])
