"""The rules of HTTP/2 (RFC 9113) and HPACK (RFC 7541), broken one by one.

Each violation ends its stream or its connection. The list has every case of h2spec, the conformance
test of HTTP/2, but one: libnghttp2 ignores HEADERS on a stream below the last one, as it keeps no
streams that are closed.
"""

import struct

import pytest

from bench.kit.http2_frames import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    frame,
    head_block,
    in_frames,
    literal,
    prefixed,
    reset,
    window,
)
from serve.wire.messages import INFER_METHOD, STREAM_METHOD, decode_response
from tests.rpc.http2 import Http2, is_over
from tests.rpc.requests import MESSAGE, infer, native

BODY = prefixed(MESSAGE)
BLOCK = head_block(INFER_METHOD)
HEAD = frame(HEADERS, END_HEADERS, 1, BLOCK)
EXTENSION = 0xBE
HAS_PRIORITY = 32
#: Huffman codes from appendix C of RFC 7541.
CUSTOM_KEY, NO_CACHE = bytes.fromhex("25a849e95ba97d7f"), bytes.fromhex("a8eb10649cbf")


def number(value):
    return struct.pack(">I", value)


def header(name, value):
    return literal(name) + literal(value, first=b"")


def setting(name, value):
    return struct.pack(">HI", name, value)


def headers(*, without=(), **fields):
    """Return a head block: `fields` replaces what calls have, `without` names what is left out."""
    usual = {":method": "POST", ":scheme": "http", ":path": INFER_METHOD}
    usual |= {f":{name}": value for name, value in fields.items()}
    return b"".join(header(name, usual[name]) for name in usual if name not in without)


def huffman(code):
    """Return a literal string whose Huffman code is given."""
    return bytes((0x80 | len(code),)) + code


