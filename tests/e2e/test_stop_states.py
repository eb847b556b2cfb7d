"""SIGTERM in whatever state a server is: it ends in time, and nothing of it is left."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.kit.http2_frames import in_frames, prefixed
from bench.kit.servers import ServerProcess
from serve.wire.messages import INFER_METHOD, STREAM_METHOD
from tests.processes import descendants, http_get, is_running, wait_for
from tests.rpc.http2 import Http2

#: Beyond both together the server ends itself by force, with code 1. The latter is 5 by default,
#: which a busy machine may exceed.
DRAIN_S, STOP_S = 2.0, 30.0


@contextmanager
def calls_that_never_send_a_message(server) -> Iterator[None]:
    """Half of them begin one."""
    with Http2(server.grpc_port) as bare, Http2(server.grpc_port) as begun:
        bare.head(INFER_METHOD, 100)
        for _ in range(50):
            begun.send(in_frames(begun.head(INFER_METHOD), prefixed(b"", claims=1 << 20)))
        begun.ping()
        yield


@contextmanager
def clients_that_read_nothing(server) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(10):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port)))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 500)
            events = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port)))
            events.sendall(b"GET /live/events HTTP/1.1\r\nHost: a\r\n\r\n")
        yield


@contextmanager
def streams_and_watches(server) -> Iterator[None]:
    with ExitStack() as stack:
        client = stack.enter_context(Http2(server.grpc_port))
        client.head(STREAM_METHOD, 30)
        channel = stack.enter_context(grpc.insecure_channel(server.target))
        watch = health_pb2_grpc.HealthStub(channel).Watch
        open_calls = [watch(health_pb2.HealthCheckRequest()) for _ in range(30)]
        for one in open_calls:
            next(one)
        yield


@contextmanager
def a_gateway_that_stands_still(server) -> Iterator[None]:
    (gateway,) = (
        pid for pid, words in descendants(server.pid).items() if "serve.rest.run" in words
    )
    os.kill(gateway, signal.SIGSTOP)
    yield


STATES = (
    calls_that_never_send_a_message, clients_that_read_nothing, streams_and_watches,
    a_gateway_that_stands_still,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_stop_ends_in_time(tmp_path, state):
    sections = {
        "server": {"drain_timeout_s": DRAIN_S, "stop_timeout_s": STOP_S},
        "models": {"load": ["gcn"]},
    }
    with ServerProcess(tmp_path, sections=sections) as server, state(server):
        processes = descendants(server.pid)
        assert server.stop() == 0, server.log.read_text()[-3000:]
    wait_for(lambda: not any(map(is_running, processes)), "the end of all processes")
    assert http_get(server, "/v2/health/live")[0] == 0
