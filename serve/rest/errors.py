"""Errors of the gateway and their HTTP statuses, which derive from ``ErrorCode``."""

import math
from collections.abc import Mapping
from http import HTTPStatus

import grpc.aio

from serve.errors import ErrorCode, ServeError
from serve.wire.messages import RETRY_TRAILER, WireError

#: HTTP status by gRPC's name of the code.
_STATUSES = {code.status: code.http_status for code in ErrorCode}
#: Status of a request whose client went away; nobody receives it, and the metrics count it.
CLIENT_GONE = 499


class RestError(Exception):
    """Failed request: an HTTP status, the text of `{"error": …}`, and further headers."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = dict(headers or {})


class ClientGone(RestError):
    """The client closed its connection before it was answered."""

    def __init__(self) -> None:
        super().__init__(CLIENT_GONE, "the client closed the connection")


def invalid(text: str) -> RestError:
    """Return the error of a malformed request."""
    return RestError(HTTPStatus.BAD_REQUEST, text)


def retry_headers(retry_after_ms: int) -> dict[str, str]:
    """Return the headers that tell when to try again: in whole seconds, and exactly."""
    seconds = max(1, math.ceil(retry_after_ms / 1000))
    return {"Retry-After": str(seconds), "Retry-After-Ms": str(retry_after_ms)}


def from_rpc(error: grpc.aio.AioRpcError) -> RestError:
    """Convert the end of a failed gRPC call."""
    headers: dict[str, str] = {}
    for key, value in error.trailing_metadata() or ():
        if key == RETRY_TRAILER:
            headers = retry_headers(int(value))
    status = _STATUSES.get(error.code().name, HTTPStatus.INTERNAL_SERVER_ERROR)
    return RestError(status, error.details() or error.code().name, headers)


def from_ours(error: ServeError | WireError) -> RestError:
    """Convert an error of our own code."""
    code = error.code if isinstance(error, ServeError) else ErrorCode.INVALID
    return RestError(code.http_status, str(error))
