"""Frames of HTTP/2, right or wrong on purpose, as bytes."""

import struct

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING = range(7)
GOAWAY, WINDOW_UPDATE, CONTINUATION = 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
#: Codes with which streams and connections end.
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT = range(5)
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = range(5, 10)
ENHANCE_YOUR_CALM = 11
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(
    kind: int, flags: int, stream: int, content: bytes = b"", size: int | None = None
) -> bytes:
    """Return a frame; `size` is what its head claims."""
    size = len(content) if size is None else size
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + content


def reset(stream: int, code: int = CANCEL) -> bytes:
    """Return the frame that resets a stream."""
    return frame(RST_STREAM, 0, stream, struct.pack(">I", code))


def window(stream: int, more_bytes: int) -> bytes:
    """Return the frame that opens a window, of a connection for stream 0."""
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", more_bytes))


def in_frames(stream: int, content: bytes, size: int = 16_000) -> bytes:
    """Return content as frames of `size` bytes."""
    return b"".join(
        frame(DATA, 0, stream, content[at : at + size]) for at in range(0, len(content), size)
    )


def prefixed(content: bytes = b"", claims: int | None = None) -> bytes:
    """Return a message with its head, which may claim another size."""
    return struct.pack(">BI", 0, len(content) if claims is None else claims) + content


def head_block(path: str, *more: tuple[str, str], kind: str | None = "application/grpc") -> bytes:
    """Encode the headers of a call with a content-type, and (name, value) of others."""
    fields = (
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"),
        ("te", "trailers"), *more,
    )  # fmt: skip
    if kind is not None:
        fields += (("content-type", kind),)
    return b"".join(literal(name) + literal(value, first=b"") for name, value in fields)


def literal(text: str, first: bytes = b"\0") -> bytes:
    """Encode a header's name (an unindexed literal with its `first` byte) or its value."""
    size = len(text)
    if size < 127:
        return first + bytes((size,)) + text.encode()
    size, more = size - 127, b""
    while size >= 128:
        more, size = more + bytes((128 | size & 127,)), size >> 7
    return first + b"\x7f" + more + bytes((size,)) + text.encode()
