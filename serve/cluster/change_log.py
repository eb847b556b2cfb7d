"""The file in which the sequencer keeps the changes of graphs that are shared out.

After a first line each change has its length, the digest of all changes up to it (see
``core.cluster.sequencer.chained``), and its record. A change is on the disk before anybody is told
of it.
"""

import fcntl
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from serve.core.cluster.sequencer import NO_CHANGES, chained
from serve.errors import ConfigError, NotReady, TooBig
from serve.files import private

_log = logging.getLogger(__name__)

_FIRST_LINE = b"gnnserve changes 1\n"
_HEAD = struct.Struct("<I16s")
#: Most bytes of a record.
MOST_RECORD_BYTES = 8 << 20


def require_short(record: bytes) -> None:
    """Raise TooBig for a record that no log takes."""
    if len(record) > MOST_RECORD_BYTES:
        raise TooBig(
            f"the change takes {len(record)} bytes, and the log of changes takes"
            f" {MOST_RECORD_BYTES} at once: send it as several"
        )


class ChangeLog:
    """An open log. One thread at a time."""

    def __init__(self, file: Path, most_bytes: int) -> None:
        """Open the log, or begin one; raises ConfigError for one that is damaged, or in use.

        The last change is cut off where it was not written to its end: nobody was told of it.
        """
        self._file = file
        self._most_bytes = most_bytes
        #: Where each record begins, and where the next head will.
        self._places: list[int] = []
        self._end = len(_FIRST_LINE)
        self._digest = NO_CHANGES
        #: Why nothing more can be written; empty while it can.
        self._broken = ""
        try:
            self._descriptor = private(str(file), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"cluster.rows.log: {file}: {error.strerror}") from error
        try:
            self._open()
        except OSError as error:
            os.close(self._descriptor)
            raise ConfigError(f"cluster.rows.log: {file}: {error.strerror}") from error
        except ConfigError:
            os.close(self._descriptor)
            raise

    @property
    def count(self) -> int:
        """Number of changes."""
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self._end

    def records(self, after: int, most_bytes: int) -> Iterator[bytes]:
        """Yield the records after the first `after`, one at least and then until `most_bytes`."""
        for number in range(after, len(self._places)):
            begin = self._places[number]
            following = number + 1 < len(self._places)
            end = self._places[number + 1] - _HEAD.size if following else self._end
            most_bytes -= end - begin
            if number > after and most_bytes < 0:
                return
            yield os.pread(self._descriptor, end - begin, begin)

    def append(self, record: bytes) -> None:
        """Write a record to the disk; raises TooBig when it is full, NotReady when that fails."""
        require_short(record)
        if self._end + _HEAD.size + len(record) > self._most_bytes:
            raise TooBig(
                f"the log of changes is full: {self._end} of {self._most_bytes} bytes, and the"
                f" change takes {len(record)} more; see cluster.rows.log_size"
            )
        if self._broken:
            raise NotReady(self._broken)
        digest = chained(self._digest, record)
        try:
            self._write(self._end, _HEAD.pack(len(record), digest) + record)
        except OSError as error:
            told = f"the log of changes {self._file}: {error.strerror}"
            try:
                os.ftruncate(self._descriptor, self._end)
            except OSError:
                # What was written of the change may still be there.
                self._broken = told
            raise NotReady(told) from error
        self._take(len(record), digest)

    def close(self) -> None:
        """Close the file; another process may use it then."""
        os.close(self._descriptor)

    def _open(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"cluster.rows.log: {self._file}: another server writes it") from None
        size = os.fstat(self._descriptor).st_size
        first = os.pread(self._descriptor, len(_FIRST_LINE), 0)
        if not _FIRST_LINE.startswith(first):
            raise ConfigError(f"cluster.rows.log: {self._file}: it is no log of changes")
        if size < len(_FIRST_LINE):
            self._write(0, _FIRST_LINE)
            size = len(_FIRST_LINE)
        while self._end < size and self._read(size):
            pass
        if self._end < size:
            _log.warning("%s: the last change was not written to its end, and is cut", self._file)
            os.ftruncate(self._descriptor, self._end)

    def _read(self, size: int) -> bool:
        """Take the next change; return False when it is not all there; raises ConfigError."""
        head = os.pread(self._descriptor, _HEAD.size, self._end)
        if len(head) < _HEAD.size:
            return False
        length, digest = _HEAD.unpack(head)
        if length <= MOST_RECORD_BYTES and self._end + _HEAD.size + length > size:
            return False
        record = os.pread(self._descriptor, min(length, size), self._end + _HEAD.size)
        if length > MOST_RECORD_BYTES or chained(self._digest, record) != digest:
            # A disk that lost its power may leave zeros for what was not written yet.
            if size - self._end <= MOST_RECORD_BYTES + _HEAD.size and self._only_zeros(size):
                return False
            raise ConfigError(
                f"cluster.rows.log: {self._file}: change {len(self._places) + 1}, at byte"
                f" {self._end}, is damaged"
            )
        self._take(length, digest)
        return True

    def _only_zeros(self, size: int) -> bool:
        return not any(os.pread(self._descriptor, size - self._end, self._end))

    def _take(self, length: int, digest: bytes) -> None:
        self._places.append(self._end + _HEAD.size)
        self._end += _HEAD.size + length
        self._digest = digest

    def _write(self, at: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], at + done)
        os.fsync(self._descriptor)
