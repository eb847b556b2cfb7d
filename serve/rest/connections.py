"""HTTP connections with limits on their number and on how long a client may keep one waiting.

uvicorn gives a client any time to send a request and to read an answer. Here a request's head must
arrive within a time limit, and each MiB of an answer must be read within another.
"""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from uvicorn.protocols.http.h11_impl import H11Protocol

from serve.access.callers import PEER
from serve.access.certificates import names_of
from serve.rest import counts
from serve.rest.counts import Counts

#: Key of a request's state with the connection that it came through, unless that is encrypted.
CONNECTION = "connection"
#: Most open connections; one more closes the one that waits longest for its client.
MOST_CONNECTIONS = 512
#: Time for a client to read the next part of an answer (at most `PIECE_BYTES`).
SEND_S = 30.0
#: Answers are handed to a connection in pieces of this size.
PIECE_BYTES = 1 << 20
#: Time that an answered connection may stay idle.
IDLE_S = 75
_CHECK_S = 0.2


class Waiting(Protocol):
    """A connection as its limits see it."""

    #: asyncio's, whose kind depends on the encryption.
    transport: Any
    #: When it was opened, or its last answer was complete.
    since_s: float
    #: Since when the client has read nothing of what was sent; None when all is sent.
    unread_s: float | None

    @property
    def began_s(self) -> float | None:
        """Since when a request's head is awaited or arriving; None while there is no hurry."""

    @property
    def waits_for_request(self) -> bool:
        """True while no request is being answered."""


class Connections:
    """All open connections, and the task that ends those beyond their time."""

    def __init__(self, tally: Counts, receive_timeout_s: float) -> None:
        self._counts = tally
        self._receive_timeout_s = receive_timeout_s
        self._open: dict[Waiting, None] = {}
        tally.connections.set_function(lambda: len(self._open))

    def opened(self, connection: "Waiting") -> None:
        """Add a connection; beyond the limit end the one that waits longest for its client."""
        self._open[connection] = None
        if len(self._open) > MOST_CONNECTIONS:
            waiting = [one for one in self._open if one.waits_for_request]
            self._end(min(waiting, key=lambda one: one.since_s), counts.CONNECTIONS)

    def closed(self, connection: "Waiting") -> None:
        """Remove a connection."""
        self._open.pop(connection, None)

    async def watch(self) -> None:
        """End connections beyond their time, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_CHECK_S)
            self._check(loop.time())

    def _check(self, now_s: float) -> None:
        for connection in list(self._open):
            began_s = connection.began_s
            if began_s is not None and now_s - began_s > self._receive_timeout_s:
                self._end(connection, counts.NO_REQUEST)
            elif not connection.transport.get_write_buffer_size():
                connection.unread_s = None
            elif connection.unread_s is None:
                connection.unread_s = now_s
            elif now_s - connection.unread_s > SEND_S:
                self._end(connection, counts.SLOW_READER)

    def _end(self, connection: "Waiting", reason: str) -> None:
        self._counts.refused(reason)
        self.closed(connection)
        connection.transport.abort()


class Connection(H11Protocol):
    """One connection of uvicorn, with the times that its limits need."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._all = connections
        #: When it was opened, or its last answer was complete.
        self.since_s = self.loop.time()
        #: Since when a request's head is awaited or arriving; None while there is no hurry.
        self.began_s: float | None = self.since_s
        #: Since when the client has read nothing of what was sent; None when all is sent.
        self.unread_s: float | None = None

    @property
    def waits_for_request(self) -> bool:
        """True while no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to count the connection."""
        super().connection_made(transport)
        state: dict[str, Any] = {}
        if (encrypted := transport.get_extra_info("ssl_object")) is not None:
            state[PEER] = names_of(encrypted.getpeercert())
        else:
            state[CONNECTION] = self
        # A request's scope gets a copy.
        self.app_state = state
        self._all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no more."""
        self._all.closed(self)
        self.app_state.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the first of a request start its time limit."""
        if self.began_s is None and self.waits_for_request:
            self.began_s = self.loop.time()
        super().data_received(data)
        if not self.waits_for_request:
            self.began_s = None

    def on_response_complete(self) -> None:
        """Wait for the next request, without hurry."""
        self.since_s, self.began_s = self.loop.time(), None
        super().on_response_complete()

    @property
    def body_left(self) -> int | None:
        """Bytes of the request's body that are to come; None for one that does not tell.

        h11 keeps the number to itself: by a release that names it otherwise no body tells.
        """
        left = getattr(getattr(self.conn, "_reader", None), "_remaining", None)
        return left if isinstance(left, int) else None

    @contextmanager
    def lending(self) -> Iterator[tuple[bytes, socket.socket]]:
        """Have the rest of a body that tells its length read from the socket inside the block.

        Yields what has come and was not handed out, and the socket, which does not block and is
        to be closed. If the block raises, the connection ends with the answer.
        """
        self.flow.pause_reading()
        arrived, self.cycle.body = bytes(self.cycle.body), bytearray()
        try:
            yield arrived, self.transport.get_extra_info("socket").dup()
        except BaseException:
            self.cycle.keep_alive = False
            raise
        reader: Any = self.conn
        reader._reader._remaining = 0
        self.handle_events()

    def resume_writing(self) -> None:
        """Note that the client has read."""
        self.unread_s = None
        super().resume_writing()
