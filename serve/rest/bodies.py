"""Bodies of requests and answers: received within limits, compressed when asked."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request

from serve.obs.codings import taken_codings
from serve.rest import counts
from serve.rest.byte_budget import BudgetExhausted, ByteBudget
from serve.rest.counts import Counts
from serve.rest.direct_bodies import receive_directly
from serve.rest.errors import ClientGone, RestError, invalid, retry_headers
from serve.rest.idle_threads import in_thread

#: Answers shorter than this are not worth compressing.
_LEAST_COMPRESSED_BYTES = 1024
#: `wbits` of zlib that write or read each coding; reading takes either.
_WBITS = {"gzip": 31, "deflate": 15}
_READ_WBITS = 47
_RETRY_MS = 1000


class BodyReader:
    """Receives bodies of at most `most_bytes`, within `limit_s` seconds each."""

    def __init__(self, tally: Counts, most_bytes: int, total_bytes: int, limit_s: float) -> None:
        """`total_bytes` bounds what all bodies and answers hold together."""
        self._counts = tally
        self._most_bytes = most_bytes
        self._limit_s = limit_s
        self.budget = ByteBudget(total_bytes)
        tally.held_bytes.set_function(lambda: self.budget.held_bytes)

    @asynccontextmanager
    async def received(self, request: Request) -> AsyncIterator[memoryview]:
        """Receive the body of `request` and hold it inside the block.

        Raises RestError when it is too large, arrives too late, has two lengths or cannot be
        decompressed, and when there is no room for it.
        """
        coding = request.headers.get("content-encoding", "identity").lower()
        if coding not in ("identity", *_WBITS):
            raise RestError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"Content-Encoding: {coding[:32]!r} is not one of identity, {', '.join(_WBITS)}",
            )
        length = request.headers.get("content-length")
        if "transfer-encoding" not in request.headers:
            declared = int(length or 0)  # a request with neither has no body
        elif length is None:
            declared = self._most_bytes
        else:
            # The first one counts, but the other one would be what is held for the body.
            raise invalid("Content-Length: it is given beside Transfer-Encoding; give one of them")
        if declared > self._most_bytes:
            raise self._too_large()
        expected_bytes = self._most_bytes if coding != "identity" else declared
        async with self.holding(expected_bytes):
            body = await self._receive(request, declared)
            if coding != "identity":
                content = await in_thread(len(body), _decompress, body, self._most_bytes)
                if content is None:
                    raise self._too_large()
                body = memoryview(content)
            yield body

    @asynccontextmanager
    async def holding(self, size_bytes: int) -> AsyncIterator[None]:
        """Count `size_bytes` as held inside the block; raises RestError when there is no room."""
        try:
            async with self.budget.holding(size_bytes, self._limit_s):
                yield
        except BudgetExhausted:
            self._counts.refused(counts.HELD_BYTES)
            raise RestError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the bodies and answers in hand take all of the {self.budget.total_bytes} bytes "
                "that they may take; try again later",
                retry_headers(_RETRY_MS),
            ) from None

    async def _receive(self, request: Request, declared_bytes: int) -> memoryview:
        pieces: list[bytes] = []
        size_bytes = 0
        try:
            async with asyncio.timeout(self._limit_s):
                if (body := await receive_directly(request, declared_bytes)) is not None:
                    return body
                async for piece in request.stream():
                    size_bytes += len(piece)
                    if size_bytes > self._most_bytes:
                        raise self._too_large()
                    pieces.append(piece)
        except TimeoutError:
            self._counts.refused(counts.NO_BODY)
            raise RestError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"body: it was not complete within {self._limit_s:g} s",
            ) from None
        except ClientDisconnect:
            raise ClientGone from None
        return memoryview(b"".join(pieces))

    def _too_large(self) -> RestError:
        self._counts.refused(counts.BODY_SIZE)
        return RestError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"body: more than the {self._most_bytes} bytes that are taken (server.max_message)",
        )


async def compressed(content: bytes, accepted: str) -> tuple[bytes, str | None]:
    """Compress an answer as the header `Accept-Encoding` allows.

    Returns the content, and the name of its coding if it was compressed.
    """
    coding = next((name for name in taken_codings(accepted) if name in _WBITS), None)
    if coding is None or len(content) < _LEAST_COMPRESSED_BYTES:
        return content, None
    return await in_thread(len(content), _compress, content, _WBITS[coding]), coding


def _compress(content: bytes, wbits: int) -> bytes:
    # The lowest level: floats shrink little at any.
    compressor = zlib.compressobj(level=1, wbits=wbits)
    return compressor.compress(content) + compressor.flush()


def _decompress(body: memoryview, most_bytes: int) -> bytes | None:
    """Return the content of a body; None when it is larger than `most_bytes`."""
    decompressor = zlib.decompressobj(wbits=_READ_WBITS)
    try:
        content = decompressor.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise invalid(f"body: it cannot be decompressed: {error}") from error
    if len(content) > most_bytes:
        return None
    if not decompressor.eof:
        raise invalid("body: it ends within its compressed data")
    if decompressor.unused_data:
        raise invalid("body: more follows its compressed data; compress it as one part")
    return content
