"""Conversion of errors to what the client sees: a gRPC code, a text and a retry hint.

The client gets the text of errors that are raised on purpose. Any other error is a bug, whose text
goes to the log alone.
"""

import logging
from dataclasses import dataclass
from typing import NoReturn

import grpc

from serve.errors import ErrorCode, InvariantViolation, QueueFull, ServeError
from serve.wire.messages import RETRY_TRAILER, WireError

_CODES = {code: grpc.StatusCode[code.status] for code in ErrorCode}

_MARK = "…"
INTERNAL_TEXT = "internal error; the server's log has the details"
#: Longest text, and most bytes that it takes: gRPC carries it in a header, percent-encoded, and
#: peers refuse headers over 8 KiB.
MAX_TEXT, MOST_HEADER_BYTES = 1000, 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    """End of a failed call, as the client sees it."""

    code: grpc.StatusCode
    text: str
    #: None when there is no hint or retrying is useless.
    retry_after_ms: int | None = None


def status_of(error: Exception) -> Status:
    """Return the status for `error`; logs bugs with their traceback."""
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
    """Return the text, or as much of it as may be sent, with a mark at its end."""
    if len(text) <= MAX_TEXT and encoded_bytes(text) <= MOST_HEADER_BYTES:
        return text
    kept, left = 0, MOST_HEADER_BYTES - encoded_bytes(_MARK)
    for character in text[: MAX_TEXT - 1]:
        left -= encoded_bytes(character)
        if left < 0:
            break
        kept += 1
    return text[:kept] + _MARK


def encoded_bytes(text: str) -> int:
    """Return the bytes of the text percent-encoded."""
    plain = sum(" " <= one <= "~" and one != "%" for one in text)
    return plain + 3 * (len(text.encode("utf-8", "replace")) - plain)
