"""From errors to what the client sees: a gRPC code, a text, and when to try again.

Errors raised on purpose keep their text; anything else is a bug, whose text stays in the log.
"""

import logging
from dataclasses import dataclass
from typing import NoReturn

import grpc

from serve.errors import ErrorCode, InvariantViolation, QueueFull, ServeError
from serve.wire.messages import WireError

_CODES = {code: grpc.StatusCode[code.status] for code in ErrorCode}

#: Trailer (in streams: parameter) that says when the same request may be sent again.
RETRY_TRAILER = "grpc-retry-pushback-ms"
INTERNAL_TEXT = "internal error; the server's log has the details"
#: gRPC carries the text in a header, percent-encoded, and peers refuse headers over 8 KiB.
MAX_TEXT = 1000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    """How a call that failed ends."""

    code: grpc.StatusCode
    text: str
    #: None: no hint, or no use in trying again.
    retry_after_ms: int | None = None


def status_of(error: Exception) -> Status:
    """What the client is told of `error`; bugs are logged here, in full."""
    if isinstance(error, WireError):
        return Status(_CODES[ErrorCode.INVALID], _shorten(str(error)))
    if not isinstance(error, ServeError) or isinstance(error, InvariantViolation):
        _log.error("a call failed unexpectedly", exc_info=error)
        return Status(_CODES[ErrorCode.INTERNAL], INTERNAL_TEXT)
    retry_after_ms = None
    if isinstance(error, QueueFull):
        retry_after_ms = max(1, -(-error.retry_after_ns // 1_000_000))
    return Status(_CODES[error.code], _shorten(str(error)), retry_after_ms)


def abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    """End the call with the status of `error`."""
    status = status_of(error)
    if status.retry_after_ms is not None:
        context.set_trailing_metadata(((RETRY_TRAILER, str(status.retry_after_ms)),))
    context.abort(status.code, status.text)
    raise AssertionError("context.abort() raises")


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
