"""The gateway as an ASGI application: routes, errors, sending of answers."""

import asyncio
import logging
from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve.access.callers import AUTHORIZATION, INSIDE, NAMES_SEPARATOR, PEER, Callers
from serve.access.rules import decide
from serve.errors import ErrorCode, ServeError
from serve.rest import counts
from serve.rest.backend import CREDENTIALS
from serve.rest.bodies import BodyReader, compressed
from serve.rest.connections import PIECE_BYTES
from serve.rest.counts import Counts
from serve.rest.errors import RestError, from_ours
from serve.rest.replies import BINARY, Handler, HttpReply, Path, Pieces, disconnected
from serve.wire.messages import WireError

_log = logging.getLogger(__name__)

#: Schemes of credentials that are taken: a browser asks for the second one's.
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="gnnserve", Basic realm="gnnserve"'}


class Endpoint:
    """ASGI application of one path: runs its handler and sends the reply."""

    def __init__(
        self,
        handler: Handler,
        bodies: BodyReader,
        tally: Counts,
        callers: Callers,
        method: str | None = None,
    ) -> None:
        """`method` is the row of ``access.rules``; None: everybody gets the reply."""
        self._handler = handler
        self._bodies = bodies
        self._counts = tally
        self._callers = callers
        self._method = method

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        try:
            if request.method in ("POST", "PUT"):
                self._refuse_other_sites(request)
            if self._method is not None and self._callers.limited:
                self._admit(self._method, request)
            reply = await self._handler(request)
            if reply.stream is not None:
                await self._send_stream(reply, reply.stream, request, send)
                return
            coding = None
            if reply.content_type != BINARY or "accept-encoding" in request.headers:
                accepted = request.headers.get("accept-encoding", "")
                content, coding = await compressed(reply.content, accepted)
                reply = reply._replace(content=content)
            async with self._bodies.holding(len(reply.content)):
                await self._send(reply, coding, send)
        except (ServeError, WireError) as error:
            await self._send(error_reply(from_ours(error)), None, send)
        except RestError as error:
            await self._send(error_reply(error), None, send)

    async def _send_stream(
        self, reply: HttpReply, stream: Pieces, request: Request, send: Send
    ) -> None:
        """Send pieces as they come, until they end or the client goes."""
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await self._send_head(reply, {}, send)
            if request.method == "HEAD":
                await send({"type": "http.response.body", "body": b""})
                return
            while True:
                piece = asyncio.ensure_future(anext(stream, b""))
                await asyncio.wait((piece, gone), return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    piece.cancel()
                    return
                body = piece.result()
                await send({"type": "http.response.body", "body": body, "more_body": bool(body)})
                if not body:
                    return
        finally:
            gone.cancel()
            await stream.aclose()

    async def _send_head(self, reply: HttpReply, more: dict[str, str], send: Send) -> None:
        self._counts.answered(reply.status)
        headers = {
            "Content-Type": reply.content_type,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **more,
            **(_CHALLENGE if reply.status == ErrorCode.UNAUTHENTICATED.http_status else {}),
            **reply.headers,
        }
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": int(reply.status), "headers": raw})

    async def _send(self, reply: HttpReply, coding: str | None, send: Send) -> None:
        more = {"Content-Length": str(len(reply.content)), "Vary": "Accept-Encoding"}
        if coding:
            more["Content-Encoding"] = coding
        await self._send_head(reply, more, send)
        content = memoryview(reply.content)
        sent = 0
        # In pieces: the task, and what it holds, stays until the client has read nearly all.
        while len(content) - sent > PIECE_BYTES:
            piece = bytes(content[sent : sent + PIECE_BYTES])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            sent += PIECE_BYTES
        await send({"type": "http.response.body", "body": bytes(content[sent:])})

    def _admit(self, method: str, request: Request) -> None:
        """Pass the credentials on to gRPC; raises ServeError when they do not allow the request."""
        authorization = request.headers.get(AUTHORIZATION)
        names: tuple[str, ...] = request.scope.get("state", {}).get(PEER, ())
        if (refused := decide(method, self._callers.find(authorization, names))) is not None:
            raise refused
        found = []
        # gRPC carries no others, and no token has them.
        if authorization is not None and authorization.isascii() and authorization.isprintable():
            found.append((AUTHORIZATION, authorization))
        if names:
            found += (INSIDE, self._callers.inside), (PEER, NAMES_SEPARATOR.join(names))
        CREDENTIALS.set(tuple(found))

    def _refuse_other_sites(self, request: Request) -> None:
        """Refuse what a page of another site makes a browser send; it could unload models."""
        origin = request.headers.get("origin")
        if origin is not None and _host_of(origin) != request.headers.get("host", ""):
            self._counts.refused(counts.CROSS_SITE)
            raise RestError(
                HTTPStatus.FORBIDDEN,
                f"Origin: a page of {origin[:100]} may not send requests to this server",
            )


def _host_of(origin: str) -> str | None:
    """Return host and port of a site; None for a text that names none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def error_reply(error: RestError) -> HttpReply:
    """Return the reply of a failed request."""
    content = msgspec.json.encode({"error": str(error)})
    return HttpReply(content, status=error.status, headers=error.headers)


def make_app(
    paths: Sequence[Path], bodies: BodyReader, tally: Counts, callers: Callers
) -> Starlette:
    """Return the application with these paths; `callers` finds whom requests come from."""

    def endpoint(handler: Handler, method: str | None = None) -> Endpoint:
        return Endpoint(handler, bodies, tally, callers, method)

    async def failed(request: Request, error: Exception) -> Endpoint:
        """Answer what no handler answered: an unknown path or method, or a bug."""
        if isinstance(error, HTTPException):
            text = f"{request.method} {request.scope['path']}: {error.detail}; see /docs"
            reply = error_reply(RestError(error.status_code, text, error.headers))
        else:
            text = "internal error; the server's log has the details"
            reply = error_reply(RestError(HTTPStatus.INTERNAL_SERVER_ERROR, text))

        async def answer(_: Request) -> HttpReply:
            return reply

        return endpoint(answer)

    return Starlette(
        routes=[
            Route(
                each.path,
                endpoint(each.handler, f"{each.method} {each.path}"),
                methods=[each.method],
            )
            for each in paths
        ],
        exception_handlers={HTTPException: failed, Exception: failed},
    )
