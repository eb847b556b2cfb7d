"""Requests that one server passes on to another: once, and answered here when that fails."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from bench.kit.waiting import PATIENCE_S, eventually
from serve.access.callers import AUTHORIZATION
from serve.access.front_stamps import ARRIVED, FrontStamps
from serve.cluster import forwarding, peers
from serve.cluster.forwarding import OtherServers
from serve.cluster.servers_file import write_servers
from serve.config import ServerConfig
from serve.core.types import Nanos, QoS, Task, TaskEstimate, TaskId
from serve.errors import InvalidInput
from serve.native import front_lacks
from serve.rpc import server as rpc_server
from serve.rpc.elsewhere import HOPS, PART, Origin, is_movable, origin_of
from serve.rpc.server import GrpcServer
from serve.server.split import IdHomes
from serve.wire.messages import (
    INFER_METHOD,
    STREAM_METHOD,
    decode_request,
    decode_response,
    decode_stream_answer,
    encode_request,
)
from tests.access.support import callers_of, headers
from tests.rpc.fakes import FACTS, FakeEngine, model_info
from tests.rpc.requests import TENSORS

MS = 1_000_000
HERE, THERE = "here", "there"
#: As many requests as nobody answers in a quarter of an hour.
MANY = 10**9


class Node:
    """A server with a fake engine, that knows the servers of a file."""

    def __init__(self, name, file, front, callers=None):
        self.engine = FakeEngine()
        self.server = GrpcServer(
            self.engine, lambda: FACTS, lambda _: {},
            ServerConfig(grpc_port=0, max_message="1 MiB", max_queue=16, front=front),
            callers=callers,
        )  # fmt: skip
        self.address = f"127.0.0.1:{self.server.start()}"
        self.forwarding = OtherServers(name, lambda: self.engine.moving.room, file, 1 << 20)
        self.engine.moving.moves = self.forwarding.better
        self.server.pass_on(self.forwarding)
        self.channel = grpc.insecure_channel(self.address)
        self.infer = self.channel.unary_unary(INFER_METHOD)

    def ask(self, model="gcn", metadata=(), **parameters):
        """Send a request; return the parameters of its answer."""
        message = encode_request(model, TENSORS, request_id="r", parameters=parameters)
        answer = self.infer(message, timeout=PATIENCE_S, metadata=metadata)
        return decode_response(answer).parameters

    def stop(self):
        self.channel.close()
        self.forwarding.close()
        self.engine.let_go()
        self.server.stop(2.0)


@pytest.fixture(params=["python", "native"])
def front(request):
    if request.param == "native" and (lacks := front_lacks()):
        pytest.skip(lacks)
    return request.param


@contextmanager
def two(tmp_path, front, callers=None):
    file = tmp_path / "servers"
    write_servers(file, ())
    nodes = [Node(name, file, front, callers) for name in (HERE, THERE)]
    write_servers(file, [node.address for node in nodes])
    try:
        for node in nodes:
            node.forwarding.reload()
        yield nodes
    finally:
        for node in nodes:
            node.stop()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Have servers that are slow to say what they have waited for, as the machine may be busy."""
    monkeypatch.setattr(peers, "ASK_S", PATIENCE_S)
    monkeypatch.setattr(forwarding, "LEAST_S", PATIENCE_S)
    # Nobody asks a server that stops.
    monkeypatch.setattr(rpc_server, "_REFUSE_S", 0.0)


@pytest.fixture
def nodes(tmp_path, front):
    with two(tmp_path, front) as found:
        yield found


def task():
    """Return a task that takes 6 ms alone and is late in a quarter of an hour."""
    estimate = TaskEstimate(
        peak_bytes=1, reserve_bytes=512, run_ns=Nanos(5 * MS), solo_ns=Nanos(6 * MS)
    )
    arrived_ns = Nanos(time.monotonic_ns())
    return Task(TaskId(1), "gcn", 2, 1, arrived_ns, estimate, QoS(Nanos(10**12)))


def busy(node):
    node.engine.moving.room = node.engine.moving.room._replace(unanswered=MANY)


def late_here(nodes):
    """Make the first server one that would be late."""
    here, _ = nodes
    here.engine.task = task()
    busy(here)


def test_a_model_that_is_there_alone_is_answered_there(nodes):
    here, there = nodes
    there.engine.infos["sage"] = model_info("sage")
    for version in ("", "1"):
        message = encode_request("sage", TENSORS, request_id="r", version=version)
        answer = decode_response(here.infer(message, timeout=PATIENCE_S))
        assert (answer.request_id, answer.model, answer.version) == ("r", "sage", "1")
        assert (answer.parameters["node"], answer.parameters["hops"]) == (THERE, 1)
    assert there.engine.calls[0].hops == 1
    assert not here.engine.calls
    assert not here.engine.refusals
    assert here.forwarding.counts["answered"] == 2
    (answer,) = here.channel.stream_stream(STREAM_METHOD)(
        iter([encode_request("sage", TENSORS)]), timeout=PATIENCE_S
    )
    assert decode_stream_answer(answer).parameters["node"] == THERE


