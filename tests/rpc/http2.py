"""A client that violates HTTP/2 on purpose, by frames written to a socket."""

import socket
import struct
from collections import defaultdict
from contextlib import suppress

from bench.kit.http2_frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    head_block,
    prefixed,
)

_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE = 3, 4


class Http2:
    """One connection; streams are 1, 3, 5 … in the order of ``head``."""

    def __init__(self, port, window_bytes=None, preface=PREFACE, source="127.0.0.1"):
        """`port` may be the address of an abstract Unix socket, as gRPC writes it."""
        if isinstance(port, str):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(60)
            self._socket.connect("\0" + port.removeprefix("unix-abstract:"))
        else:
            self._socket = socket.create_connection(
                ("127.0.0.1", port), timeout=60, source_address=(source, 0)
            )
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._next = 1
        self._unread = b""
        #: What came, by stream: (type, flags, content) of each frame.
        self.came = defaultdict(list)
        settings = b""
        if window_bytes is not None:
            settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, window_bytes)
        self._socket.sendall(preface + frame(SETTINGS, 0, 0, settings))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def close(self):
        """End the connection, also for a thread that reads or sends."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def head(self, path, count=1):
        """Begin `count` calls of a method and send no message; returns the last one's stream."""
        block = head_block(path)
        frames = []
        for _ in range(count):
            frames.append(frame(HEADERS, END_HEADERS, self._next, block))
            self._next += 2
        self.send(*frames)
        return self._next - 2

    def send(self, *frames):
        """Send bytes, frames as a rule."""
        self._socket.sendall(b"".join(frames))

    def send_while_taken(self, content, most_bytes):
        """Send `content` again and again, reading nothing.

        Returns the bytes that were taken until the other side ended the connection, took none for
        a second, or had `most_bytes`.
        """
        self._socket.settimeout(1.0)
        taken = 0
        with suppress(OSError):
            while taken < most_bytes:
                taken += self._socket.send(content[taken % len(content) :])
        self._socket.settimeout(60)
        return taken

    def end_of_connection(self):
        """Read all that comes until the connection ends; returns GOAWAY's code, or None."""
        with suppress(OSError):
            self.read_until(lambda came: False)
        codes = [content[4:8] for kind, _, content in self.came[0] if kind == GOAWAY]
        return struct.unpack(">I", codes[-1])[0] if codes else None

    def ping(self):
        """Wait until the server has answered a ping."""
        self.send(frame(PING, 0, 0, b"answer!!"))
        self.read_until(
            lambda came: any(kind == PING and flags & ACK for kind, flags, _ in came[0])
        )

    def message(self, stream, content=b"", end=False):
        """Send a whole message."""
        self.data(stream, prefixed(content), end)

    def data(self, stream, content, end=False):
        """Send any bytes."""
        self._socket.sendall(frame(DATA, END_STREAM if end else 0, stream, content))

    def read_until(self, condition):
        """Read frames until ``condition(came)``; fails after a minute without any."""
        while not condition(self.came):
            kind, flags, stream, content = self._read_frame()
            if kind == SETTINGS and not flags & ACK:
                self._socket.sendall(frame(SETTINGS, ACK, 0, b""))
            elif kind == PING and not flags & ACK:
                self._socket.sendall(frame(PING, ACK, 0, content))
            self.came[stream].append((kind, flags, content))

    def most_streams(self):
        """Return the number of concurrent calls that the server allows on this connection."""
        self.read_until(lambda came: any(kind == SETTINGS for kind, *_ in came[0]))
        content = next(content for kind, _, content in self.came[0] if kind == SETTINGS)
        return dict(struct.iter_unpack(">HI", content)).get(_MAX_CONCURRENT_STREAMS, 2**31)

    def _read_frame(self):
        head = self._take(9)
        size, kind, flags, stream = (
            struct.unpack(">I", b"\0" + head[:3])[0],
            *struct.unpack(">BBI", head[3:]),
        )
        return kind, flags, stream, self._take(size)

    def _take(self, count):
        while len(self._unread) < count:
            more = self._socket.recv(65536)
            if not more:
                raise ConnectionError("the server closed the connection")
            self._unread += more
        found, self._unread = self._unread[:count], self._unread[count:]
        return found


def is_over(came, stream=1):
    """Return True when the server has ended a stream."""
    return any(
        kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM)
        for kind, flags, _ in came[stream]
    )
