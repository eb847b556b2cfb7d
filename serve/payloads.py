"""Recorded payloads: the tensors of requests, beside a recording, to send exactly them again.

A header line of JSON, then for each request a line of JSON and as many bytes as it says: a
`ModelInferRequest` with the model and the tensors alone. ``serve.obs.payload_recorder`` writes such
files; requests of equal tensors share one message.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from serve.errors import ConfigError
from serve.wire.messages import WireError, WireRequest, decode_request
from serve.workload import decode_line

FORMAT = "gnnserve-payloads-1"
#: What is added to the name of a recording.
SUFFIX = ".payloads"
_LINE_END = b"\n"


class PayloadHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a file of payloads."""

    format: str = FORMAT
    #: Inputs whose values are zeros in the file.
    redacted: tuple[str, ...] = ()


class PayloadLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Line before a message; without one of its own the request has that of `same_as`."""

    uid: str
    size_bytes: Annotated[int, Meta(ge=0)] = 0
    same_as: str = ""


@dataclass(frozen=True, slots=True)
class Payloads:
    """Payloads of a file by the id of their request; messages are read when they are wanted."""

    path: Path
    header: PayloadHeader
    #: Offset and size of the message, by the id of the request.
    places: dict[str, tuple[int, int]]

    @classmethod
    def open(cls, path: Path) -> "Payloads":
        """Read which payloads there are; raises ConfigError.

        A last payload that is not whole is left out: the server was writing it.
        """
        try:
            with path.open("rb") as file:
                header = decode_line(file.readline(), PayloadHeader, str(path), 1)
                if header.format != FORMAT:
                    raise ConfigError(f"{path}: format {header.format!r} is not {FORMAT!r}")
                end = path.stat().st_size
                places: dict[str, tuple[int, int]] = {}
                number = 1
                while (line := file.readline()).endswith(_LINE_END):
                    number += 1
                    row = decode_line(line, PayloadLine, str(path), number)
                    at = file.tell()
                    if row.same_as:
                        if row.same_as not in places:
                            raise ConfigError(
                                f"{path}, payload {number}: there is no request {row.same_as}"
                            )
                        places[row.uid] = places[row.same_as]
                    elif at + row.size_bytes <= end:
                        places[row.uid] = at, row.size_bytes
                        file.seek(at + row.size_bytes)
                    else:
                        break
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        return cls(path, header, places)

    def request(self, uid: str) -> WireRequest:
        """Return a request with its model and tensors alone; raises ConfigError."""
        at, size_bytes = self.places[uid]
        try:
            with self.path.open("rb") as file:
                file.seek(at)
                return decode_request(file.read(size_bytes))
        except (OSError, WireError) as error:
            raise ConfigError(f"{self.path}: payload of request {uid}: {error}") from error


def beside(recording: Path) -> Path:
    """Return where the payloads of a recording are."""
    return recording.with_name(recording.name + SUFFIX)
