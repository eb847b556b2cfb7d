"""Attacks on a real server by clients that never make a request."""

import threading
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bench.kit.http2_frames import HEADERS
from bench.kit.waiting import eventually
from serve.config import ServerConfig
from serve.pb import gnnserve_pb2 as own_pb
from serve.rpc.server import GrpcServer
from serve.wire.messages import INFER_METHOD, STREAM_METHOD
from tests.rpc.fakes import FACTS, FakeEngine
from tests.rpc.http2 import Http2
from tests.rpc.requests import MESSAGE, infer

LONG_S = 60.0
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def check(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(), timeout=LONG_S).status


def threads():
    return sum(t.name.startswith("rpc") for t in threading.enumerate())


@contextmanager
def half_open(server, path, count):
    """Open `count` calls of a method that send their headers and nothing else."""
    submit, submitted = server._threads.submit, []
    server._threads.submit = lambda *args: (submitted.append(args[2]), submit(*args))[1]

    def begun():
        counts = server._front._front.counts() if server._front else {}
        # Of streams that are idle, most have given their places up.
        in_front = counts.get("streams") or counts.get("open_calls", 0)
        # The watchdog calls the server too.
        paths = [event.call_details.method for event in submitted]
        return paths.count(path.encode()) + in_front

    with ExitStack() as stack:
        for sent in range(0, count, 60):
            stack.enter_context(Http2(server.port)).head(path, 60)
            eventually(lambda sent=sent: begun() == sent + 60)
        yield


@pytest.mark.parametrize("path", [INFER_METHOD, STREAM_METHOD, CHECK, WATCH, REFLECT])
def test_calls_without_a_message_keep_nobody_from_the_server(server, channel, path):
    for workers in (server._threads._workers, *server._threads._apart.values()):
        workers._idle_s = 0.1
    before = threads()
    with half_open(server, path, 1200):
        assert infer(channel) == "r"
        assert check(channel) == SERVING
        assert infer(channel) == "r"
        # Calls that wait for a message have no thread.
        eventually(lambda: threads() < before + 100)
    eventually(lambda: threads() <= before)


@pytest.fixture
def hasty():
    """Yield a server that allows a message one second to arrive."""
    server = GrpcServer(
        FakeEngine(),
        lambda: FACTS,
        lambda _: {},
        ServerConfig(grpc_port=0, max_queue=16, receive_timeout_s=1.0),
    )
    with grpc.insecure_channel(f"127.0.0.1:{server.start()}") as channel:
        yield server, channel
    server.stop(2.0)


@pytest.mark.parametrize("path", [INFER_METHOD, WATCH])
def test_a_message_that_does_not_come_ends_its_call(hasty, path):
    server, channel = hasty
    never = threading.Event()
    nothing = iter(lambda: never.wait(LONG_S), True)
    calls = [channel.stream_unary(path).future(nothing) for _ in range(3)]
    try:
        for call in calls:
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert call.details() == "message: it was not complete 1 s after the call began"
    finally:
        never.set()
    assert server.refused["no_message"] == 3
    assert infer(channel) == "r"


def test_half_a_message_ends_its_call_too(hasty):
    server, channel = hasty
    with Http2(server._port) as client:
        stream = client.head(INFER_METHOD)
        client.data(stream, b"\0\0\0\0\x64half")
        client.read_until(lambda came: any(kind == HEADERS for kind, *_ in came[stream]))
    assert server.refused["no_message"] == 1
    assert infer(channel) == "r"


def test_a_connection_has_no_more_calls_than_fill_the_queue(server):
    with Http2(server.port) as client:
        assert client.most_streams() == 64


def refusal(call):
    assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return call.details()


