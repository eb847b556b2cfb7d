"""ModelStreamInfer over a real connection, and its bookkeeping when things end early."""

import queue
import threading
from contextlib import ExitStack

import grpc
import numpy as np
import pytest

from bench.kit.waiting import PATIENCE_S, eventually
from serve.errors import ModelError, QueueFull
from serve.pb import grpc_service_pb2 as pb
from serve.rpc import stream as stream_module
from serve.wire.messages import STREAM_METHOD, Failure, decode_stream_answer, encode_request
from tests.rpc.fakes import FEATURES
from tests.rpc.http2 import Http2

TENSORS = {
    "x": np.ones((2, FEATURES), np.float32),
    "edge_index": np.zeros((2, 1), np.int64),
}


def message(request_id, model="gcn"):
    return encode_request(model, TENSORS, request_id=request_id)


class Talk:
    """A stream whose requests a test sends, and whose answers it reads, one by one."""

    def __init__(self, channel, metadata=None):
        self._requests = queue.SimpleQueue()
        self.call = channel.stream_stream(STREAM_METHOD)(
            iter(self._requests.get, None), timeout=PATIENCE_S, metadata=metadata
        )

    def send(self, *messages):
        for one in messages:
            self._requests.put(one)

    def end(self):
        self._requests.put(None)

    def read(self):
        return decode_stream_answer(next(self.call))

    def read_rest(self):
        return [decode_stream_answer(one) for one in self.call]


@pytest.fixture
def talk(channel):
    open_talks = []

    def start(**options):
        open_talks.append(Talk(channel, **options))
        return open_talks[-1]

    yield start
    for one in open_talks:
        one.end()
        one.call.cancel()


def test_answers_come_as_they_finish(talk, engine):
    engine.held = {"slow"}
    stream = talk()
    stream.send(message("slow"), message("a"), message("b"))
    assert {stream.read().request_id, stream.read().request_id} == {"a", "b"}
    stream.send(message("c"))
    assert stream.read().request_id == "c"
    engine.let_go("slow")
    assert stream.read().request_id == "slow"
    stream.end()
    assert stream.read_rest() == []
    assert stream.call.code() is grpc.StatusCode.OK


def test_a_stream_that_ends_is_answered_in_full(talk, engine):
    engine.hold_all = True
    stream = talk()
    stream.send(*(message(str(i)) for i in range(16)))
    stream.end()
    engine.wait_for_calls(16)
    engine.let_go()
    assert {answer.request_id for answer in stream.read_rest()} == {str(i) for i in range(16)}


def test_a_stream_may_be_longer_than_its_window(talk):
    stream = talk()
    stream.send(*(message(str(i)) for i in range(600)))
    stream.end()
    assert sorted(int(answer.request_id) for answer in stream.read_rest()) == list(range(600))


def test_errors_are_messages_of_the_stream(talk, engine):
    stream = talk()
    stream.send(message("bad", model="nope"))
    failure = stream.read()
    assert isinstance(failure, Failure)
    assert (failure.request_id, failure.parameters) == ("bad", {"status": "NOT_FOUND"})
    assert "nope" in failure.message
    stream.send(b"\xff")
    assert stream.read().parameters["status"] == "INVALID_ARGUMENT"
    engine.fail_with = QueueFull("full", retry_after_ns=5_000_000)
    stream.send(message("full"))
    assert stream.read() == Failure(
        "full", "full", {"status": "RESOURCE_EXHAUSTED", "retry_after_ms": 5}
    )
    engine.fail_with = None
    stream.send(message("good"))
    assert stream.read().request_id == "good"


def test_on_request_an_error_ends_the_stream(talk, engine):
    engine.held = {"held"}
    stream = talk(metadata=(("triton_grpc_error", "true"),))
    stream.send(message("held"), message("bad", model="nope"))
    with pytest.raises(grpc.RpcError) as caught:
        stream.read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    eventually(lambda: [call.client_id for call in engine.cancelled] == ["held"])


def test_cancelling_the_stream_cancels_what_is_in_flight(talk, engine):
    engine.hold_all = True
    stream = talk()
    stream.send(*(message(str(i)) for i in range(4)))
    engine.wait_for_calls(4)
    stream.call.cancel()
    eventually(lambda: sorted(call.client_id for call in engine.cancelled) == list("0123"))