def test_what_is_here_and_in_time_stays(nodes):
    here, there = nodes
    here.engine.task = task()
    found = here.ask(seed=3)
    assert (found["node"], found["hops"]) == (HERE, 0)
    assert here.engine.calls[0].seed == 3
    assert not there.engine.calls
    assert sum(here.forwarding.counts.values()) == 0


def test_a_request_is_passed_on_once(nodes):
    here, there = nodes
    there.engine.infos["sage"] = model_info("sage")
    with pytest.raises(grpc.RpcError) as caught:
        here.ask("sage", metadata=((HOPS, "1"),))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    late_here(nodes)
    assert here.ask(metadata=((HOPS, "1"),))["hops"] == 1
    assert not there.engine.calls
    assert here.engine.refusals == [("sage", "UnknownName")]


def test_what_would_be_late_here_goes_where_it_is_not(nodes, monkeypatch):
    here, there = nodes
    monkeypatch.setattr(forwarding, "REST_S", PATIENCE_S)
    late_here(nodes)
    assert here.ask()["node"] == THERE
    busy(there)
    assert here.ask()["node"] == HERE
    assert here.forwarding.counts == {"answered": 1, "kept": 1, "failed": 0}
    # For a while it asks no more.
    assert not here.forwarding.better(here.engine.task, here.engine.moving.room)


def test_a_server_that_is_lost_or_fails_leaves_the_answer_here(nodes):
    here, there = nodes
    late_here(nodes)
    there.engine.fail_with = ValueError("a bug")
    assert here.ask()["node"] == HERE
    there.server.stop(0.0)
    assert here.ask()["node"] == HERE
    assert here.forwarding.counts["answered"] == 0
    with pytest.raises(grpc.RpcError) as caught:
        here.ask("sage")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_server_that_does_not_answer_leaves_the_answer_here(nodes, monkeypatch):
    here, there = nodes
    late_here(nodes)
    monkeypatch.setattr(forwarding, "MOST_S", 0.2)
    there.engine.hold_all = True
    assert here.ask()["node"] == HERE
    assert here.forwarding.counts["failed"] == 1
    eventually(lambda: there.engine.cancelled)


def test_who_cancels_cancels_there(nodes):
    here, there = nodes
    there.engine.infos["sage"] = model_info("sage")
    there.engine.hold_all = True
    call = here.infer.future(encode_request("sage", TENSORS), timeout=PATIENCE_S)
    there.engine.wait_for_calls(1)
    call.cancel()
    eventually(lambda: there.engine.cancelled)
    eventually(lambda: here.server.in_flight == 0)


def test_at_most_so_many_are_passed_on_at_once(nodes, monkeypatch):
    here, _ = nodes
    late_here(nodes)
    for _ in range(forwarding.MOST_PASSED):
        here.forwarding._places.acquire()
    assert here.ask()["node"] == HERE


def test_the_file_is_read_again_and_a_wrong_one_changes_nothing(nodes, monkeypatch):
    here, there = nodes
    monkeypatch.setattr(forwarding, "REST_S", 0.0)
    late_here(nodes)
    write_servers(here.forwarding.file, [here.address, there.address], [there.address])
    here.forwarding.reload()
    assert here.ask()["node"] == HERE
    write_servers(here.forwarding.file, [there.address])
    here.forwarding.reload()
    here.forwarding.file.write_text("one two three\n")
    here.forwarding.reload()
    assert here.ask()["node"] == THERE


def test_a_request_goes_on_with_its_own_token(tmp_path, front):
    with two(tmp_path, front, callers_of(tmp_path)) as (here, there):
        there.engine.infos["sage"] = model_info("sage")
        assert here.ask("sage", metadata=headers("infer"))["node"] == THERE
        with pytest.raises(grpc.RpcError) as caught:
            here.ask("sage")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


IDS = np.array([7, 4, 9, 2])


def splitting(nodes, parts, here=0):
    """Have the servers hold parts 0 and 1 of a graph, and the nodes IDS be of `parts`."""
    for part, node in enumerate(nodes):
        node.engine.moving.room = node.engine.moving.room._replace(part=part)
        node.engine.graphs = lambda name="": (SimpleNamespace(name="g"),)
        homes = IdHomes(IDS, np.array(parts), here, 10**12)
        node.engine.moving.homes = lambda call, homes=homes: homes


def ask_split(node, **parameters):
    message = encode_request(
        "gcn", {"node_ids": IDS}, request_id="r",
        parameters={"graph": "g", "split": "home", **parameters},
    )  # fmt: skip
    answer = node.infer.future(message, timeout=PATIENCE_S)
    return decode_response(answer.result())


