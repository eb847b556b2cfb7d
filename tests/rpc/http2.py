"""A client that violates HTTP/2 on purpose, by frames written to a socket."""

import socket
import struct
from collections import defaultdict
from contextlib import suppress

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING = range(7)
GOAWAY, WINDOW_UPDATE, CONTINUATION = 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
#: Codes with which streams and connections end.
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT = range(5)
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = range(5, 10)
ENHANCE_YOUR_CALM = 11
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE = 3, 4


class Http2:
    """One connection; streams are 1, 3, 5 … in the order of ``head``."""

    def __init__(self, port, window_bytes=None, preface=PREFACE, source="127.0.0.1"):
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


def frame(kind, flags, stream, content=b"", size=None):
    """Return a frame; `size` is what its head claims."""
    size = len(content) if size is None else size
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + content


def reset(stream, code=CANCEL):
    """Return the frame that resets a stream."""
    return frame(RST_STREAM, 0, stream, struct.pack(">I", code))


def window(stream, more_bytes):
    """Return the frame that opens a window, of a connection for stream 0."""
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", more_bytes))


def in_frames(stream, content, size=16_000):
    """Return content as frames of `size` bytes."""
    return b"".join(
        frame(DATA, 0, stream, content[at : at + size]) for at in range(0, len(content), size)
    )


def is_over(came, stream=1):
    """Return True when the server has ended a stream."""
    return any(
        kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM)
        for kind, flags, _ in came[stream]
    )


def prefixed(content=b"", claims=None):
    """Return a message with its head, which may claim another size."""
    return struct.pack(">BI", 0, len(content) if claims is None else claims) + content


def head_block(path, *more, kind="application/grpc"):
    """Encode the headers of a call with a content-type, and (name, value) of others."""
    fields = (
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"),
        ("te", "trailers"), *more,
    )  # fmt: skip
    if kind is not None:
        fields += (("content-type", kind),)
    return b"".join(literal(name) + literal(value, first=b"") for name, value in fields)


def literal(text, first=b"\0"):
    """Encode a header's name (an unindexed literal with its `first` byte) or its value."""
    size = len(text)
    if size < 127:
        return first + bytes((size,)) + text.encode()
    size, more = size - 127, b""
    while size >= 128:
        more, size = more + bytes((128 | size & 127,)), size >> 7
    return first + b"\x7f" + more + bytes((size,)) + text.encode()
