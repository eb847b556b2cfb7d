"""When callers are looked at: before a message comes, and again when credentials change."""

import queue
import time

import grpc
import pytest

from bench.kit.http2_frames import END_HEADERS, HEADERS, frame, head_block, in_frames, prefixed
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.access.callers import Callers
from serve.access.tokens import Token, TokensFile, hash_of, read_tokens, write_tokens
from serve.access.watching import FileWatcher
from serve.config import ServerConfig
from serve.rpc.front_callers import FrontCallers
from serve.rpc.server import GrpcServer
from serve.wire.messages import INFER_METHOD, STREAM_METHOD, decode_stream_answer
from tests.access.support import TOKENS, headers, write_file
from tests.rpc.fakes import FACTS
from tests.rpc.http2 import Http2, is_over
from tests.rpc.requests import native
from tests.rpc.requests import request as message

UPDATE_METHOD = "/gnnserve.v1.GnnServe/UpdateGraph"


@pytest.fixture
def clock():
    """The time as the callers see it, in seconds since 1970; tests set it."""
    return [time.time()]


@pytest.fixture
def callers(tmp_path, clock):
    callers = Callers(write_file(tmp_path), clock_s=lambda: clock[0])
    watcher = FileWatcher(*callers.watched)
    watcher.start()
    yield callers
    watcher.stop()


@pytest.fixture
def guarded(front, engine, callers, tmp_path):
    config = ServerConfig(
        grpc_port=0, front=front, max_queue=16, admin_socket=str(tmp_path / "admin.sock")
    )
    server = GrpcServer(engine, lambda: FACTS, lambda _: {}, config, callers=callers)
    server.port = server.start()
    yield server
    engine.let_go()
    server.stop(2.0)


class Asker:
    """A client with a stream, whose messages it chooses and whose end it waits for."""

    def __init__(self, channel, credential="infer"):
        self._sent = queue.SimpleQueue()
        self._call = channel.stream_stream(STREAM_METHOD)(
            iter(self._sent.get, None), metadata=headers(credential), timeout=PATIENCE_S
        )

    def ask(self, request_id):
        self._sent.put(message(2, request_id))

    def close(self):
        self._sent.put(None)

    def rest(self):
        """Return the ids of the answers that are left, and the status that they end with."""
        found = []
        try:
            found.extend(decode_stream_answer(answer).request_id for answer in self._call)
        except grpc.RpcError as error:
            return found, error.code().name, error.details()
        finally:
            self.close()
        return found, "OK", ""


def revoke(callers, principal):
    content = read_tokens(callers._file)
    left = tuple(row for row in content.token if row.principal != principal)
    write_tokens(callers._file, TokensFile(token=left, tenant=content.tenant))


def test_a_stream_ends_when_its_token_is_revoked(guarded, engine, callers):
    """What it has asked is answered, and other streams go on."""
    engine.held = {"held"}
    with grpc.insecure_channel(f"127.0.0.1:{guarded.port}") as channel:
        revoked, idle, other = Asker(channel), Asker(channel), Asker(channel, "other tenant")
        revoked.ask("held")
        idle.ask("first")
        other.ask("before")
        engine.wait_for_calls(3)
        revoke(callers, "app")
        ids, code, text = idle.rest()
        assert (ids, code) == (["first"], "UNAUTHENTICATED")
        assert "not one of this server" in text
        assert TOKENS["infer"] not in text
        revoked.ask("too late")
        engine.let_go()
        assert revoked.rest()[:2] == (["held"], "UNAUTHENTICATED")
        other.ask("after")
        other.close()
        assert other.rest()[:2] == (["before", "after"], "OK")
        assert all(call.client_id != "too late" for call in engine.calls)
    wait_for(lambda: guarded.in_flight == 0, "the end of all requests")


def test_a_stream_ends_when_its_token_expires(guarded, engine, callers, clock):
    row = Token(
        principal="brief", roles=("infer",), hash=hash_of("brief"),
        expires=read_tokens(callers._file).token[0].expires.replace(year=2100),
    )  # fmt: skip
    content = read_tokens(callers._file)
    write_tokens(callers._file, TokensFile(token=(*content.token, row), tenant=content.tenant))
    wait_for(lambda: not callers.find("Bearer brief").problem, "the new token")
    with grpc.insecure_channel(f"127.0.0.1:{guarded.port}") as channel:
        stream = channel.stream_stream(STREAM_METHOD)(
            iter(queue.SimpleQueue().get, None),
            metadata=[("authorization", "Bearer brief")],
            timeout=PATIENCE_S,
        )
        wait_for(lambda: open_streams(guarded) == 1, "the stream")
        clock[0] = row.expires.timestamp() + 1
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "has expired" in caught.value.details()
    wait_for(lambda: open_streams(guarded) == 0, "its end")


