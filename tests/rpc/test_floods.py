"""What one client's connection can cost the others: memory, time, their calls."""

import gc
import os
import struct
import subprocess
import sys
from contextlib import ExitStack, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.kit.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    HEADERS,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    head_block,
    in_frames,
    literal,
    prefixed,
    reset,
    window,
)
from bench.kit.waiting import PATIENCE_S, eventually
from serve.config import ServerConfig
from serve.rpc import native_front
from serve.rpc.server import GrpcServer
from serve.wire.messages import INFER_METHOD, STREAM_METHOD, decode_response
from tests.rpc.fakes import FACTS
from tests.rpc.http2 import Http2, is_over
from tests.rpc.requests import MESSAGE, infer, native, request

MIB = 2**20


@pytest.fixture
def serving(engine):
    """Return a function that starts a native front with options, and returns its server."""
    with ExitStack() as stack:

        def start(**options):
            config = ServerConfig(grpc_port=0, front="native", **options)
            server = GrpcServer(engine, lambda: FACTS, lambda _: {}, config)
            server.port = server.start()
            stack.callback(server.stop, 2.0)
            return server

        yield start


def resident_bytes():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


#: Frames that belong to no call.
CONTROL = {
    "pings": frame(PING, 0, 0, bytes(8)),
    "settings": frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65535)),
    "priorities": frame(PRIORITY, 0, 1, struct.pack(">IB", 0, 7)),
}


@native
@pytest.mark.parametrize("kind", CONTROL)
def test_frames_of_no_call_end_the_connection_when_they_are_many(server, channel, kind):
    with Http2(server.port) as client:
        # In small parts, between which the server may answer, and each answer is read.
        for _ in range(20):
            try:
                client.send(CONTROL[kind] * 100, frame(PING, 0, 0, b"anything"))
                done = len(client.came[0])
                client.read_until(lambda came, done=done: len(came[0]) > done)
            except OSError:
                break
        assert client.end_of_connection() in (ENHANCE_YOUR_CALM, None)
    eventually(lambda: server.refused["control_frames"] == 1)
    assert infer(channel) == "r"


def test_pings_of_a_client_that_makes_calls_are_welcome(server):
    def infer_and_ping(client):
        client.send(frame(PING, 0, 0, bytes(8)))
        stream = client.head(INFER_METHOD)
        client.message(stream, MESSAGE, end=True)
        client.read_until(lambda came: len(came[stream]) >= 3)
        client.send(window(0, 1000))

    with Http2(server.port) as client:
        for _ in range(1500 if server.front == "native" else 1):
            infer_and_ping(client)


def test_a_client_that_waits_for_its_answer_may_ping(server, engine):
    engine.held = {"held"}
    with Http2(server.port) as client:
        stream = client.head(INFER_METHOD)
        client.message(stream, request(2, "held"), end=True)
        engine.wait_for_calls(1)
        client.ping()
        assert not is_over(client.came, stream)
        engine.let_go()
        client.read_until(lambda came: is_over(came, stream))
        data = b"".join(content for kind, _, content in client.came[stream] if kind == DATA)
    assert decode_response(data[5:]).request_id == "held"


@pytest.mark.parametrize("kind", CONTROL)
def test_answers_that_nobody_reads_take_little_memory(server, channel, kind):
    infer(channel)
    before = resident_bytes()
    with Http2(server.port) as client:
        client.send_while_taken(CONTROL[kind] * 200, 64 * MIB)
        assert infer(channel) == "r"
        assert resident_bytes() < before + 128 * MIB


def test_claims_of_large_messages_keep_nobody_out(server, channel):
    with Http2(server.port) as client:
        for _ in range(60):
            client.data(client.head(INFER_METHOD), prefixed(claims=MIB))
        eventually(lambda: begun(server) == 60)
        assert infer(channel) == "r"
    assert not server.refused.get("receiving_bytes")


def begun(server):
    if server.front == "python":
        return sum(map(len, server._threads._awaited))
    return server._front._front.counts()["open_calls"]


