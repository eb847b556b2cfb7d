"""Threads for calls: given out with the message, bounded, reused, ended."""

import importlib
import queue
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import pytest

from bench.kit.waiting import PATIENCE_S, eventually
from serve.rpc.call_threads import CallThreads
from serve.rpc.grpc_internals import INTERNALS, find_internals
from serve.rpc.workers import Workers

METHOD = "/Test/Call"


class Server:
    """Echoes at most `most` calls at once; holds messages that start with `hold` until let go."""

    def __init__(self, most, **options):
        self.workers = Workers(most, f"calls-{id(self)}")
        self.pool = CallThreads(self.workers, **options)
        self.let_go = threading.Event()
        self.seen = queue.Queue()

    def answer(self, message, context):
        self.seen.put((message, threading.get_ident()))
        if message.startswith(b"hold"):
            self.let_go.wait(PATIENCE_S)
        return message

    @property
    def threads(self):
        return [t for t in threading.enumerate() if t.name == f"calls-{id(self)}"]


@contextmanager
def serving(most=4, **options):
    server = Server(most, **options)
    running = grpc.server(server.pool)
    handler = grpc.unary_unary_rpc_method_handler(server.answer)
    running.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("Test", {"Call": handler}),)
    )
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield server, channel
        finally:
            server.let_go.set()
            running.stop(PATIENCE_S).wait()
            server.pool.shutdown(wait=False)
    eventually(lambda: not server.threads)


def test_a_call_has_no_thread_before_its_message_is_there():
    with serving() as (server, channel):
        messages = queue.Queue()
        call = channel.stream_unary(METHOD).future(iter(messages.get, None), timeout=PATIENCE_S)
        # A later call was answered, so the first has arrived as well.
        assert channel.unary_unary(METHOD)(b"later", timeout=PATIENCE_S) == b"later"
        assert len(server.threads) == 1
        # The answer is sent a moment before its thread is idle.
        eventually(lambda: server.workers._idle)
        messages.put(b"now")
        messages.put(None)
        assert call.result() == b"now"
        assert len(server.threads) == 1


def test_a_call_without_a_message_is_refused_in_grpcs_words():
    with serving() as (server, channel), pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(METHOD)(iter(()), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "requires exactly one request message" in caught.value.details()
    assert server.seen.empty()


def test_a_call_that_ends_before_its_message_leaves_its_place():
    with serving(most=1) as (server, channel):
        never = threading.Event()
        call = channel.stream_unary(METHOD).future(
            (b"" for _ in iter(lambda: never.wait(PATIENCE_S), True)), timeout=PATIENCE_S
        )
        later = channel.unary_unary(METHOD).future(b"later", timeout=PATIENCE_S)
        call.cancel()
        never.set()
        assert later.result() == b"later"
        assert [server.seen.get()[0]] == [b"later"]


def test_calls_beyond_the_threads_wait_and_are_answered():
    with serving(most=2) as (server, channel):
        ask = channel.unary_unary(METHOD)
        held = [ask.future(b"hold %d" % i, timeout=PATIENCE_S) for i in range(2)]
        assert {server.seen.get(timeout=PATIENCE_S)[0] for _ in held} == {b"hold 0", b"hold 1"}
        waiting = [ask.future(b"next %d" % i, timeout=PATIENCE_S) for i in range(3)]
        assert server.seen.empty()
        server.let_go.set()
        assert [call.result() for call in (*held, *waiting)] == [
            b"hold 0", b"hold 1", b"next 0", b"next 1", b"next 2",
        ]  # fmt: skip
        assert len(server.threads) <= 2


def test_the_thread_that_was_idle_for_the_shortest_time_serves():
    with serving() as (server, channel):
        ask = channel.unary_unary(METHOD)
        first = ask.future(b"hold", timeout=PATIENCE_S)
        _, held_by = server.seen.get(timeout=PATIENCE_S)
        ask(b"beside", timeout=PATIENCE_S)
        _, served_by = server.seen.get(timeout=PATIENCE_S)
        assert served_by != held_by
        eventually(lambda: server.workers._idle)
        server.let_go.set()
        assert first.result() == b"hold"
        eventually(lambda: len(server.workers._idle) == 2)
        for _ in range(5):
            ask(b"after", timeout=PATIENCE_S)
            assert server.seen.get(timeout=PATIENCE_S)[1] == held_by
            eventually(lambda: len(server.workers._idle) == 2)


def test_a_call_that_fails_leaves_its_thread_to_the_next():
    pool = CallThreads(Workers(1, "calls-failing"))
    done = threading.Event()
    pool.submit(lambda: 1 / 0)
    pool.submit(done.set)
    assert done.wait(PATIENCE_S)
    pool.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(done.set)


def lacking(module, name):
    """Return an import function for a gRPC whose `module` lacks `name`, or is missing if None."""

    def load(path):
        if path == module and name is None:
            raise ImportError(path)
        found = importlib.import_module(path)
        names = {key: value for key, value in vars(found).items() if (path, key) != (module, name)}
        return SimpleNamespace(**names)

    return load


def test_this_release_of_grpc_has_the_internals():
    assert INTERNALS is not None


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("grpc._server", "_abort"),
        ("grpc._cython.cygrpc", "ReceiveMessageOperation"),
        ("grpc._server", None),
        ("grpc._cython.cygrpc", None),
    ],
)
def test_a_grpc_without_an_internal_name_serves(module, name, caplog):
    assert find_internals(lacking(module, name)) is None
    with serving(internals=None) as (server, channel):
        assert "keeps its thread" in caplog.text
        assert channel.unary_unary(METHOD)(b"hello", timeout=PATIENCE_S) == b"hello"
        assert server.seen.get(timeout=PATIENCE_S)[0] == b"hello"