#: What ends a connection, with the code that tells why.
FATAL = {
    "DATA on stream 0": (frame(DATA, 0, 0, b"x"), PROTOCOL_ERROR),
    "HEADERS on stream 0": (frame(HEADERS, END_HEADERS, 0, BLOCK), PROTOCOL_ERROR),
    "RST_STREAM on stream 0": (reset(0), PROTOCOL_ERROR),
    "SETTINGS on a stream": (frame(SETTINGS, 0, 1), PROTOCOL_ERROR),
    "PING on a stream": (frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "GOAWAY on a stream": (frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "DATA on an idle stream": (frame(DATA, 0, 9, b"x"), PROTOCOL_ERROR),
    "RST_STREAM on an idle stream": (reset(9), PROTOCOL_ERROR),
    "WINDOW_UPDATE on an idle stream": (window(9, 1), PROTOCOL_ERROR),
    "an even stream": (frame(HEADERS, END_HEADERS, 2, BLOCK), PROTOCOL_ERROR),
    "PUSH_PROMISE by a client": (
        frame(HEADERS, END_HEADERS, 1, BLOCK)
        + frame(PUSH_PROMISE, END_HEADERS, 1, number(2) + BLOCK),
        PROTOCOL_ERROR,
    ),
    "CONTINUATION of nothing": (frame(CONTINUATION, END_HEADERS, 1, BLOCK), PROTOCOL_ERROR),
    "HEADERS without an end, then DATA": (
        frame(HEADERS, 0, 1, BLOCK) + frame(DATA, 0, 1, b"x"),
        PROTOCOL_ERROR,
    ),
    "CONTINUATION of another stream": (
        frame(HEADERS, 0, 1, BLOCK) + frame(CONTINUATION, END_HEADERS, 3, BLOCK),
        PROTOCOL_ERROR,
    ),
    "PRIORITY on stream 0": (frame(PRIORITY, 0, 0, number(1) + b"\x01"), PROTOCOL_ERROR),
    "PRIORITY within headers": (
        frame(HEADERS, 0, 1, BLOCK) + frame(PRIORITY, 0, 1, number(0) + b"\x01"),
        PROTOCOL_ERROR,
    ),
    "HEADERS of another stream within headers": (
        frame(HEADERS, 0, 1, BLOCK) + frame(HEADERS, END_HEADERS, 3, BLOCK),
        PROTOCOL_ERROR,
    ),
    "a frame of an unknown type within headers": (
        frame(HEADERS, 0, 1, BLOCK) + frame(EXTENSION, 0, 1, b"x"),
        PROTOCOL_ERROR,
    ),
    "CONTINUATION on stream 0": (
        frame(HEADERS, 0, 1, BLOCK) + frame(CONTINUATION, END_HEADERS, 0, BLOCK),
        PROTOCOL_ERROR,
    ),
    "CONTINUATION after headers' end": (
        HEAD + frame(CONTINUATION, END_HEADERS, 1, BLOCK),
        PROTOCOL_ERROR,
    ),
    "CONTINUATION after continued headers' end": (
        frame(HEADERS, 0, 1, BLOCK[:20])
        + frame(CONTINUATION, END_HEADERS, 1, BLOCK[20:])
        + frame(CONTINUATION, END_HEADERS, 1, BLOCK),
        PROTOCOL_ERROR,
    ),
    "CONTINUATION after data": (
        HEAD + frame(DATA, 0, 1, BODY[:9]) + frame(CONTINUATION, END_HEADERS, 1, BLOCK),
        PROTOCOL_ERROR,
    ),
    "a PING of 7 bytes": (frame(PING, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    "SETTINGS of 5 bytes": (frame(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
    "an acknowledgement with settings": (
        frame(SETTINGS, ACK, 0, setting(4, 1)),
        FRAME_SIZE_ERROR,
    ),
    "WINDOW_UPDATE of 3 bytes": (frame(WINDOW_UPDATE, 0, 0, bytes(3)), FRAME_SIZE_ERROR),
    "RST_STREAM of 3 bytes": (
        frame(HEADERS, END_HEADERS, 1, BLOCK) + frame(RST_STREAM, 0, 1, bytes(3)),
        FRAME_SIZE_ERROR,
    ),
    "a frame that is too large": (
        frame(HEADERS, END_HEADERS, 1, BLOCK) + frame(DATA, 0, 1, b"", size=2**20 + 1),
        FRAME_SIZE_ERROR,
    ),
    "a window beyond 2^31 - 1": (
        window(0, 2**31 - 1) * 2,
        FLOW_CONTROL_ERROR,
    ),
    "a window larger by nothing": (window(0, 0), PROTOCOL_ERROR),
    "a stream's window larger by nothing": (HEAD + window(1, 0), PROTOCOL_ERROR),
    "headers that depend on themselves": (
        frame(HEADERS, END_HEADERS | HAS_PRIORITY, 1, number(1) + b"\x10" + BLOCK),
        PROTOCOL_ERROR,
    ),
    "a priority that depends on itself": (
        frame(PRIORITY, 0, 1, number(1) + b"\x10"),
        PROTOCOL_ERROR,
    ),
    "a priority of 4 bytes": (HEAD + frame(PRIORITY, 0, 1, number(0)), FRAME_SIZE_ERROR),
    "an initial window beyond 2^31 - 1": (
        frame(SETTINGS, 0, 0, setting(4, 2**31)),
        FLOW_CONTROL_ERROR,
    ),
    "a largest frame of 1 byte": (frame(SETTINGS, 0, 0, setting(5, 1)), PROTOCOL_ERROR),
    "a largest frame beyond 2^24 - 1": (
        frame(SETTINGS, 0, 0, setting(5, 2**24)),
        PROTOCOL_ERROR,
    ),
    "push neither on nor off": (frame(SETTINGS, 0, 0, setting(2, 2)), PROTOCOL_ERROR),
    "padding longer than the frame": (
        frame(HEADERS, END_HEADERS, 1, BLOCK) + frame(DATA, PADDED, 1, b"\xff" + BODY[:100]),
        PROTOCOL_ERROR,
    ),
    "padding longer than the headers": (
        frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + BLOCK),
        PROTOCOL_ERROR,
    ),
    "a header of no number": (frame(HEADERS, END_HEADERS, 1, BLOCK + b"\x80"), COMPRESSION_ERROR),
    "a header's name that is in no table": (
        frame(HEADERS, END_HEADERS, 1, BLOCK + b"\x7f\x7f\x01x"),
        COMPRESSION_ERROR,
    ),
    "another size of the table at the end": (
        frame(HEADERS, END_HEADERS, 1, BLOCK + b"\x21"),
        COMPRESSION_ERROR,
    ),
    "a table beyond its limit": (
        frame(HEADERS, END_HEADERS, 1, b"\x3f\xe2\x1f" + BLOCK),
        COMPRESSION_ERROR,
    ),
    "a Huffman code padded by a byte": (
        frame(HEADERS, END_HEADERS, 1, BLOCK + b"\0" + huffman(CUSTOM_KEY + b"\xff") + b"\x01v"),
        COMPRESSION_ERROR,
    ),
    "a Huffman code padded by zeros": (
        frame(HEADERS, END_HEADERS, 1, BLOCK + b"\0" + huffman(CUSTOM_KEY[:-1] + b"\x70")),
        COMPRESSION_ERROR,
    ),
    "a Huffman code with an end": (
        frame(HEADERS, END_HEADERS, 1, BLOCK + b"\0" + huffman(bytes(4 * b"\xff")) + b"\x01v"),
        COMPRESSION_ERROR,
    ),
    "a header that is in no table": (
        frame(HEADERS, END_HEADERS, 1, BLOCK + b"\xff\xff\x7f"),
        COMPRESSION_ERROR,
    ),
    "a header that is cut": (
        frame(HEADERS, END_HEADERS, 1, BLOCK + b"\x00\x05ab"),
        COMPRESSION_ERROR,
    ),
}

#: What ends its stream; the connection goes on.
OF_ITS_STREAM = {
    "a window beyond 2^31 - 1": (
        frame(HEADERS, END_HEADERS, 1, BLOCK) + window(1, 2**31 - 1),
        {FLOW_CONTROL_ERROR},
    ),
    **{
        f"no {name[1:]}": (
            frame(HEADERS, END_HEADERS, 1, headers(without=[name])),
            {PROTOCOL_ERROR},
        )
        for name in (":method", ":scheme", ":path")
    },
    **{
        f"{name[1:]} twice": (
            frame(HEADERS, END_HEADERS, 1, headers() + header(name, "POST")),
            {PROTOCOL_ERROR},
        )
        for name in (":method", ":scheme", ":path")
    },
    "an empty path": (frame(HEADERS, END_HEADERS, 1, headers(path="")), {PROTOCOL_ERROR}),
    "a pseudo-header of answers": (
        frame(HEADERS, END_HEADERS, 1, headers(status="200")),
        {PROTOCOL_ERROR},
    ),
    "a pseudo-header nobody knows": (
        frame(HEADERS, END_HEADERS, 1, headers(unknown="x")),
        {PROTOCOL_ERROR},
    ),
    "a pseudo-header in trailers": (
        HEAD + frame(HEADERS, END_HEADERS | END_STREAM, 1, header(":method", "POST")),
        {PROTOCOL_ERROR},
    ),
    "headers twice": (HEAD + HEAD, {PROTOCOL_ERROR}),
    "te that is not trailers": (
        frame(HEADERS, END_HEADERS, 1, headers() + header("te", "gzip")),
        {PROTOCOL_ERROR},
    ),
    "a name in capitals": (
        frame(HEADERS, END_HEADERS, 1, BLOCK + header("X-Y", "z")),
        {PROTOCOL_ERROR},
    ),
    "a pseudo-header after others": (
        frame(HEADERS, END_HEADERS, 1, BLOCK + header(":path", "/")),
        {PROTOCOL_ERROR},
    ),
    "a header of a connection": (
        frame(HEADERS, END_HEADERS, 1, BLOCK + header("connection", "x")),
        {PROTOCOL_ERROR},
    ),
    "a length that is not kept": (
        frame(HEADERS, END_HEADERS, 1, head_block(INFER_METHOD, ("content-length", "3")))
        + frame(DATA, END_STREAM, 1, BODY),
        {PROTOCOL_ERROR},
    ),
    "a length that two frames do not keep": (
        frame(HEADERS, END_HEADERS, 1, head_block(INFER_METHOD, ("content-length", str(len(BODY)))))
        + frame(DATA, 0, 1, BODY)
        + frame(DATA, END_STREAM, 1, b"x"),
        {PROTOCOL_ERROR},
    ),
}

#: What is allowed, and answered.
FINE = {
    "plain": (frame(HEADERS, END_HEADERS, 1, BLOCK) + frame(DATA, END_STREAM, 1, BODY)),
    "padded data": (
        frame(HEADERS, END_HEADERS, 1, BLOCK)
        + frame(DATA, PADDED | END_STREAM, 1, b"\x64" + BODY + bytes(100))
    ),
    "padded headers with a priority": (
        frame(
            HEADERS,
            END_HEADERS | PADDED | HAS_PRIORITY,
            1,
            b"\x03" + number(0) + b"\x10" + BLOCK + b"abc",
        )
        + frame(DATA, END_STREAM, 1, BODY)
    ),
    "headers in three frames": (
        frame(HEADERS, 0, 1, BLOCK[:20])
        + frame(CONTINUATION, 0, 1, BLOCK[20:30])
        + frame(CONTINUATION, END_HEADERS, 1, BLOCK[30:])
        + frame(DATA, END_STREAM, 1, BODY)
    ),
    "data byte by byte": (
        frame(HEADERS, END_HEADERS, 1, BLOCK)
        + in_frames(1, BODY, size=1)
        + frame(DATA, END_STREAM, 1)
    ),
    "trailers": (
        frame(HEADERS, END_HEADERS, 1, BLOCK)
        + frame(DATA, 0, 1, BODY)
        + frame(HEADERS, END_HEADERS | END_STREAM, 1, header("a", "b"))
    ),
    "frames of unknown types": (
        frame(EXTENSION, 0xFF, 0, b"what")
        + frame(HEADERS, END_HEADERS, 1, BLOCK)
        + frame(EXTENSION, 0, 1, b"is this")
        + frame(DATA, END_STREAM, 1, BODY)
    ),
    "a setting nobody knows, and a priority": (
        frame(SETTINGS, 0, 0, setting(0xFF00, 7))
        + frame(PRIORITY, 0, 1, number(0) + b"\x01")
        + frame(HEADERS, END_HEADERS, 1, BLOCK)
        + frame(DATA, END_STREAM, 1, BODY)
    ),
    "reasons nobody knows": (
        frame(HEADERS, END_HEADERS, 1, BLOCK)
        + frame(HEADERS, END_HEADERS, 3, BLOCK)
        + reset(3, 0xFF)
        + frame(GOAWAY, 0, 0, number(0) + number(0xFF))
        + frame(DATA, END_STREAM, 1, BODY)
    ),
    "an answer to a ping that nobody sent": (
        frame(PING, ACK, 0, bytes(8)) + HEAD + frame(DATA, END_STREAM, 1, BODY)
    ),
    "a priority of the lowest and the highest weight": (
        frame(PRIORITY, 0, 5, number(2**31 | 3) + b"\xff")
        + frame(PRIORITY, 0, 3, number(0) + b"\x00")
        + HEAD
        + frame(DATA, END_STREAM, 1, BODY)
    ),
    "headers in every form": (
        frame(
            HEADERS,
            END_HEADERS,
            1,
            b"\x20\x3f\xe1\x1f"  # the table is emptied, then has its usual size
            + b"\x83\x86"  # POST, http
            + BLOCK[len(header(":method", "POST")) + len(header(":scheme", "http")) :]
            + (b"\x40" + huffman(CUSTOM_KEY) + huffman(NO_CACHE))  # kept in the table
            + b"\xbe"  # from there
            + (b"\x10" + huffman(CUSTOM_KEY) + b"\x01v")  # in no table ever
            + (b"\x0f\x09" + huffman(NO_CACHE)),  # cache-control, by its number
        )
        + frame(DATA, END_STREAM, 1, BODY)
    ),
    "flags nobody knows": (
        frame(HEADERS, END_HEADERS | 0xC2, 1, BLOCK) + frame(DATA, END_STREAM | 0xF6, 1, BODY)
    ),
    "a reserved bit": (
        frame(HEADERS, END_HEADERS, 1 | 2**31, BLOCK) + frame(DATA, END_STREAM, 1 | 2**31, BODY)
    ),
}


@native
@pytest.mark.parametrize("what", FATAL)
def test_a_connection_ends_with_the_reason(server, channel, what):
    frames, code = FATAL[what]
    with Http2(server.port) as client:
        client.send(frames)
        assert client.end_of_connection() == code
    assert infer(channel) == "r"


@pytest.mark.parametrize(
    "preface", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00" * 20, b"PRI "]
)
def test_another_protocol_is_hung_up_on(server, channel, preface):
    with Http2(server.port, preface=preface) as client:
        client.send(bytes(100))
        client.end_of_connection()
    assert infer(channel) == "r"


@native
@pytest.mark.parametrize("what", OF_ITS_STREAM)
def test_a_stream_ends_and_its_connection_goes_on(server, what):
    frames, codes = OF_ITS_STREAM[what]
    with Http2(server.port) as client:
        client.send(frames)
        client.read_until(is_over)
        (code,) = (content for kind, _, content in client.came[1] if kind == RST_STREAM)
        assert struct.unpack(">I", code)[0] in codes
        client.send(frame(HEADERS, END_HEADERS, 3, BLOCK), frame(DATA, END_STREAM, 3, BODY))
        client.read_until(lambda came: is_over(came, 3))
        assert any(kind == DATA for kind, *_ in client.came[3])


@native
@pytest.mark.parametrize("what", FINE)
def test_what_is_allowed_is_answered(server, what):
    with Http2(server.port) as client:
        client.send(FINE[what])
        client.read_until(is_over)
        content = b"".join(content for kind, _, content in client.came[1] if kind == DATA)
        assert decode_response(content[5:]).request_id == "r"


@native
@pytest.mark.parametrize("path", [INFER_METHOD, STREAM_METHOD])
@pytest.mark.parametrize(
    "more", [frame(DATA, 0, 1, b"more"), frame(HEADERS, END_HEADERS, 1, BLOCK)]
)
def test_what_comes_after_the_end_is_refused(server, channel, engine, path, more):
    engine.hold_all = True
    with Http2(server.port) as client:
        client.send(
            frame(HEADERS, END_HEADERS, 1, head_block(path)),
            frame(DATA, END_STREAM, 1, BODY),
            more,
        )
        # RFC 9113, 5.1: an error of the stream or of the connection.
        client.read_until(lambda came: is_over(came) or any(k == GOAWAY for k, *_ in came[0]))
        resets = [content for kind, _, content in client.came[1] if kind == RST_STREAM]
        ends = [content[4:8] for kind, _, content in client.came[0] if kind == GOAWAY]
        (code,) = {struct.unpack(">I", one)[0] for one in (*resets, *ends)}
        assert code == STREAM_CLOSED
    engine.let_go()
    assert infer(channel) == "r"


@native
def test_an_answer_comes_as_its_window_opens(server):
    def content(came):
        return b"".join(content for kind, _, content in came[1] if kind == DATA)

    with Http2(server.port, window_bytes=1) as client:
        client.send(HEAD + frame(DATA, END_STREAM, 1, BODY))
        client.read_until(lambda came: content(came))
        assert len(content(client.came)) == 1
        # A smaller initial window makes that of the stream negative, by -1 here.
        client.send(frame(SETTINGS, 0, 0, setting(4, 5) + setting(4, 0)), window(1, 3))
        client.read_until(lambda came: len(content(came)) >= 3)
        client.ping()
        assert len(content(client.came)) == 3
        client.send(frame(SETTINGS, 0, 0, setting(4, 2**20)))
        client.read_until(is_over)
        assert decode_response(content(client.came)[5:]).request_id == "r"


def test_calls_beyond_the_limit_of_a_connection_are_refused(server, channel):
    with Http2(server.port) as client:
        most = client.most_streams()
        last = client.head(INFER_METHOD, most + 20)
        client.read_until(lambda came: is_over(came, last) or any(k == GOAWAY for k, *_ in came[0]))
    assert infer(channel) == "r"