def ids_of(call):
    return np.frombuffer(call.tensors["node_ids"].data, np.int64).tolist()


def test_the_nodes_of_another_part_are_sent_there(nodes):
    here, there = nodes
    splitting(nodes, [0, 1, 0, 1])
    assert ask_split(here, priority=3, timeout=10**8).parameters["split_parts"] == 2
    eventually(lambda: there.engine.calls)  # the answer of these engines waits for no part
    (mine,), (part,) = here.engine.calls, there.engine.calls
    assert mine.split.own.tolist() == [0, 2]
    assert (ids_of(part), part.version, part.hops, part.priority) == ([4, 2], "1", 1, 3)
    assert part.is_part
    assert part.seed == mine.seed is not None
    # The promise of the whole, less what the way took.
    assert 0 < part.qos_target_ns <= mine.qos_target_ns == 10**12
    mine.split.others.end()
    eventually(lambda: here.forwarding.counts["answered"] + here.forwarding.counts["failed"] == 1)
    eventually(lambda: here.forwarding._places._value == forwarding.MOST_PASSED)


def test_what_lives_in_one_place_is_not_split(nodes):
    here, there = nodes
    for parts, node in (([0] * 4, HERE), ([1] * 4, THERE)):
        splitting(nodes, parts)
        found = ask_split(here).parameters
        assert (found["node"], found["split_parts"]) == (node, 1)
    assert [call.is_part for call in there.engine.calls] == [False]
    # A server that does not know of the other answers all.
    splitting(nodes, [0, 1, 0, 1])
    write_servers(here.forwarding.file, [here.address])
    here.forwarding.reload()
    assert ask_split(here).parameters["split_parts"] == 1


def test_a_request_that_is_refused_here_ends_its_parts(nodes):
    here, there = nodes
    splitting(nodes, [0, 1, 0, 1])
    there.engine.hold_all = True
    here.engine.refuse_with = InvalidInput("it is wrong")
    with pytest.raises(grpc.RpcError, match="it is wrong"):
        ask_split(here)
    eventually(lambda: here.forwarding._places._value == forwarding.MOST_PASSED)
    eventually(lambda: len(there.engine.cancelled) == len(there.engine.calls))
    assert here.forwarding.counts["failed"] == 1


def test_where_no_more_may_be_sent_all_nodes_stay(nodes):
    here, there = nodes
    splitting(nodes, [0, 1, 0, 1])
    for _ in range(forwarding.MOST_PASSED):
        here.forwarding._places.acquire()
    assert ask_split(here).parameters["split_parts"] == 1
    assert not there.engine.calls


def test_a_part_that_is_refused_is_in_no_report(nodes):
    here, there = nodes
    metadata = ((HOPS, "1"), (PART, "5"))
    for node, name in ((here, "none"), (there, "none")):
        with pytest.raises(grpc.RpcError):
            node.ask(name, metadata=metadata)
        assert not node.engine.refusals
    with pytest.raises(grpc.RpcError):
        here.ask("none", metadata=metadata[1:])
    assert here.engine.refusals == [("none", "UnknownName")]


def test_what_lies_in_the_memory_of_this_host_stays():
    request = decode_request(encode_request("gcn", TENSORS))
    first = request.inputs[0]
    shared = first._replace(parameters={"shared_memory_region": "r"})
    assert is_movable(request, Origin(b""))
    assert not is_movable(request, Origin(b"", hops=1))
    assert not is_movable(request._replace(inputs=[shared]), Origin(b""))
    found = origin_of(b"m", [(HOPS, "1"), (AUTHORIZATION, "Bearer t"), ("x-bin", b"")])
    assert found == Origin(b"m", 1, "Bearer t")


def test_only_who_has_the_key_tells_when_a_front_got_a_request(nodes):
    here, there = nodes
    stamps = FrontStamps("k" * 16)
    here.server.believe(stamps)
    early_ns = time.time_ns() - 10**9
    here.ask(metadata=((ARRIVED, stamps.value(early_ns)),))
    here.ask(metadata=((ARRIVED, FrontStamps("w" * 16).value(early_ns)),))
    here.ask()
    told = [call.front_ns for call in here.engine.calls]
    assert told[0] > 0.9e9
    assert told[1:] == [0, 0]
    # Another server is told what the front has told, or when this one got the request.
    late_here(nodes)
    there.server.believe(stamps)
    assert here.ask(metadata=((ARRIVED, stamps.value(early_ns)),))["node"] == THERE
    here.forwarding._stamps = SimpleNamespace(value=lambda _: stamps.value(early_ns))
    assert here.ask()["node"] == THERE
    assert all(call.front_ns > 0.9e9 for call in there.engine.calls)
    assert len(there.engine.calls) == 2