@contextmanager
def channels(server, count):
    """Open `count` connections."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with ExitStack() as stack:
        yield [
            stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{server.port}", options))
            for _ in range(count)
        ]


def test_calls_of_reflection_are_few(server, channel):
    never = threading.Event()
    ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo

    def questions():
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        never.wait(LONG_S)

    open_calls = [ask(questions()) for _ in range(8)]
    assert all(next(call).list_services_response.service for call in open_calls)
    assert refusal(ask(questions())).startswith("8 reflection calls are open")
    assert server.refused["open_calls"] == 1
    open_calls[0].cancel()

    def answered():
        try:
            return next(ask(questions()))
        except grpc.RpcError:
            return None

    eventually(answered)
    never.set()


def test_watches_of_health_are_limited(server):
    with channels(server, 5) as connections:
        watches = [
            health_pb2_grpc.HealthStub(connections[i % 5]).Watch(health_pb2.HealthCheckRequest())
            for i in range(256)
        ]
        assert all(next(watch).status == SERVING for watch in watches)
        more = health_pb2_grpc.HealthStub(connections[0]).Watch(health_pb2.HealthCheckRequest())
        assert refusal(more).startswith("256 health watches are open")
        assert infer(connections[0]) == "r"


def test_a_watcher_that_does_not_read_harms_nobody(server, channel, engine, front):
    with Http2(server.port, window_bytes=0) as deaf, Http2(server.port, window_bytes=0) as other:
        for client in (deaf, other):
            watches = [client.head(WATCH) for _ in range(3)]
            for stream in watches:
                client.message(stream, end=True)
            # Each watch has begun, and its first status waits for the window to open.
            client.read_until(
                lambda came, watches=watches: all(
                    any(kind == HEADERS for kind, *_ in came[stream]) for stream in watches
                )
            )
        if front == "python":  # the native front takes what they do not read, and no thread waits
            eventually(lambda: threads() > 8)
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=LONG_S
        )
        assert next(watch).status == SERVING
        engine.ready = False
        assert next(watch).status == NOT_SERVING
        assert check(channel) == NOT_SERVING
        other.__exit__()
        engine.ready = True
        assert next(watch).status == SERVING
        assert check(channel) == SERVING
        watch.cancel()


def test_health_and_metadata_are_answered_while_requests_have_all_threads(server, engine):
    engine.hold_all = True
    with channels(server, 4) as connections:
        calls = [
            connections[i % 4].unary_unary(INFER_METHOD).future(MESSAGE, timeout=LONG_S)
            for i in range(200)
        ]
        # 64 have a thread, 64 wait for one, all others are refused.
        eventually(lambda: sum(call.done() for call in calls) == 72)
        assert check(connections[0]) == SERVING
        details = {refusal(call) for call in calls if call.done()}
        assert details == {"no thread is available for this call; try again later"}
        assert server.refused["no_thread"] == 72
        engine.let_go()
        assert sum(call.exception() is None for call in calls) == 128


@pytest.mark.parametrize("path", [INFER_METHOD, STREAM_METHOD])
def test_a_thread_that_cannot_be_started_ends_one_call(server, channel, monkeypatch, path):
    if path == STREAM_METHOD and server.front == "native":
        pytest.skip("a stream takes no thread there")
    start, failures = threading.Thread.start, [3]

    def scarce(thread):
        if thread.name in ("rpc", "rpc-open") and failures[0] > 0:
            failures[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    for _ in range(3):
        if path == INFER_METHOD:
            call = channel.unary_unary(path).future(MESSAGE, timeout=LONG_S)
        else:
            call = channel.stream_stream(path)(iter((MESSAGE,)), timeout=LONG_S)
        assert "no thread is available" in refusal(call)
    assert check(channel) == SERVING
    assert infer(channel) == "r"
    assert list(channel.stream_stream(STREAM_METHOD)(iter((MESSAGE,)), timeout=LONG_S))
    assert server.refused["no_thread"] == 3


def test_requests_of_a_stream_are_refused_without_threads(channel, monkeypatch):
    start, short = threading.Thread.start, True

    def scarce(thread):
        if short and thread.name == "rpc-stream":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    answers = list(channel.stream_stream(STREAM_METHOD)(iter((MESSAGE, MESSAGE)), timeout=LONG_S))
    assert len(answers) == 2
    assert all(b"no thread is available" in answer for answer in answers)
    short = False
    (answer,) = channel.stream_stream(STREAM_METHOD)(iter((MESSAGE,)), timeout=LONG_S)
    assert b"uid-1" in answer


def test_messages_for_the_library_are_small_and_well_formed(server, channel):
    estimate = channel.unary_unary("/gnnserve.v1.GnnServe/Estimate")
    big = own_pb.EstimateRequest(model="m" * 2**16).SerializeToString()
    call = estimate.future(big, timeout=LONG_S)
    assert f"message: {len(big)} bytes, at most 65536 are taken" in refusal(call)
    call = estimate.future(b"\xff", timeout=LONG_S)
    assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert call.details().startswith("malformed message of /gnnserve.v1.GnnServe/Estimate")
    call = channel.unary_unary(INFER_METHOD).future(b"\x3a\x00" * 2**19, timeout=LONG_S)
    assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "more than 16384 bytes beside the contents of tensors" in call.details()
    assert (server.refused["message_size"], server.refused["malformed"]) == (1, 2)
