"""Games with windows, tables and frames that the protocol allows: what each costs the others."""

import struct
import threading

import pytest

from bench.kit.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    SETTINGS,
    frame,
    head_block,
    in_frames,
    literal,
    prefixed,
    window,
)
from bench.kit.waiting import eventually
from serve.wire.messages import INFER_METHOD
from tests.rpc.http2 import Http2
from tests.rpc.requests import infer, native, request
from tests.rpc.test_floods import MIB, begun, resident_bytes

pytestmark = native

_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4
#: A type of frame that nobody has defined.
UNKNOWN = 0x42


def setting(name, value):
    return frame(SETTINGS, 0, 0, struct.pack(">HI", name, value))


def bytes_for_each_stream(client):
    """Answers of some hundred kB wait, and are let go a byte at a time."""
    streams = [client.head(INFER_METHOD) for _ in range(8)]
    for stream in streams:
        content = prefixed(request(30_000))
        client.send(in_frames(stream, content), frame(DATA, END_STREAM, stream))
    return b"".join(window(stream, 1) for stream in streams) * 100


def windows_that_change(client):
    """Each setting changes the window of every stream that is open."""
    client.head(INFER_METHOD, 60)
    flip = setting(_INITIAL_WINDOW_SIZE, 0) + setting(_INITIAL_WINDOW_SIZE, 2**31 - 1)
    return flip * 50 + window(0, 1) * 100


def empty_continuations(client):
    """A header list of one call goes on and on, and says nothing."""
    client.send(frame(HEADERS, 0, 1, head_block(INFER_METHOD)))
    return frame(CONTINUATION, 0, 1) * 1000


def tables_that_change(client):
    """Headers fill the table of the decoder, empty it and fill it again."""
    big = literal("x", first=b"\x40") + literal("y" * 3900, first=b"")
    empty, full = b"\x20", b"\x3f\xe1\x1f"  # sizes of 0 and of 4096 bytes
    block = empty + full + head_block(INFER_METHOD) + big * 3
    streams = range(1, 4001, 2)
    return b"".join(frame(HEADERS, END_HEADERS, stream, block) for stream in streams)


def a_large_table(client):
    """The client says that it takes answers with a table of 4 GiB."""
    stream = client.head("/no/such/method")
    client.message(stream, end=True)
    return setting(_TABLE_SIZE, 2**32 - 1) + setting(_TABLE_SIZE, 0)


def frames_of_no_kind(client):
    """Frames that a receiver is to ignore, of no stream and of one."""
    client.head(INFER_METHOD)
    return frame(UNKNOWN, 255, 0) * 500 + frame(UNKNOWN, 0, 1, b"anything") * 500


def padding(client):
    """A call's frames hold padding alone, and pings between them."""
    client.head(INFER_METHOD)
    padded = frame(DATA, PADDED, 1, bytes((255,)) + bytes(255))
    return (padded + frame(PING, 0, 0, bytes(8))) * 50


GAMES = (
    bytes_for_each_stream, windows_that_change, empty_continuations, tables_that_change,
    a_large_table, frames_of_no_kind, padding,
)  # fmt: skip


@pytest.mark.parametrize("reads", [False, True], ids=["deaf", "reads"])
@pytest.mark.parametrize("game", GAMES)
def test_a_game_keeps_nobody_waiting_and_takes_little_memory(server, channel, game, reads):
    infer(channel)
    before = resident_bytes()
    with Http2(server.port, window_bytes=0) as client:
        client.most_streams()
        content = game(client)
        player = threading.Thread(target=client.send_while_taken, args=(content, 8 * MIB))
        listener = threading.Thread(target=client.end_of_connection)
        player.start()
        if reads:
            listener.start()
        answered = 0
        while player.is_alive() or not answered:
            assert infer(channel) == "r"
            assert resident_bytes() < before + 128 * MIB
            answered += 1
            player.join(0.02)
        client.close()
        if reads:
            listener.join()
    eventually(lambda: begun(server) == 0)
    assert infer(channel) == "r"
    eventually(lambda: server.in_flight == 0)