def test_streams_and_single_calls_do_not_hinder_each_other(talk, standard, engine):
    engine.held = {str(i) for i in range(16)}
    stream = talk()
    stream.send(*(message(str(i)) for i in range(16)))
    engine.wait_for_calls(16)
    request = pb.ModelInferRequest.FromString(message("single"))
    assert standard.ModelInfer(request, timeout=PATIENCE_S).id == "single"
    engine.let_go()
    stream.end()
    assert len(stream.read_rest()) == 16


def test_after_a_stream_ended_in_any_way_nothing_is_left(talk, server, engine):
    strict = (("triton_grpc_error", "true"),)
    ended, cancelled, failed, held = talk(), talk(), talk(metadata=strict), talk()
    ended.send(message("a"))
    ended.read()
    ended.end()
    assert ended.read_rest() == []
    cancelled.send(message("b"))
    cancelled.read()
    cancelled.call.cancel()
    failed.send(message("c", model="nope"))
    with pytest.raises(grpc.RpcError):
        failed.read()
    engine.held = {"d"}
    held.send(message("d"))
    engine.wait_for_calls(3)
    held.call.cancel()
    eventually(lambda: server.in_flight == 0)
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "stream-reader"])


def test_a_server_that_drains_says_so_to_each_request(talk, server):
    stream = talk()
    stream.send(message("before"))
    assert stream.read().request_id == "before"
    server._gate.close()
    stream.send(message("after"), b"\xff")
    failures = {
        failure.request_id: failure.parameters for failure in (stream.read(), stream.read())
    }
    assert failures == {"after": {"status": "UNAVAILABLE"}, "": {"status": "INVALID_ARGUMENT"}}


def test_failing_models_do_not_end_the_stream(talk, engine):
    engine.fail_with = ModelError("the model raised")
    stream = talk()
    stream.send(message("a"), message("b"))
    assert {stream.read().request_id, stream.read().request_id} == {"a", "b"}


def test_an_idle_stream_gives_its_place_up_to_a_new_one(server, engine):
    options = [("grpc.use_local_subchannel_pool", 1)]
    with ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{server.port}", options))
            for _ in range(2)
        ]
        talks = []

        def start(request_id):
            talk = Talk(channels[len(talks) % 2])
            stack.callback(talk.call.cancel)
            stack.callback(talk.end)
            talk.send(message(request_id))
            talks.append(talk)
            return talk

        engine.held = {"held"}
        held = start("held")
        engine.wait_for_calls(1)
        for number in range(63):
            assert start(str(number)).read().request_id == str(number)
        talks[1].send(message("again"))
        assert talks[1].read().request_id == "again"
        # The second one has been idle for the longest: the first is in use, and the next just was.
        assert start("new").read().request_id == "new"
        with pytest.raises(grpc.RpcError) as caught:
            talks[2].read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == (
            "the stream was idle, and its place was needed; open another one"
        )
        assert server.refused["idle_stream"] == 1
        engine.let_go()
        assert held.read().request_id == "held"


def test_streams_that_are_all_in_use_keep_their_places(server, engine):
    engine.hold_all = True
    options = [("grpc.use_local_subchannel_pool", 1)]
    with ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{server.port}", options))
            for _ in range(3)
        ]
        talks = [Talk(channels[number % 2]) for number in range(64)]
        for number, talk in enumerate(talks):
            stack.callback(talk.call.cancel)
            stack.callback(talk.end)
            talk.send(message(str(number)))
        engine.wait_for_calls(64)
        more = Talk(channels[2])
        more.end()
        with pytest.raises(grpc.RpcError) as caught:
            more.read()
        assert caught.value.details().startswith("64 streams are open")
        engine.let_go()
        assert {talk.read().request_id for talk in talks} == {str(i) for i in range(64)}


@pytest.fixture
def impatient(monkeypatch):
    """Streams whose clients do not read may lose their places at once."""
    monkeypatch.setattr(stream_module, "UNREAD_NS", 0)


def test_a_stream_whose_client_does_not_read_gives_its_place_up(impatient, server, engine):
    with ExitStack() as stack:
        deaf = [stack.enter_context(Http2(server.port, window_bytes=0)) for _ in range(8)]
        for client in deaf:
            for _ in range(8):
                client.message(client.head(STREAM_METHOD), message("unread"))
        engine.wait_for_calls(64)
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{server.port}"))

        def served():
            talk = Talk(channel)
            talk.send(message("new"))
            talk.end()
            try:
                return [answer.request_id for answer in talk.read_rest()] == ["new"]
            except grpc.RpcError as error:  # none of the answers is there yet
                if not error.details().startswith("64 streams are open"):
                    raise
                return False

        eventually(served)
        assert server.refused["idle_stream"] == 1
