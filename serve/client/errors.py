"""Errors of the client, by what the caller can do about them.

ClientError                code, message, retry_after_s
├── InvalidRequest         INVALID_ARGUMENT: correct the request; the message names the tensor
├── NotFound               NOT_FOUND: no such model, version or graph
├── AlreadyExists          ALREADY_EXISTS: that name is taken
├── Mismatched             FAILED_PRECONDITION: model, graph or version do not fit each other
├── Unavailable            UNAVAILABLE: no server, or it is starting or stopping; try again
├── Exhausted              RESOURCE_EXHAUSTED: with `retry_after_s` the queue was full, try
│                          again after that time; without it the request is too big for good
├── TimedOut               DEADLINE_EXCEEDED: your own time limit passed
├── Cancelled              CANCELLED: you cancelled, or the server closed the call
├── Unauthenticated        UNAUTHENTICATED: the server does not accept your token or certificate
├── Forbidden              PERMISSION_DENIED: your token does not allow this call
├── NotOffered             UNIMPLEMENTED: this server lacks the feature
└── ServerFault            any other code: the model or the server failed; see its log
"""

from typing import Any, Self

import grpc

from serve.errors import ErrorCode
from serve.wire.messages import RETRY_TRAILER, Failure


class ClientError(Exception):
    """Failed call; `str(error)` holds the code and the server's message."""

    #: Kind of failure that the class stands for.
    kind = ErrorCode.INTERNAL

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {message}")
        #: gRPC's name of the status code.
        self.code = code
        self.message = message
        #: Time after which to try again; None when the server gave no hint.
        self.retry_after_s = retry_after_s

    @classmethod
    def local(cls, message: str) -> Self:
        """Return an error that the client finds itself, without asking the server."""
        return cls(cls.kind.status, message)


class InvalidRequest(ClientError):
    """The request is malformed."""

    kind = ErrorCode.INVALID


class NotFound(ClientError):
    """No model, version or graph has that name."""

    kind = ErrorCode.NOT_FOUND


class AlreadyExists(ClientError):
    """The name is taken."""

    kind = ErrorCode.EXISTS


class Mismatched(ClientError):
    """Model and graph do not fit each other, or the graph has another version now."""

    kind = ErrorCode.PRECONDITION


class Unavailable(ClientError):
    """The server cannot be reached, or accepts no requests now."""

    kind = ErrorCode.UNAVAILABLE


class Exhausted(ClientError):
    """The queue is full, the request needs too much memory, or the message is too large."""

    kind = ErrorCode.EXHAUSTED


class TimedOut(ClientError):
    """The caller's time limit passed."""

    kind = ErrorCode.DEADLINE


class Cancelled(ClientError):
    """The call was cancelled."""

    kind = ErrorCode.CANCELLED


class Unauthenticated(ClientError):
    """The server does not know who calls: token or certificate is missing or wrong."""

    kind = ErrorCode.UNAUTHENTICATED


class Forbidden(ClientError):
    """The caller may not make this call."""

    kind = ErrorCode.FORBIDDEN


class NotOffered(ClientError):
    """The server does not offer this feature."""

    kind = ErrorCode.UNIMPLEMENTED


class ServerFault(ClientError):
    """The model or the server failed."""

    kind = ErrorCode.INTERNAL


#: Class by gRPC's name of the code; OUT_OF_RANGE comes only from other servers and gRPC itself.
_BY_STATUS: dict[str, type[ClientError]] = {
    each.kind.status: each for each in ClientError.__subclasses__()
} | {"OUT_OF_RANGE": InvalidRequest}


def error_for(code: str, message: str, retry_after_s: float | None = None) -> ClientError:
    """Return an error of the class for gRPC's status name `code`."""
    return _BY_STATUS.get(code, ServerFault)(code, message, retry_after_s)


def from_rpc(error: grpc.RpcError) -> ClientError:
    """Convert an error of gRPC, whose trailers may hold a retry hint."""
    retry_after_s = None
    trailers: Any = error.trailing_metadata() or ()
    for key, value in trailers:
        # Of other servers, "-1" says that trying again is useless.
        if key == RETRY_TRAILER and str(value).isdecimal():
            retry_after_s = int(value) / 1000
    return error_for(error.code().name, error.details() or "no details", retry_after_s)


def from_failure(failure: Failure) -> ClientError:
    """Convert an error that a stream carried."""
    code = str(failure.parameters.get("status", "UNKNOWN"))
    retry_after_ms = failure.parameters.get("retry_after_ms")
    return error_for(
        code, failure.message, None if retry_after_ms is None else float(retry_after_ms) / 1000
    )
