"""What one client cannot do however hard it tries: the whole figures are slow, a part is quick."""

import ctypes
import os
import threading
from collections import deque
from contextlib import ExitStack, suppress

import grpc
import pytest

from bench.kit.http2_frames import PING, frame, in_frames, prefixed
from bench.kit.waiting import eventually, wait_for
from serve.config import ServerConfig
from serve.rpc.server import GrpcServer
from serve.wire.messages import INFER_METHOD
from tests.rpc.fakes import FACTS
from tests.rpc.http2 import Http2
from tests.rpc.requests import infer, native
from tests.rpc.test_attacks import SERVING, check
from tests.rpc.test_floods import MIB, begun, resident_bytes

pytestmark = native


def sizes(part, whole):
    """Return the marks for a test's `size`: a part of the figure, and all of it."""
    return pytest.mark.parametrize(
        "size", [part, pytest.param(whole, marks=pytest.mark.slow)], ids=["part", "whole"]
    )


@pytest.fixture
def usual(front, engine):
    """A server with the limits that it has by default."""
    server = GrpcServer(engine, lambda: FACTS, lambda _: {}, ServerConfig(grpc_port=0, front=front))
    server.port = server.start()
    yield server
    engine.let_go()
    server.stop(2.0)


@pytest.fixture
def channel(usual):
    with grpc.insecure_channel(f"127.0.0.1:{usual.port}") as channel:
        infer(channel)
        yield channel


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@sizes(400, 5_000)
def test_connections_of_one_address(usual, channel, size):
    """No more than its share is open at once, and whoever asks is answered."""
    before = descriptors()
    kept = deque()
    with ExitStack() as stack:
        for number in range(size):
            client = stack.enter_context(Http2(usual.port))
            kept.append(client)
            if len(kept) > 300:  # this process holds both ends
                kept.popleft().__exit__()
            if number % 100 == 0:
                assert infer(channel) == "r"
        counts = usual._front._front.counts()
        assert counts["open_connections"] <= 256
        assert descriptors() <= before + 300 + 256 + 64
        assert infer(channel) == "r"
    assert usual.refused["peer_connections"] > size - 400


@sizes(2_000, 10_000)
def test_heads_without_messages_on_one_connection(usual, channel, size):
    """Their number is bounded, and those beyond end the connection or are refused."""
    most = usual._pools.calls_of_a_connection
    seen = 0
    with Http2(usual.port) as client:
        try:
            for _ in range(size // 100):
                client.head(INFER_METHOD, 100)
                seen = max(seen, begun(usual))
                assert infer(channel) == "r"
        except OSError:
            pass  # the connection has ended
        assert 0 < seen <= most + 1
    eventually(lambda: begun(usual) == 0)


@sizes((5, 200), (100, 200))
def test_half_open_calls_over_many_connections(usual, channel, size):
    """They take no thread and no place of others, and health is right meanwhile."""
    connections, calls = size
    infer(channel)
    check(channel)
    threads = threading.active_count()
    with ExitStack() as stack:
        for _ in range(connections):
            stack.enter_context(Http2(usual.port)).head(INFER_METHOD, calls)
            assert infer(channel) == "r"
        assert check(channel) == SERVING
        assert threading.active_count() <= threads + 4
        assert usual.in_flight == 0
    eventually(lambda: begun(usual) == 0)
    assert infer(channel) == "r"


def free_again():
    """Return what is resident without what the allocator keeps, also of this process's clients."""
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def answers_to_pings(client):
    return sum(kind == PING for kind, *_ in client.came[0])


@sizes(1, 4)
def test_messages_that_are_begun_and_never_ended(usual, channel, size):
    """Each of `size` clients offers 256 MiB; what is held of all is bounded, and given back."""
    before = resident_bytes()
    most_bytes = 600 * MIB
    part = bytes(900_000)  # less than a stream's window
    with ExitStack() as stack:
        clients = [stack.enter_context(Http2(usual.port)) for _ in range(size)]

        def offer(client):
            client.most_streams()  # its windows hold from now on
            with suppress(OSError):  # refused so often that the connection ends
                for _ in range(8):
                    stream = client.head(INFER_METHOD)
                    client.send(in_frames(stream, prefixed(b"", claims=33 * MIB)))
                    for _ in range(35):
                        client.send(in_frames(stream, part))
                        pings = answers_to_pings(client)
                        client.send(frame(PING, 0, 0, b"taken it"))
                        client.read_until(lambda _, pings=pings: answers_to_pings(client) > pings)

        threads = [threading.Thread(target=offer, args=(client,)) for client in clients]
        for one in threads:
            one.start()
        for one in threads:
            while one.is_alive():
                assert resident_bytes() < before + most_bytes
                assert infer(channel) == "r"
                one.join(0.02)  # asking all the time, this thread would keep theirs from sending
        assert resident_bytes() < before + most_bytes
    eventually(lambda: begun(usual) == 0)
    assert infer(channel) == "r"
    wait_for(lambda: free_again() < before + 96 * MIB, "the memory to be given back")