@native
def test_whoever_has_sent_the_most_loses_a_call_first(server, channel):
    infer(channel)
    before = resident_bytes()
    with ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(Http2(server.port))
            client.most_streams()  # its window of 1 MiB holds from now on
            for _ in range(32):
                stream = client.head(INFER_METHOD)
                client.send(in_frames(stream, prefixed(bytes(900_000), claims=MIB)))
        eventually(lambda: server.refused["receiving_bytes"] > 40)
        assert infer(channel) == "r"
        assert resident_bytes() < before + 160 * MIB
    eventually(lambda: begun(server) == 0)
    assert infer(channel) == "r"


def test_frames_of_one_byte_take_little_memory(server, channel, engine):
    infer(channel)
    engine.hold_all = True
    before = resident_bytes()
    with Http2(server.port) as client:
        streams = [client.head(STREAM_METHOD) for _ in range(4)]
        for stream in streams:
            for _ in range(300):  # more than a stream's window, so that its reader pauses
                client.message(stream, MESSAGE)
        tiny = [in_frames(stream, b"\0") for stream in streams]
        client.send_while_taken(b"".join(one * 20_000 for one in tiny), 24 * MIB)
        assert resident_bytes() < before + 128 * MIB
        engine.let_go()
        assert infer(channel) == "r"


@native
def test_cancelled_streams_give_back_what_their_connection_may_send(server, engine):
    engine.hold_all = True
    window_bytes, sent_bytes = 16 * MIB, 0

    def given_bytes(came):
        updates = (content for kind, _, content in came[0] if kind == WINDOW_UPDATE)
        return 65_535 + sum(struct.unpack(">I", content)[0] for content in updates)

    with Http2(server.port) as client:
        for _ in range(40):
            stream = client.head(STREAM_METHOD)
            asked = len(engine.calls)
            for _ in range(300):  # more than a stream's window: its reader pauses
                client.message(stream, MESSAGE)
            eventually(lambda asked=asked: len(engine.calls) >= asked + 64)
            rest = prefixed(bytes(700_000))
            client.send(in_frames(stream, rest))
            sent_bytes += 300 * (len(MESSAGE) + 5) + len(rest)
            client.send(reset(stream))
            needed_bytes = sent_bytes + MIB
            client.read_until(lambda came, needed=needed_bytes: given_bytes(came) >= needed)
            eventually(lambda: server.in_flight == 0)
    assert sent_bytes > window_bytes


@native
def test_an_answer_that_nobody_reads_is_dropped(front, serving, monkeypatch):
    monkeypatch.setattr(native_front, "_SEND_TIMEOUT_S", 1.0)
    server = serving()
    with Http2(server.port, window_bytes=0) as deaf:
        streams = [deaf.head(INFER_METHOD) for _ in range(10)]
        for stream in streams:
            deaf.message(stream, MESSAGE, end=True)
        deaf.read_until(
            lambda came: all(
                any(kind == RST_STREAM for kind, *_ in came[stream]) for stream in streams
            )
        )
        eventually(lambda: server.in_flight == 0)
        assert server.refused["slow_reader"] == 10
        (code,) = {came[-1][2] for stream, came in deaf.came.items() if stream}
        assert struct.unpack(">I", code) == (ENHANCE_YOUR_CALM,)


