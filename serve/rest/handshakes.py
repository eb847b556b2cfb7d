"""TLS handshakes of the HTTP port, which count as connections and have their time limit.

asyncio's own encrypted servers tell of a connection when its handshake is over: as many as a client
liked could wait there, a minute each.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from serve.rest.connections import Connection, Connections


class Handshake(asyncio.Protocol):
    """A connection until it is encrypted; then `make` makes what serves it."""

    #: As of ``Connection``: it waits for its client, which reads all that it is sent.
    waits_for_request = True
    unread_s: float | None = None

    def __init__(
        self, connections: Connections, context: ssl.SSLContext, make: Callable[[], Connection]
    ) -> None:
        self._all = connections
        self._context = context
        self._make = make
        self._loop = asyncio.get_running_loop()
        self.since_s = self.began_s = self._loop.time()
        self.transport: Any = None
        self._encrypting: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, and to count the connection."""
        self.transport = transport
        # Its first bytes are for the handshake.
        self.transport.pause_reading()
        self._all.opened(self)
        self._encrypting = asyncio.ensure_future(self._encrypt())

    async def _encrypt(self) -> None:
        first = _First()
        try:
            encrypted = await self._loop.start_tls(
                self.transport, first, self._context, server_side=True
            )
        except (OSError, ssl.SSLError):
            return  # the client's matter; the connection is closed
        finally:
            self._all.closed(self)
        if encrypted is None or encrypted.is_closing() or first.lost:
            self.transport.abort()
            return
        connection: Any = self._make()
        encrypted.set_protocol(connection)
        connection.connection_made(encrypted)
        if first.came:
            connection.data_received(bytes(first.came))


class _First(asyncio.Protocol):
    """Keeps what comes between a handshake's end and the connection's beginning."""

    def __init__(self) -> None:
        self.came = bytearray()
        self.lost = False

    def data_received(self, data: bytes) -> None:
        """Keep bytes."""
        self.came += data

    def eof_received(self) -> None:
        """Let the connection be closed."""
        self.lost = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that it is over."""
        self.lost = True
