"""The main process's side of traces: records of traced requests go to a process that exports them.

Building and sending spans takes a hundred times as long as the packet that asks for it.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec

import msgspec

from serve.errors import ConfigError
from serve.obs.record import RequestRecord
from serve.obs.trace_ids import trace_of
from serve.server.printed_lines import PrintedLines

_log = logging.getLogger(__name__)

#: Room for some thousand records that the process has not read yet.
_SEND_BYTES = 4 << 20
#: Time between two starts of the process.
_RESTART_S = 5.0
#: Time for the last spans to be exported when the server stops.
END_S = 3.0
_ENTRY = "serve.server.tracing.export"
_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter")


class ExportSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the exporting process is told."""

    #: Socket with a record in each packet.
    records_fd: int
    endpoint: str
    version: str
    log_level: str
    log_to_pipe: bool


class ExportCounts(msgspec.Struct):
    """What the exporting process tells: requests since its start."""

    exported: int = 0
    #: Those that the endpoint did not take, or that came too fast.
    lost: int = 0


def require_packages() -> None:
    """Raise ConfigError when the packages for traces are not installed."""
    for name in _PACKAGES:
        try:
            found = find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError(
                f"traces.endpoint: no package {name.partition('.')[0]}; install it with "
                "`pip install 'gnnserve[otel]'`"
            )


class TraceSender:
    """Passes traced requests on. One thread calls `observe`."""

    def __init__(
        self, endpoint: str, share: float, version: str, printed: PrintedLines | None = None
    ) -> None:
        """Start the process; raises ConfigError when packages are missing.

        Args:
            endpoint: URL of an OTLP receiver for gRPC.
            share: Share of the requests without a client's span that is traced.
            version: The server's.
            printed: Reads what the process prints; None: it prints where this one does.
        """
        require_packages()
        self._endpoint, self._version = endpoint, version
        #: Share of the requests without a client's span that is traced; may change.
        self.share = share
        self._printed = printed
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ExportCounts)
        #: Held to hear, and to forget the process that is heard.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._started_s = -_RESTART_S
        #: Of this process, of earlier exporting ones, and of the one that runs.
        self._lost = 0
        self._before, self._now = ExportCounts(), ExportCounts()
        self._start()

    @property
    def totals(self) -> tuple[int, int]:
        """Traced requests that were exported, and that were lost, so far."""
        with self._lock:
            if self._socket is not None:
                self._hear()
        before, now = self._before, self._now
        return before.exported + now.exported, before.lost + now.lost + self._lost

    def observe(self, record: RequestRecord) -> None:
        """Pass on a finished request, if it is traced. Never blocks and never raises."""
        if trace_of(record, self.share) is None:
            return
        if self._socket is None and not self._start():
            self._lost += 1
            return
        assert self._socket is not None
        try:
            self._socket.send(self._encoder.encode(record))
        except BlockingIOError:
            self._lost += 1
        except OSError as error:
            self._lost += 1
            _log.error("the process that exports traces ended: %s", error)
            self._end(0.0)

    def close(self) -> None:
        """Have the last spans exported, and end the process. Idempotent."""
        if self._socket is not None:
            self._end(END_S)

    def _hear(self) -> None:
        """Take what the process tells of itself."""
        assert self._socket is not None
        with suppress(OSError, msgspec.MsgspecError):
            while packet := self._socket.recv(256):
                self._now = self._decoder.decode(packet)

    def _start(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._started_s < _RESTART_S:
            return False
        self._started_s = now_s
        outputs: tuple[int, ...] = ()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            if self._printed is not None:
                outputs = self._printed.open("traces")
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
            ours.setblocking(False)
            settings = ExportSettings(
                records_fd=theirs.fileno(),
                endpoint=self._endpoint,
                version=self._version,
                log_level=logging.getLevelName(logging.getLogger().getEffectiveLevel()),
                log_to_pipe=bool(outputs),
            )
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _ENTRY, msgspec.json.encode(settings).decode()],
                stdin=subprocess.DEVNULL,
                stdout=outputs[0] if outputs else subprocess.DEVNULL,
                stderr=outputs[1] if outputs else None,
                pass_fds=(theirs.fileno(),),
            )
        except OSError as error:
            ours.close()
            _log.error("traces are lost: no process exports them: %s", error)
            return False
        finally:
            theirs.close()
            for fd in outputs:
                os.close(fd)
        self._socket = ours
        return True

    def _end(self, wait_s: float) -> None:
        assert self._socket is not None
        assert self._process is not None
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._lock:
            self._hear()
            self._socket.close()
            self._socket = self._process = None
            self._before.exported += self._now.exported
            self._before.lost += self._now.lost
            self._now = ExportCounts()
