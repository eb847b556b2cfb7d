"""The compiled sender, called from Python, against gRPC's own server."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from bench.kit.waiting import PATIENCE_S
from serve.native import LoadSender, front_lacks

METHOD = "/test.Service/Ask"
COLUMNS = 6

pytestmark = pytest.mark.skipif(bool(front_lacks()), reason=front_lacks())


@pytest.fixture
def server():
    """A server that reverses messages, refuses `no`, and holds `hold` until the test is over."""
    over = threading.Event()

    def ask(message, context):
        if message == b"no":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "völlig voll: 100 %")
        if message == b"hold":
            over.wait(PATIENCE_S)
        return message[::-1]

    _, service, method = METHOD.split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(ask)}
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    over.set()
    server.stop(None).wait()


def sender(port, **options):
    options = {"timeout_s": PATIENCE_S, "whole_answers": True} | options
    return LoadSender(host="127.0.0.1", port=port, path=METHOD, **options)


def taken(one):
    """Rows of results in the order of sending, with answers and texts."""
    rows, answers, texts = one.take()
    table = np.frombuffer(rows, np.int64).reshape(-1, COLUMNS)
    order = np.argsort(table[:, 0])
    return table[order], [answers[i] for i in order], [texts[i] for i in order]


def test_each_message_goes_out_at_its_time_and_comes_back(server):
    messages = [b"", b"abc", bytes(5_000_000), b"no", b"xyz" * 1000]
    offsets_ns = [0, 1_000_000, 1_500_000, 2_000_000, 30_000_000]
    one = sender(server)
    one.send_at(messages, offsets_ns)
    rows, answers, texts = taken(one)
    index, due_ns, sent_ns, ended_ns, codes, sizes = rows.T
    assert index.tolist() == list(range(5))
    assert (due_ns - one.started_ns).tolist() == offsets_ns
    assert (sent_ns >= due_ns).all()
    assert (ended_ns >= sent_ns).all()
    assert codes.tolist() == [0, 0, 0, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], 0]
    assert answers[:3] == [b"", b"cba", bytes(5_000_000)]
    assert sizes.tolist() == [0, 3, 5_000_000, 0, 3000]
    assert texts == ["", "", "", "völlig voll: 100 %", ""]
    assert one.sent == 5


def test_a_closed_loop_sends_messages_in_turn(server):
    one = sender(server, connections=2)
    one.keep_in_flight([b"ab", b"no"], 3, PATIENCE_S, 41)
    rows, answers, _ = taken(one)
    assert len(rows) == 41
    assert answers[:4] == [b"ba", b"", b"ba", b""]


def test_stopped_it_returns_without_the_requests_in_flight(server):
    one = sender(server)
    thread = threading.Thread(target=one.send_at, args=([b"hold", b"a"], [0, 10**15]))
    thread.start()
    while not one.sent:
        pass
    one.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert taken(one)[1] == []


def test_a_held_request_ends_at_its_time_limit(server):
    one = sender(server, timeout_s=0.2)
    one.send_at([b"hold"] * 3, [0] * 3)
    rows, _, texts = taken(one)
    assert rows[:, 4].tolist() == [grpc.StatusCode.DEADLINE_EXCEEDED.value[0]] * 3
    assert all(texts)  # the server may notice first, and say so in its own words


def test_what_cannot_be_sent_is_an_error(server):
    with pytest.raises(ValueError, match="offsets ascend"):
        sender(server).send_at([b"a"], [])
    with pytest.raises(TypeError, match="messages must be bytes"):
        sender(server).send_at(["a"], [0])
    with pytest.raises(ConnectionRefusedError):
        sender(1).send_at([b"a"], [0])
    with pytest.raises(OSError, match=r"no such host\.invalid"):
        LoadSender(host="no such host.invalid", port=1, path=METHOD).send_at([b"a"], [0])
