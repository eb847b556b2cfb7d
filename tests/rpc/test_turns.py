"""Whose calls the server looks at, and when: nobody waits for one who has many, or for nobody."""

import threading
import time
from contextlib import ExitStack

import pytest

from bench.kit.http2_frames import DATA, END_HEADERS, HEADERS, frame, head_block, prefixed, reset
from bench.kit.waiting import PATIENCE_S, eventually
from serve.config import ServerConfig
from serve.rpc.server import GrpcServer
from serve.wire.messages import INFER_METHOD, STREAM_METHOD, decode_response
from tests.access.support import callers_of, headers
from tests.rpc.fakes import FACTS
from tests.rpc.http2 import Http2, is_over
from tests.rpc.requests import MESSAGE, native
from tests.rpc.test_floods import begun

pytestmark = native

MANY = 300


class Looked:
    """What a server's front has told, in order; the first of it takes until ``go_on``."""

    def __init__(self, server):
        self.events = []
        self._go_on = threading.Event()
        self._calls = server._front._calls
        self._take, self._calls.take = self._calls.take, self.take

    def take(self, events):
        self.events += [(event[0], event[1]) for event in events]
        assert self._go_on.wait(PATIENCE_S)
        self._take(events)

    def go_on(self):
        self._go_on.set()

    @property
    def begun(self):
        """Handles of the calls that were told, in order."""
        return [handle for handle, request in self.events if request is not None]


@pytest.fixture
def stopped(front, engine, tmp_path):
    """Return a function that starts a server and has its front's thread wait at a first call.

    It returns the server, what that looks at, and the client of the first call, which is sent after
    `before` has returned.
    """
    with ExitStack() as stack:

        def start(*, tokens, before=lambda server: None, **options):
            callers = callers_of(tmp_path) if tokens else None
            config = ServerConfig(grpc_port=0, front=front, **options)
            server = GrpcServer(engine, lambda: FACTS, lambda _: {}, config, callers=callers)
            server.port = server.start()
            stack.callback(server.stop, 2.0)
            before(server)
            looked = Looked(server)
            stack.callback(looked.go_on)
            first = stack.enter_context(Http2(server.port))
            first.send(whole_call(1))
            eventually(lambda: looked.begun)
            return server, looked, first

        yield start


def head_of(stream, path=INFER_METHOD, credential="infer"):
    return frame(HEADERS, END_HEADERS, stream, head_block(path, *headers(credential)))


def whole_call(stream):
    return head_of(stream) + frame(0, 1, stream, prefixed(MESSAGE))


@pytest.mark.parametrize("path", [INFER_METHOD, STREAM_METHOD, "/no/method"])
def test_calls_that_their_client_has_reset_are_not_looked_at(stopped, path):
    server, looked, _ = stopped(tokens=True)
    with Http2(server.port) as client:
        for stream in range(1, 2 * MANY, 2):
            client.send(head_of(stream, path, credential="wrong"), reset(stream))
        looked.go_on()
        client.ping()
        last = 2 * MANY + 1
        client.send(head_of(last, path, credential="wrong"))
        client.read_until(lambda came: is_over(came, last))
    # Some may have come in two parts, between which the front had its turn.
    assert len(looked.begun) < 20


def test_messages_of_calls_that_are_reset_are_counted_and_not_looked_at(stopped, engine):
    server, looked, first = stopped(tokens=False)
    with Http2(server.port) as client:
        for stream in range(1, 2 * MANY, 2):
            client.send(whole_call(stream), reset(stream))
        looked.go_on()
        client.ping()
        first.read_until(is_over)
    told = len(looked.begun) - 1
    assert told < 20
    assert server.refused["unread"] == MANY - told
    eventually(lambda: server.in_flight == 0)
    ended = [handle for handle, request in looked.events if request is None]
    assert sorted(ended) == sorted(looked.begun)


@pytest.mark.parametrize("tokens", [True, False], ids=["heads", "messages"])
def test_a_client_with_many_calls_keeps_nobody_waiting(stopped, tokens):
    server, looked, _ = stopped(tokens=tokens)
    with Http2(server.port) as greedy, Http2(server.port) as modest:
        greedy.send(b"".join(whole_call(stream) for stream in range(1, 2 * MANY, 2)))
        modest.send(whole_call(1))
        looked.go_on()
        modest.read_until(is_over)
    assert len(looked.begun) < MANY // 2


def test_the_messages_of_a_stream_stay_in_order(stopped, engine):
    server, looked, _ = stopped(tokens=False)
    with Http2(server.port) as client:
        stream = client.head(STREAM_METHOD)
        client.send(frame(0, 1, stream, prefixed(MESSAGE) * 50))
        looked.go_on()
        client.read_until(lambda came: is_over(came, stream))
    assert looked.begun == sorted(looked.begun)
    assert len(looked.begun) == 51


def test_no_message_is_late_because_the_server_stood_still(stopped):
    """It came while nobody could take it."""
    client = None

    def begin(server):
        nonlocal client
        client = Http2(server.port)
        client.head(INFER_METHOD)
        client.data(1, prefixed(MESSAGE)[:100])
        eventually(lambda: begun(server) == 1)

    server, looked, _ = stopped(tokens=False, before=begin, receive_timeout_s=1.0)
    with client:
        time.sleep(2.0)
        client.data(1, prefixed(MESSAGE)[100:], end=True)
        looked.go_on()
        client.read_until(is_over)
        answer = b"".join(content for kind, _, content in client.came[1] if kind == DATA)
    assert decode_response(answer[5:]).request_id == "r"
    assert server.refused["no_message"] == 0


def test_however_many_messages_do_not_come_all_their_calls_end(front, engine):
    """A thousand at a time, so that others have their turn in between."""
    config = ServerConfig(grpc_port=0, front=front, receive_timeout_s=1.0)
    server = GrpcServer(engine, lambda: FACTS, lambda _: {}, config)
    server.port = server.start()
    with ExitStack() as stack:
        stack.callback(server.stop, 2.0)
        for _ in range(5):
            stack.enter_context(Http2(server.port)).head(INFER_METHOD, 500)
        eventually(lambda: server.refused["no_message"] == 2500)
        eventually(lambda: begun(server) == 0)