@native
def test_one_connection_receives_and_is_sent_a_part_of_what_all_may(front, serving):
    """Its messages are refused; so are answers of which it reads a byte now and then."""
    server = serving(max_message="1 MiB", max_receiving_of_connection="2 MiB")
    with (
        Http2(server.port) as greedy,
        Http2(server.port, window_bytes=0) as trickling,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        greedy.most_streams()  # its window of 1 MiB holds from now on
        for _ in range(4):
            stream = greedy.head(INFER_METHOD)
            greedy.send(in_frames(stream, prefixed(bytes(900_000), claims=MIB)))
        eventually(lambda: server.refused["receiving_bytes"] == 2)
        assert infer(channel) == "r"
        trickling.most_streams()
        streams = [trickling.head(INFER_METHOD) for _ in range(10)]
        for stream in streams:
            content = prefixed(request(50_000))
            trickling.send(in_frames(stream, content), frame(DATA, END_STREAM, stream))

        def dropped():
            trickling.send(*(window(stream, 1) for stream in streams))
            return server.refused["slow_reader"] >= 3

        eventually(dropped)  # 600 kB of each
        assert infer(channel) == "r"


@native
def test_resets_end_the_connection_in_the_protocols_words(server, channel):
    with Http2(server.port) as client:
        block = head_block(INFER_METHOD)
        for first in range(1, 3000, 200):
            frames = (
                frame(HEADERS, END_HEADERS, stream, block) + reset(stream)
                for stream in range(first, first + 200, 2)
            )
            try:
                client.send(*frames)
            except OSError:
                break
        assert client.end_of_connection() in (ENHANCE_YOUR_CALM, None)
    eventually(lambda: server.refused["resets"] == 1)
    assert infer(channel) == "r"


@native
def test_the_gateways_connection_may_reset_what_its_clients_gave_up(server):
    with Http2(server.own_address) as client:
        block = head_block(INFER_METHOD)
        for first in range(1, 10_000, 200):
            client.send(
                *(
                    frame(HEADERS, END_HEADERS, stream, block) + reset(stream)
                    for stream in range(first, first + 200, 2)
                )
            )
        client.send(frame(HEADERS, END_HEADERS, 10_001, block))
        client.message(10_001, MESSAGE, end=True)
        client.read_until(lambda came: is_over(came, 10_001))
    assert server.refused["resets"] == 0


@native
def test_making_the_server_reset_streams_counts_as_resetting_them(server, channel):
    block = head_block(INFER_METHOD)
    with Http2(server.port) as client:
        for first in range(1, 6000, 100):
            streams = range(first, first + 100, 2)
            try:
                client.send(
                    *(
                        frame(HEADERS, END_HEADERS, stream, block) + window(stream, 2**31 - 1)
                        for stream in streams
                    )
                )
                client.read_until(lambda came, streams=streams: all(came[one] for one in streams))
            except OSError:
                break
        client.end_of_connection()
    eventually(lambda: server.refused["resets"] == 1)
    assert infer(channel) == "r"


def test_a_header_told_a_thousand_times_is_refused(server, channel):
    infer(channel)
    before = resident_bytes()
    with Http2(server.port) as client:
        table = literal("bomb", first=b"\x40") + literal("b" * 3900, first=b"")
        for stream in range(1, 200, 2):
            block = head_block(INFER_METHOD) + (table if stream == 1 else b"") + b"\xbe" * 12_000
            try:
                client.send(frame(HEADERS, END_HEADERS, stream, block))
            except OSError:
                break
        assert infer(channel) == "r"
        assert resident_bytes() < before + 128 * MIB
    if server.front == "native":
        assert server.refused["header_size"] > 0


def test_a_client_writes_no_line_of_the_log(front):
    """Heads that are too large, on a server as the command starts it."""
    with subprocess.Popen(
        [sys.executable, "-c", AS_THE_COMMAND, front],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        port = int(process.stdout.readline())
        with Http2(port) as client:
            table = literal("bomb", first=b"\x40") + literal("b" * 3900, first=b"")
            block = head_block(INFER_METHOD) + table + b"\xbe" * 12_000
            client.send(frame(HEADERS, END_HEADERS, 1, block))
            with suppress(OSError):
                client.read_until(is_over)
        assert process.communicate(b"\n")[1] == b""


AS_THE_COMMAND = """
import os, sys, types

def run():
    from serve.config import ServerConfig
    from serve.rpc.server import GrpcServer
    from tests.rpc.fakes import FACTS, FakeEngine
    config = ServerConfig(grpc_port=0, front=sys.argv[1])
    print(GrpcServer(FakeEngine(), lambda: FACTS, lambda _: {}, config).start(), flush=True)
    sys.stdin.readline()
    os._exit(0)

sys.modules["serve.cli"] = types.SimpleNamespace(main=run)
from serve.__main__ import main
main()
"""


def test_headers_without_an_end_end_the_connection(server, channel):
    infer(channel)
    before = resident_bytes()
    with Http2(server.port) as client:
        client.send(frame(HEADERS, 0, 1, head_block(INFER_METHOD)))
        more = frame(CONTINUATION, 0, 1, literal("a" * 100) + literal("b" * 12_000, first=b""))
        client.send_while_taken(more, 64 * MIB)
        assert infer(channel) == "r"
        assert resident_bytes() < before + 128 * MIB
        client.end_of_connection()


@native
def test_a_newcomer_gets_the_place_of_an_idle_connection(front, serving):
    server = serving(max_connections=8)
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(Http2(server.port))
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{server.port}"))
        assert infer(channel) == "r"
        assert server.refused["connections"] > 20


@native
def test_one_address_keeps_no_other_out(front, serving):
    """127.0.0.2 is another client as far as the server can tell."""
    server = serving(max_connections=16, max_connections_of_peer=4)
    with ExitStack() as stack:
        others = [stack.enter_context(Http2(server.port, source="127.0.0.2")) for _ in range(3)]
        for one in others:
            one.most_streams()
        busy = [stack.enter_context(Http2(server.port)) for _ in range(4)]
        for one in busy:
            one.head(INFER_METHOD)
        eventually(lambda: begun(server) == 4)
        for _ in range(40):
            more = stack.enter_context(Http2(server.port))
            assert more.end_of_connection() is None
        assert server.refused["peer_connections"] == 40
        assert server.refused["connections"] == 0
        # Those of the other address live on, and one that is idle gives its place up to its own.
        for one in others:
            one.ping()
        busy[0].send(reset(1))
        eventually(lambda: begun(server) == 3)
        stack.enter_context(Http2(server.port)).ping()
        assert busy[0].end_of_connection() is None
        assert server.refused["peer_connections"] == 41


@native
def test_connections_leave_descriptors_to_the_server(front, engine):
    """At a limit of open files, clients do not get the last 64."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", FEW_DESCRIPTORS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
        ExitStack() as stack,
    ):
        port = int(process.stdout.readline())
        for _ in range(300):
            stack.enter_context(Http2(port))
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert infer(channel) == "r"
            # What the server behind answers needs two descriptors more.
            health = health_pb2_grpc.HealthStub(channel)
            said = health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            assert said.status == health_pb2.HealthCheckResponse.SERVING
        refused, free = map(int, process.communicate(b"\n")[0].split())
    assert refused > 100
    assert free >= 50


FEW_DESCRIPTORS = """
import os, resource, sys
from serve.config import ServerConfig
from serve.rpc.server import GrpcServer
from tests.rpc.fakes import FACTS, FakeEngine
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
config = ServerConfig(grpc_port=0, front="native", max_connections_of_peer=1024)
server = GrpcServer(FakeEngine(), lambda: FACTS, lambda _: {}, config)
print(server.start(), flush=True)
sys.stdin.readline()
free = 256 - len(os.listdir("/proc/self/fd"))
print(server.refused["connections"], free, flush=True)
os._exit(0)
"""


@native
def test_a_slow_message_has_as_long_as_it_comes(front, serving, monkeypatch):
    """One that does not come ends; one that comes with enough bytes a second goes on."""
    monkeypatch.setattr(native_front, "_RECEIVE_BYTES_PER_S", 4)
    server = serving(receive_timeout_s=0.5)
    with Http2(server.port) as client:
        slow, still = client.head(INFER_METHOD), client.head(INFER_METHOD)
        client.data(slow, prefixed(MESSAGE)[:-1])  # some hundred bytes are worth a minute
        client.data(still, prefixed(MESSAGE)[:6])
        client.read_until(lambda came: is_over(came, still))
        assert server.refused["no_message"] == 1
        client.data(slow, prefixed(MESSAGE)[-1:], end=True)
        client.read_until(lambda came: is_over(came, slow))
        answer = b"".join(content for kind, _, content in client.came[slow] if kind == DATA)
        assert decode_response(answer[5:]).request_id == "r"


@native
def test_what_is_not_grpc_is_told_so(server):
    with Http2(server.port) as client:
        for sent, kind in enumerate(("text/html", "application/grpc-web+proto", None)):
            stream = 2 * sent + 1
            client.send(frame(HEADERS, END_HEADERS, stream, head_block("/", kind=kind)))
            client.read_until(lambda came, stream=stream: is_over(came, stream))
            said = b"".join(content for kind, _, content in client.came[stream] if kind == DATA)
            assert said == b"content-type: this port takes application/grpc alone\n"
        assert server.refused["media_type"] == 3
