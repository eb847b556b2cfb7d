"""What can go wrong, by what the caller can do about it.

ClientError                code, message, retry_after_s
├── InvalidRequest         INVALID_ARGUMENT: mend the request; the message names the tensor
├── NotFound               NOT_FOUND: no such model, version or graph
├── AlreadyExists          ALREADY_EXISTS: something by that name is there already
├── Mismatched             FAILED_PRECONDITION: model, graph or version do not fit each other
├── Unavailable            UNAVAILABLE: no server, starting, or shutting down; try again
├── Exhausted              RESOURCE_EXHAUSTED: with `retry_after_s` the queue was full, try
│                          again then; without, the request is too big and always will be
├── TimedOut               DEADLINE_EXCEEDED: your own time limit passed
├── Cancelled              CANCELLED: you cancelled, or the server closed the call
├── NotOffered             UNIMPLEMENTED: this server does not do that
└── ServerFault            anything else: a model's or the server's fault; see its log
"""

from typing import Any

import grpc

from serve.errors import ErrorCode
from serve.wire.messages import Failure


class ClientError(Exception):
    """A call failed; `str(error)` has the code and the server's own words."""

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {message}")
        #: gRPC's name of the status code.
        self.code = code
        self.message = message
        #: When trying again makes sense; None: the server gave no hint.
        self.retry_after_s = retry_after_s


class InvalidRequest(ClientError):
    """The request is malformed."""


class NotFound(ClientError):
    """No model, version or graph by that name."""


class AlreadyExists(ClientError):
    """Something by that name is there already."""


class Mismatched(ClientError):
    """Model and graph do not fit each other, or a graph has another version by now."""


class Unavailable(ClientError):
    """The server cannot be reached or takes no requests now."""


class Exhausted(ClientError):
    """The queue is full, the request needs too much memory, or the message is too large."""


class TimedOut(ClientError):
    """The caller's time limit passed."""


class Cancelled(ClientError):
    """The call was cancelled."""


class NotOffered(ClientError):
    """The server does not offer this."""


class ServerFault(ClientError):
    """The model or the server failed."""


_KINDS: dict[ErrorCode, type[ClientError]] = {
    ErrorCode.INVALID: InvalidRequest,
    ErrorCode.NOT_FOUND: NotFound,
    ErrorCode.EXISTS: AlreadyExists,
    ErrorCode.PRECONDITION: Mismatched,
    ErrorCode.UNAVAILABLE: Unavailable,
    ErrorCode.EXHAUSTED: Exhausted,
    ErrorCode.DEADLINE: TimedOut,
    ErrorCode.CANCELLED: Cancelled,
    ErrorCode.UNIMPLEMENTED: NotOffered,
    ErrorCode.INTERNAL: ServerFault,
}
#: By gRPC's names, with those that only other servers and gRPC itself give.
_BY_STATUS = {code.status: kind for code, kind in _KINDS.items()} | {"OUT_OF_RANGE": InvalidRequest}
_RETRY_TRAILER = "grpc-retry-pushback-ms"


def error_for(code: str, message: str, retry_after_s: float | None = None) -> ClientError:
    """The error of the class that `code` belongs to."""
    return _BY_STATUS.get(code, ServerFault)(code, message, retry_after_s)


def from_rpc(error: grpc.RpcError) -> ClientError:
    """The error that gRPC raised, as ours; its trailers may hold a retry hint."""
    retry_after_s = None
    trailers: Any = error.trailing_metadata() or ()
    for key, value in trailers:
        if key == _RETRY_TRAILER:
            retry_after_s = int(value) / 1000
    return error_for(error.code().name, error.details() or "no details", retry_after_s)


def from_failure(failure: Failure) -> ClientError:
    """The error that a stream carried."""
    code = str(failure.parameters.get("status", "UNKNOWN"))
    retry_after_ms = failure.parameters.get("retry_after_ms")
    return error_for(
        code, failure.message, None if retry_after_ms is None else float(retry_after_ms) / 1000
    )
