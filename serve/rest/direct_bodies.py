"""Large bodies, received past the event loop by threads that give way to everything else.

What comes through the event loop is copied several times, at the priority of small requests. A body
whose length is known needs no parsing: its rest is read from the socket to where it stays.
"""

import asyncio
import socket
from contextlib import suppress

import numpy as np
from starlette.requests import ClientDisconnect, Request

from serve import native
from serve.rest.connections import CONNECTION, Connection
from serve.rest.idle_threads import in_thread

#: Bodies from this size on are received so.
LEAST_BYTES = 256 * 1024
#: The event loop hears of so many bytes at once, or of the last ones.
_STEP_BYTES = 1 << 20


async def receive_directly(request: Request, size_bytes: int) -> memoryview | None:
    """Receive the body of `request`, which has that length, or as much of it as there is memory.

    Returns None where it must come through the event loop: when it is small, encrypted or in
    chunks. Raises ClientDisconnect when the client goes before all has come.
    """
    connection: Connection | None = request.scope.get("state", {}).get(CONNECTION)
    if size_bytes < LEAST_BYTES or connection is None or connection.body_left is None:
        return None
    # Not touched before bytes come to it.
    body = np.empty(size_bytes, np.uint8).data
    # A client may wait to be asked for the body, which this does.
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    begun = message["body"]
    body[: len(begun)] = begun
    with connection.lending() as (arrived, source), source:
        filled = len(begun) + len(arrived)
        body[len(begun) : filled] = arrived
        await _receive(source, body[filled:])
    return body


async def _receive(source: socket.socket, target: memoryview) -> None:
    """Fill `target` from a socket that does not block."""
    while target:
        _set_low_mark(source, min(len(target), _STEP_BYTES))
        await _readable(source)
        working = asyncio.ensure_future(in_thread(LEAST_BYTES, _read, source, target))
        try:
            target = target[await asyncio.shield(working) :]
        except asyncio.CancelledError:
            # The socket's number must not be given to another one while it is read.
            await asyncio.wait((working,))
            working.exception()
            raise
    _set_low_mark(source, 1)


def _read(source: socket.socket, target: memoryview) -> int:
    """Read what comes, as far as there is room; returns how many bytes that was."""
    size_bytes, ended = native.read_arriving(source.fileno(), target)
    if ended:
        raise ClientDisconnect
    return size_bytes


async def _readable(source: socket.socket) -> None:
    """Wait until bytes have come, or the end."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not told.done():
            told.set_result(None)

    loop.add_reader(source, tell)
    try:
        await told
    finally:
        loop.remove_reader(source)


def _set_low_mark(source: socket.socket, size_bytes: int) -> None:
    """Have the kernel wake the reader of a socket when that much has come."""
    with suppress(OSError):
        source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
