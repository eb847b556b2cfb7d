"""The access log: one JSON object a line for each finished request, for log collectors.

The database has everything about a request; a line has what people search logs for. Lines are
written whole, those of requests that ended together at once, so that a collector may follow the
file, and a tool may move it away: the next lines go to a new file of the same name.
"""

import logging
import os
import time
from pathlib import Path

import msgspec

from serve.errors import ConfigError
from serve.obs.log import rfc3339
from serve.obs.record import RequestRecord
from serve.obs.recorder import is_chosen

_log = logging.getLogger(__name__)

#: Time after which a file that was moved away, or removed, gets no more lines.
_LOOK_NS = 1_000_000_000
#: Size of waiting lines from which on they are written without being asked to.
_MOST_WAITING_BYTES = 1 << 16
_END = b"\n"


class Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line. Facts that a request does not have are left out."""

    #: When the answer left, RFC 3339 in UTC.
    time: str
    uid: str
    client_id: str = ""
    joint_uid: str = ""
    trace_id: str = ""
    model: str
    version: str
    tenant: str = ""
    status: str
    reason: str = ""
    message: str = ""
    nodes: int = 0
    edges: int = 0
    latency_ms: float
    target_ms: float = 0.0
    late: bool = False
    cause: str = ""
    queue_ms: float = 0.0
    prepare_ms: float = 0.0
    run_ms: float = 0.0
    lane: int = -1
    #: Number of requests that ran as one.
    merged: int = 0


class AccessLog:
    """Writes lines to a file. Used by one thread."""

    def __init__(self, path: Path, share: float) -> None:
        """Open the file for appending; create it for this user alone if it is not there.

        Args:
            path: The file.
            share: Share of the requests answered in time that get a line. Others always get one.

        Raises ConfigError when the file cannot be opened.
        """
        self._path = path
        #: Share of the requests answered in time that get a line; may change.
        self.share = share
        #: Lines that the file could not take.
        self.lost = 0
        #: Lines that wait for `flush`.
        self._waiting = bytearray()
        self._failing = False
        self._looked_ns = time.monotonic_ns()
        self._encoder = msgspec.json.Encoder()
        try:
            self._fd: int = self._open()
        except OSError as error:
            raise ConfigError(
                f"report.access_log: {path}: cannot be written: {error.strerror}"
            ) from error

    def write(self, record: RequestRecord) -> None:
        """Take the line of a finished request, if it gets one; `flush` writes it to the file."""
        in_time = record.status == "OK" and not record.violated
        if in_time and self.share < 1.0 and not is_chosen(record.request_uid, self.share):
            return
        self._waiting += self._encoder.encode(line_of(record)) + _END
        if len(self._waiting) >= _MOST_WAITING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait. Never raises OSError."""
        if not self._waiting:
            return
        lines, self._waiting = self._waiting, bytearray()
        written = 0
        try:
            self._follow()
            written = os.write(self._fd, lines)
            if written < len(lines):
                if not lines.endswith(_END, 0, written):
                    # What stands there would spoil the next line.
                    os.write(self._fd, _END)
                raise OSError(None, "the lines were cut")
            self._failing = False
        except OSError as error:
            self.lost += lines.count(_END, written)
            if not self._failing:
                self._failing = True
                _log.error("access log %s: lines are lost: %s", self._path, error.strerror)

    def close(self) -> None:
        """Write what waits and close the file. Idempotent."""
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1

    def _follow(self) -> None:
        """Open the file anew when the name belongs to another one, or to none."""
        now_ns = time.monotonic_ns()
        if now_ns - self._looked_ns < _LOOK_NS:
            return
        self._looked_ns = now_ns
        ours = os.fstat(self._fd)
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            named = None
        if named is None or (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino):
            fresh = self._open()
            os.close(self._fd)
            self._fd = fresh

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._path, flags, 0o600)


def line_of(record: RequestRecord) -> Line:
    """Return the line of a finished request."""
    return Line(
        time=rfc3339((record.arrived_unix_ns + record.latency_ns) / 1e9),
        uid=record.request_uid,
        client_id=record.client_id,
        joint_uid=record.joint_uid,
        trace_id=record.trace_parent[3:35],
        model=record.model,
        version=record.version,
        tenant=record.tenant,
        status=record.status,
        reason=record.reason,
        message=record.message,
        nodes=record.num_nodes,
        edges=record.num_edges,
        latency_ms=_ms(record.latency_ns),
        target_ms=_ms(record.qos_target_ns),
        late=record.violated,
        cause=record.cause,
        queue_ms=_ms(record.queue_ns),
        prepare_ms=_ms(record.prepare_ns),
        run_ms=_ms(record.run_ns),
        lane=record.lane,
        merged=record.merged,
    )


def _ms(time_ns: int) -> float:
    """Return milliseconds to three decimals."""
    return (time_ns + 500) // 1000 / 1000
