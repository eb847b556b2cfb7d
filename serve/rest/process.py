"""The gateway's process as the main process keeps it: started, watched, started again, stopped."""

import logging
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec

from serve.access.certificates import CertificateFiles
from serve.access.settings import AccessSettings
from serve.errors import NotReady
from serve.ipc.signals import left_to_main_blocked
from serve.rest.lifeline import DRAIN
from serve.rest.settings import INSIDE_VARIABLE, Settings
from serve.server.clock import now_ns
from serve.server.printed_lines import PrintedLines
from serve.threads import Thread

_log = logging.getLogger(__name__)

#: Time without a sign of life after which the gateway is killed and started again.
_SILENT_S = 60.0
#: Waits for a sign within that time. Silence is counted in waits, as nobody gives a sign while the
#: machine, or all processes of the server, stand still.
_WAITS = 12
#: Pause before the first new start, and the longest; each start doubles it.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
#: Time of service after which an end counts as the first again.
_STEADY_S = 60.0
#: Time for a process that was killed, or has closed its socket, to end.
_END_S = 10.0
_ENTRY = "serve.rest.run"
#: numpy must start no threads for matrix products, which the gateway never makes, and ask for no
#: huge pages: while the kernel makes room for one, every process of the machine waits.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "NUMPY_MADVISE_HUGEPAGE": "0",
}


def missing_packages() -> tuple[str, ...]:
    """Return the packages that the gateway needs and this environment lacks."""
    return tuple(
        name for name in ("uvicorn", "starlette", "anyio", "h11") if find_spec(name) is None
    )


class GatewayProcess:
    """Keeps a gateway process that serves the HTTP port's listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        http_backend: str,
        *,
        max_message_bytes: int,
        receive_timeout_s: float,
        stop_s: float,
        access: AccessSettings | None = None,
        certificates: CertificateFiles | None = None,
        inside: str = "",
        database: Path | None = None,
    ) -> None:
        """Clients wait until `start`.

        Args:
            listener: Listening socket, which `stop` closes.
            http_backend: Name of the abstract Unix socket with health, metrics and report.
            max_message_bytes: Largest body and largest gRPC message.
            receive_timeout_s: Time for a request to arrive.
            stop_s: Time to deliver answers when it stops; what is left then is cut off.
            access: How to tell callers apart; None to let everybody do everything.
            certificates: For encrypted connections; None for others.
            inside: Secret of this server's processes.
            database: Database of the report, for the live page; None for a server without it.
        """
        self._listener = listener
        #: New starts after the process ended by itself or hung.
        self.restarts = 0
        self._http_backend = http_backend
        self._max_message_bytes = max_message_bytes
        self._receive_timeout_s = receive_timeout_s
        #: Time to deliver answers when it stops.
        self.stop_s = stop_s
        self._access = access or AccessSettings()
        self._certificates = certificates
        self._inside = inside
        self._database = "" if database is None else str(database)
        #: Reads what the process prints; None: it prints where this one does.
        self.printed: PrintedLines | None = None
        self._grpc_target = ""
        self._serves = threading.Event()
        self._stopping = threading.Event()
        #: Guards the next two, which belong to the running process.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None
        self._thread = Thread(target=self._keep, name="gateway")

    def start(self, grpc_target: str) -> None:
        """Start the process, which calls the gRPC port at `grpc_target`; see ``wait_serving``."""
        self._grpc_target = grpc_target
        self._thread.start()

    def wait_serving(self, limit_s: float) -> None:
        """Return once the process serves, or a stop began; raises NotReady after `limit_s`."""
        if not self._serves.wait(limit_s):
            raise NotReady(
                f"server.rest: the gateway does not serve after {limit_s:g} s; the log says why"
            )

    @property
    def pid(self) -> int | None:
        """Process id of the running process; None between two of them."""
        process = self._process
        return None if process is None else process.pid

    def stop(self) -> None:
        """Answer the requests in flight, then close the port. Idempotent."""
        self._stopping.set()
        self._serves.set()
        with self._lock:
            if self._lifeline is not None:
                with suppress(OSError):
                    self._lifeline.send(DRAIN)
        if self._thread.is_alive():
            self._thread.join(self.stop_s)
            if self._thread.is_alive():
                _log.warning("HTTP answers were not read within %g s; cut off", self.stop_s)
                self._kill()
                self._thread.join(_END_S)
        self._listener.close()

    # -- its thread ---------------------------------------------------------------------------

    def _keep(self) -> None:
        """Keep a process running until the stop."""
        ends = 0
        while not self._stopping.is_set():
            started_ns = now_ns()
            how = self._run_one()
            if self._stopping.is_set():
                return
            if now_ns() - started_ns > _STEADY_S * 1e9:
                ends = 0
            pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2**ends)
            ends += 1
            self.restarts += 1
            _log.error("the HTTP gateway ended (%s); the next starts in %g s", how, pause_s)
            self._stopping.wait(pause_s)

    def _run_one(self) -> str:
        """Run a process to its end; return how it ended."""
        try:
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    process = self._spawn(theirs.fileno())
                with self._lock:
                    self._process, self._lifeline = process, ours
                    if self._stopping.is_set():
                        ours.send(DRAIN)
                self._watch(ours)
                with self._lock:
                    self._lifeline = None
                return self._reap(process)
        except OSError as error:  # no processes, descriptors or memory
            return str(error)

    def _spawn(self, lifeline_fd: int) -> "subprocess.Popen[bytes]":
        settings = Settings(
            listener_fd=self._listener.fileno(),
            lifeline_fd=lifeline_fd,
            grpc_target=self._grpc_target,
            http_backend=self._http_backend,
            max_message_bytes=self._max_message_bytes,
            receive_timeout_s=self._receive_timeout_s,
            access=self._access,
            certificates=self._certificates,
            database=self._database,
            log_level=logging.getLevelName(logging.getLogger().getEffectiveLevel()),
            log_to_pipe=self.printed is not None,
        )
        outputs = () if self.printed is None else self.printed.open("gateway")
        try:
            # With a safe path, as a `serve.py` in the current folder would shadow the package.
            with left_to_main_blocked():
                return subprocess.Popen(
                    [sys.executable, "-P", "-m", _ENTRY, msgspec.json.encode(settings).decode()],
                    stdin=subprocess.DEVNULL,
                    stdout=outputs[0] if outputs else subprocess.DEVNULL,
                    stderr=outputs[1] if outputs else None,
                    pass_fds=(self._listener.fileno(), lifeline_fd),
                    # Other users can read arguments, but not the environment.
                    env={**os.environ, **_ENVIRONMENT, INSIDE_VARIABLE: self._inside},
                )
        finally:
            for fd in outputs:
                os.close(fd)

    def _watch(self, lifeline: socket.socket) -> None:
        """Return when the process has closed its end, or was killed for its silence."""
        lifeline.settimeout(_SILENT_S / _WAITS)
        silent = 0
        while silent < _WAITS:
            try:
                if not lifeline.recv(64):
                    return
                silent = 0
                self._serves.set()
            except TimeoutError:
                silent += 1
            except ConnectionError:
                return
        _log.error("the HTTP gateway gave no sign of life for %g s; ending it", _SILENT_S)
        self._kill()

    def _reap(self, process: "subprocess.Popen[bytes]") -> str:
        try:
            code = process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait(_END_S)
        with self._lock:
            self._process = None
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
