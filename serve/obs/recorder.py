"""Writer of a recording: sizes and times of the requests that a server gets, to replay them.

It sees the same records as the database. The file is bounded: when it is full, recording ends, the
log says so, and the server goes on. See ``serve.recording`` for the format.
"""

import logging
import os
import zlib
from pathlib import Path

import msgspec

from serve.errors import ConfigError
from serve.files import new_private_file
from serve.obs.record import RequestRecord
from serve.recording import RecordedRequest, RecordingHeader

_log = logging.getLogger(__name__)

#: What `zlib.crc32` can return.
_HASHES = 1 << 32
_US = 1000


class TrafficRecorder:
    """Writes one line per request to a file. Used by one thread."""

    def __init__(self, path: Path, share: float, most_bytes: int, started_unix_ns: int) -> None:
        """Create or empty the file, which this user alone may read.

        Args:
            path: The file.
            share: Share of the requests that are recorded. The parts of a joint request are
                recorded together.
            most_bytes: Most bytes that the file may have.
            started_unix_ns: Start of the recording by the wall clock, ns since the epoch.

        Raises ConfigError when the file cannot be written.
        """
        self._path = path
        self._share = share
        self._left_bytes = most_bytes
        #: Requests that the file had no room for, or that the disk did not take.
        self.lost = 0
        self._ended = False
        self._encoder = msgspec.json.Encoder()
        try:
            self._fd = new_private_file(path)
        except OSError as error:
            raise ConfigError(
                f"report.record: {path}: cannot be written: {error.strerror}"
            ) from error
        self._write(RecordingHeader(started_unix_ns=started_unix_ns, share=share))

    def write(self, record: RequestRecord) -> None:
        """Record a finished request, if it is among the share. Never raises OSError.

        A request that was refused before its size was known is left out.
        """
        if record.num_nodes < 1:
            return
        if not is_chosen(record.joint_uid or record.request_uid, self._share):
            return
        if self._ended:
            self.lost += 1
        else:
            self._write(recorded_of(record))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, row: msgspec.Struct) -> None:
        line = self._encoder.encode(row) + b"\n"
        if len(line) > self._left_bytes:
            self._end("it has reached report.record_size")
            return
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self._end(error.strerror or str(error))
            return
        self._left_bytes -= written
        if written < len(line):
            # A reader leaves out a last line without its end.
            self._end("the disk is full")

    def _end(self, why: str) -> None:
        self._ended = True
        self.lost += 1
        _log.warning("recording %s ends here: %s", self._path, why)


def is_chosen(uid: str, share: float) -> bool:
    """Return True for the ids of a share of the requests, always the same ones."""
    return zlib.crc32(uid.encode()) < share * _HASHES


def recorded_of(record: RequestRecord) -> RecordedRequest:
    """Return what a recording keeps of a request."""
    return RecordedRequest(
        at_ns=record.arrived_unix_ns,
        uid=record.request_uid,
        model=record.model,
        version=record.version,
        tenant=record.tenant,
        priority=record.priority,
        nodes=record.num_nodes,
        edges=record.num_edges,
        graph=record.graph,
        ids=record.num_ids,
        node_type=record.node_type,
        fanouts=record.fanouts,
        seed=record.seed,
        target_us=record.qos_target_ns // _US,
        joint=record.joint_uid,
        status=record.status,
        latency_us=record.latency_ns // _US,
        late=record.violated,
    )
