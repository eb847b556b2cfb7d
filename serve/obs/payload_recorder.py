"""Writer of the payloads of recorded requests. See ``serve.payloads`` for the format."""

import hashlib
import logging
import os
import threading
from collections.abc import Collection
from pathlib import Path

import msgspec

from serve.errors import ConfigError
from serve.files import new_private_file
from serve.obs.recorder import is_chosen
from serve.payloads import PayloadHeader, PayloadLine
from serve.wire.messages import WireRequest, encode_wire_request

_log = logging.getLogger(__name__)
#: Latest payloads that are recognized when they come again.
_KNOWN = 4096


class PayloadRecorder:
    """Appends the tensors of requests to a file, which this user alone may read. Any thread."""

    def __init__(
        self, path: Path, share: float, most_bytes: int, redacted: Collection[str] = ()
    ) -> None:
        """Create or empty the file.

        Args:
            path: The file.
            share: Share of the requests that are recorded, the same as in the recording.
            most_bytes: Most bytes that the file may have; then no more payloads are recorded.
            redacted: Inputs whose values are written as zeros.

        Raises ConfigError when the file cannot be written.
        """
        self._path = path
        self._share = share
        self._redacted = frozenset(redacted)
        self._left_bytes = most_bytes
        self._lock = threading.Lock()
        self._known: dict[bytes, str] = {}
        self._ended = False
        #: Payloads that the file had no room for, or that the disk did not take.
        self.lost = 0
        try:
            self._fd = new_private_file(path)
        except OSError as error:
            raise ConfigError(
                f"report.record_payloads: {path}: cannot be written: {error.strerror}"
            ) from error
        header = PayloadHeader(redacted=tuple(sorted(self._redacted)))
        self._write(msgspec.json.encode(header) + b"\n")

    def write(self, uid: str, request: WireRequest, joint_uid: str = "") -> None:
        """Record a request of raw tensors, if it is among the share. Never raises OSError.

        The parts of a joint request are chosen by its id.
        """
        if not is_chosen(joint_uid or uid, self._share):
            return
        raws = [
            memoryview(bytes(raw.nbytes)) if tensor.name in self._redacted else raw
            for tensor, raw in zip(request.inputs, request.raws, strict=True)
        ]
        message = encode_wire_request(request._replace(raws=raws))
        digest = hashlib.blake2b(message, digest_size=16).digest()
        with self._lock:
            if self._ended:
                self.lost += 1
            elif (same := self._known.get(digest)) is not None:
                self._write(msgspec.json.encode(PayloadLine(uid=uid, same_as=same)) + b"\n")
            else:
                line = PayloadLine(uid=uid, size_bytes=len(message))
                if self._write(msgspec.json.encode(line) + b"\n" + message):
                    self._know(digest, uid)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._ended = True
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _know(self, digest: bytes, uid: str) -> None:
        if len(self._known) >= _KNOWN:
            del self._known[next(iter(self._known))]
        self._known[digest] = uid

    def _write(self, data: bytes) -> bool:
        """Append; returns False at the end of the recording, which is told once."""
        if len(data) > self._left_bytes:
            return self._end("it has reached report.record_payloads_size")
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            # A reader leaves out a last payload that is not whole.
            return self._end(error.strerror or str(error))
        self._left_bytes -= len(data)
        return True

    def _end(self, why: str) -> bool:
        self._ended = True
        self.lost += 1
        _log.warning("recording of payloads %s ends here: %s", self._path, why)
        return False
