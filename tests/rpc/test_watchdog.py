"""The server asks its own port, and says so when there is no answer."""

import logging
import socket
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serve.config import ServerConfig
from serve.rpc import watchdog
from serve.rpc.server import GrpcServer
from serve.rpc.watchdog import Watchdog
from tests.rpc.fakes import FACTS, FakeEngine

LONG_S = 60.0


def eventually(condition):
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def watching():
    """Yield a function that starts a watchdog with short intervals on a port."""
    started = []

    def start(port, **times):
        found = Watchdog(**{"period_s": 0.01, "patience_s": 0.1, "silent_s": 0.5} | times)
        found.start(f"127.0.0.1:{port}")
        started.append(found)
        return found

    yield start
    for found in started:
        found.stop()


class CountingEngine(FakeEngine):
    """Counts how often it was asked whether it is live."""

    asked = 0
    repository: threading.Event | None = None

    def models(self):
        if self.repository is not None:
            self.repository.wait(LONG_S)
        return super().models()

    @property
    def live(self):
        self.asked += 1
        return True

    @live.setter
    def live(self, _):
        pass


@pytest.fixture
def own():
    """Yield a server that calls itself all the time, with a long time limit."""
    server = GrpcServer(CountingEngine(), lambda: FACTS, lambda _: {}, ServerConfig(grpc_port=0))
    server._watchdog._period_s, server._watchdog._patience_s = 0.005, LONG_S
    server.start()
    yield server
    server.stop(1.0)


def test_a_port_that_answers_is_asked_on_and_on(own):
    engine = own._inference._engine
    eventually(lambda: engine.asked > 20)
    assert own.answers


def test_a_repository_that_hangs_is_no_silence(own):
    engine = own._inference._engine
    engine.repository = threading.Event()
    with grpc.insecure_channel(own.own_address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check.future(health_pb2.HealthCheckRequest())
        before = engine.asked
        eventually(lambda: engine.asked > before + 20)
        assert own.answers
        assert not check.done()
        engine.repository.set()
        check.exception()


def test_a_polling_thread_that_hangs_is_noticed_and_so_is_its_return(server, watching, caplog):
    found = watching(server.port)
    with caplog.at_level(logging.WARNING, "serve.rpc.watchdog"):
        with server._server._state.lock:  # gRPC's polling thread takes it for every call
            eventually(lambda: not found.answers)
        eventually(lambda: found.answers)
    silent, *_, back = [record.getMessage() for record in caplog.records]
    assert "does not answer the server's own calls: DEADLINE_EXCEEDED" in silent
    assert "answers again" in back


class Answers:
    """Replaces a channel: each call takes its seconds by the clock, and fails unless they are 0."""

    def __init__(self, watchdog, *seconds):
        self.watchdog, self.left, self.now_ns = watchdog, list(seconds), 0
        self.told = []

    def unary_unary(self, _):
        return self.ask

    def ask(self, _, timeout):
        self.told.append(self.watchdog.answers)
        took_s = self.left.pop(0)
        self.now_ns += int(took_s * 1e9)
        if not self.left:
            self.watchdog._stopped.set()
        if took_s:
            raise TimeoutError("deadline")


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        # The process was stopped for an hour during a call.
        ((0, 3600, 0, 0), [True, True, True, True]),
        ((0, 5, 5, 0, 0), [True, True, True, False, True]),
        # Every call is refused at once.
        ((0.001,) * 999 + (0,), [True] * 910 + [False] * 90),
        ((5, 0) * 5, [True] * 10),
    ],
)
def test_silence_is_questions_that_waited_in_vain(seconds, told, monkeypatch):
    found = Watchdog(period_s=0.01, patience_s=5.0, silent_s=10.0)
    found._channel = answers = Answers(found, *seconds)
    found._stopped.wait = lambda _: found._stopped.is_set()
    monkeypatch.setattr(watchdog, "now_ns", lambda: answers.now_ns)
    found._watch()
    assert answers.told == told


def test_a_port_nobody_listens_on_is_silent(watching):
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    found = watching(port)
    eventually(lambda: not found.answers)


def test_a_server_watches_itself_from_start_to_stop():
    server = GrpcServer(FakeEngine(), lambda: FACTS, lambda _: {}, ServerConfig(grpc_port=0))
    server._watchdog._period_s, server._watchdog._patience_s = 0.01, 0.1
    server._watchdog._silent_s = 0.5
    server.start()
    assert server.answers
    with server._server._state.lock:
        eventually(lambda: not server.answers)
    eventually(lambda: server.answers)
    server.stop(1.0)
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "rpc-watchdog"])