def open_streams(server):
    rights = server._inference.stream_rights
    if server.front == "native":
        rights = server._front._calls.callers._streams
    return len(rights._open)


def test_a_stream_goes_on_with_the_rights_that_it_has_now(guarded, engine, callers):
    content = read_tokens(callers._file)
    with grpc.insecure_channel(f"127.0.0.1:{guarded.port}") as channel:
        stream = Asker(channel)
        stream.ask("before")
        engine.wait_for_calls(1)
        assert engine.calls[0].tenant == "first"
        rows = [
            Token(row.principal, row.roles, row.hash, row.certificate, "second", row.expires)
            if row.principal == "app"
            else row
            for row in content.token
        ]
        write_tokens(callers._file, TokensFile(token=tuple(rows), tenant=content.tenant))
        bearer = dict(headers("infer"))["authorization"]
        wait_for(lambda: callers.find(bearer).tenant.name == "second", "the new tenant")

        def asked():
            stream.ask("after")
            engine.wait_for_calls(len(engine.calls))
            return engine.calls[-1].tenant == "second"

        wait_for(asked, "a request of the new tenant")
        stream.close()
        assert stream.rest()[1] == "OK"


@native
def test_streams_of_callers_with_tokens_need_no_server_behind(guarded, engine):
    with grpc.insecure_channel(f"127.0.0.1:{guarded.port}") as channel:
        stream = Asker(channel)
        for request_id in "abc":
            stream.ask(request_id)
        stream.close()
        assert sorted(stream.rest()[0]) == ["a", "b", "c"]
        assert guarded.ways["stream"] == 1
        assert guarded.ways["forwarded"] == 0
        refused = Asker(channel, "observe")
        refused.ask("d")
        assert refused.rest()[:2] == ([], "PERMISSION_DENIED")
    assert guarded.refused["forbidden"] == 1


@native
def test_a_connections_client_is_asked_about_once(guarded, callers, monkeypatch):
    asked = []
    decide = FrontCallers.decide
    monkeypatch.setattr(
        FrontCallers,
        "decide",
        lambda self, handle, method, *rest, **more: (
            asked.append(method),
            decide(self, handle, method, *rest, **more),
        ),
    )
    with grpc.insecure_channel(f"127.0.0.1:{guarded.port}") as channel:
        infer = channel.unary_unary(INFER_METHOD)

        def call(credential="infer"):
            return infer(message(2, "r"), metadata=headers(credential), timeout=PATIENCE_S)

        for _ in range(10):
            call()
        assert asked == [INFER_METHOD]
        call("other tenant")
        assert len(asked) == 2
        revoke(callers, "guest")

        def refused():
            try:
                call("other tenant")
            except grpc.RpcError as error:
                return error.code() is grpc.StatusCode.UNAUTHENTICATED
            return False

        wait_for(refused, "the refusal")
        before = len(asked)
        call()
        assert len(asked) == before + 1


@pytest.mark.parametrize("method", [INFER_METHOD, STREAM_METHOD, UPDATE_METHOD])
@pytest.mark.parametrize("credential", ["none", "wrong", "observe"])
def test_who_may_not_call_sends_no_message(guarded, engine, method, credential):
    """The refusal comes while the message is at most begun, and what it claims is never held."""
    with Http2(guarded.port) as client:
        block = head_block(method, *headers(credential))
        client.send(frame(HEADERS, END_HEADERS, 1, block))
        client.read_until(lambda came: is_over(came))
        fields = b"".join(content for kind, _, content in client.came[1] if kind == HEADERS)
        assert b"not complete" not in fields
    # Another one begins with as much of a message as may be on its way, and a size of 64 MiB.
    with Http2(guarded.port) as client:
        client.send(frame(HEADERS, END_HEADERS, 1, block))
        client.send(in_frames(1, prefixed(bytes(60_000), claims=64 << 20)))
        client.read_until(lambda came: is_over(came))
    assert engine.calls == []
    refused = guarded.refused
    assert refused["unauthenticated"] + refused["forbidden"] == 2
