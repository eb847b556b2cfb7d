"""What handlers of paths share: replies, names in paths, and clients that go away."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.requests import Request

from serve.rest.errors import ClientGone, RestError

JSON = "application/json"
BINARY = "application/octet-stream"
#: Header with the id of a request whose body has none.
REQUEST_ID = "X-Request-Id"
#: Longest name of a model, version or region.
_MOST_NAME = 256

_Result = TypeVar("_Result")


class Pieces(Protocol):
    """Pieces of an answer, which come as they are made."""

    def __anext__(self) -> Awaitable[bytes]:
        """Return the next piece; raises StopAsyncIteration after the last."""
        ...

    def __aiter__(self) -> "Pieces":
        """Return itself."""
        ...

    async def aclose(self) -> None:
        """Make no more pieces. Idempotent; to be called also when none was made."""


class HttpReply(NamedTuple):
    """Answer to a request."""

    content: bytes
    content_type: str = JSON
    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = MappingProxyType({})
    #: What follows the headers in place of `content`, without an end that is known.
    stream: Pieces | None = None


#: Answers a request, or raises RestError.
Handler = Callable[[Request], Awaitable[HttpReply]]


class Path(NamedTuple):
    """A path with one of its methods."""

    method: str
    path: str
    handler: Handler
    #: Class of the body, None for a path without one.
    body: type | None = None


def as_json(value: Any, status: int = HTTPStatus.OK) -> HttpReply:
    """Return a reply with `value` as JSON."""
    return HttpReply(msgspec.json.encode(value), status=status)


def model_of(request: Request) -> tuple[str, str]:
    """Return the name and version in the path; empty for what is not there. Raises RestError."""
    for what, name in request.path_params.items():
        if len(name) > _MOST_NAME:
            raise RestError(
                HTTPStatus.NOT_FOUND,
                f"name of the {what}: {len(name)} characters, at most {_MOST_NAME} are taken",
            )
    return request.path_params.get("model", ""), request.path_params.get("version", "")


async def unless_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return what `work` returns; cancels it and raises ClientGone when the client disconnects.

    The body of `request` must have been read.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def disconnected(request: Request) -> None:
    """Return when the client has disconnected; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
