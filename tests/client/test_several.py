"""One client and several servers: each call has one answer, whichever servers fail meanwhile."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import numpy as np
import pytest

from bench.kit.result import ROOT
from bench.kit.servers import free_ports
from bench.kit.waiting import PATIENCE_S, eventually, wait_for
from serve.client import Client
from serve.client.errors import (
    Cancelled,
    ClientError,
    Exhausted,
    InvalidRequest,
    NotFound,
    ServerFault,
    TimedOut,
    Unavailable,
)
from serve.client.requests import Request
from tests.client.small_server import SmallProcess, SmallServer, look_patiently

GRAPH = {"x": np.zeros((3, 2), np.float32), "edge_index": [[0, 1], [1, 2]]}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    look_patiently(monkeypatch)


@pytest.fixture
def pair():
    """Two servers, and a stack that ends them."""
    with ExitStack() as stack:
        servers = [SmallServer(), SmallServer()]
        ports = [stack.enter_context(server.running()) for server in servers]
        yield servers, ",".join(f"127.0.0.1:{port}" for port in ports)


def rows(answer):
    return answer.output.shape[0]


def test_calls_are_spread(make, pair):
    servers, target = pair
    with make(target) as client:
        for _ in range(60):
            assert rows(client.infer("m", **GRAPH)) == 3
    asked = [server.calls["ModelInfer"] for server in servers]
    assert sum(asked) == 60
    assert min(asked) > 5


def test_a_server_that_ends_is_left_and_found_again(make):
    first, second, again = SmallServer(), SmallServer(), SmallServer()
    with ExitStack() as stack, second.running() as port:
        gone = stack.enter_context(first.running())
        with make(f"127.0.0.1:{gone},127.0.0.1:{port}", timeout_s=PATIENCE_S) as client:
            wait_for(lambda: client.infer("m", **GRAPH) and first.calls["ModelInfer"], "a call")
            stack.close()
            for _ in range(20):
                assert rows(client.infer("m", **GRAPH)) == 3
            stack.enter_context(again.running(port=gone))
            wait_for(lambda: client.infer("m", **GRAPH) and again.calls["ModelInfer"], "a call")


def test_what_is_in_flight_on_a_silent_server_is_answered_by_another(pair):
    servers, target = pair
    with Client(target, timeout_s=PATIENCE_S) as client, ThreadPoolExecutor(8) as threads:
        wait_for(
            lambda: client.infer("m", **GRAPH) and min(one.calls["ModelInfer"] for one in servers),
            "calls to both",
        )
        servers[0].go.clear()
        answers = list(threads.map(lambda _: rows(client.infer("m", **GRAPH)), range(24)))
        assert answers == [3] * 24
        assert servers[0].in_flight >= 1
        before = servers[0].calls["ModelInfer"]
        servers[0].go.set()
        wait_for(
            lambda: client.infer("m", **GRAPH) and servers[0].calls["ModelInfer"] > before,
            "a call after it was heard again",
        )


def test_what_one_refuses_another_takes(make, pair):
    servers, target = pair
    with make(target) as client:
        client.infer("m", **GRAPH)
        for server in servers:
            server.refusals["ModelInfer"] = [(grpc.StatusCode.RESOURCE_EXHAUSTED, 10**6)]
        before = sum(server.calls["ModelInfer"] for server in servers)
        with pytest.raises(Exhausted, match="refused") as caught:
            client.infer("m", timeout_s=0.5, **GRAPH)
        assert caught.value.retry_after_s == 1000
        assert sum(server.calls["ModelInfer"] for server in servers) == before + 2
        servers[0].refusals["ModelInfer"] = [(grpc.StatusCode.RESOURCE_EXHAUSTED, 10**6)] * 50
        for _ in range(10):
            assert rows(client.infer("m", **GRAPH)) == 3


def test_a_call_waits_for_a_place_while_all_are_full(pair):
    servers, target = pair
    with Client(target, timeout_s=PATIENCE_S) as client, ThreadPoolExecutor(8) as threads:
        client.infer("m", **GRAPH)
        for server in servers:
            server.go.clear()
        first = [threads.submit(client.infer, "m", **GRAPH) for _ in range(2)]
        eventually(lambda: all(server.in_flight for server in servers))
        before = [server.calls["ModelInfer"] for server in servers]
        for server in servers:
            server.room = 1
        second = threads.submit(client.infer, "m", **GRAPH)
        wait_for(
            lambda: all(
                server.calls["ModelInfer"] > count
                for server, count in zip(servers, before, strict=True)
            ),
            "both to refuse",
        )
        for server in servers:
            server.go.set()
        assert [rows(call.result(PATIENCE_S)) for call in (*first, second)] == [3] * 3


def test_a_closed_client_ends_calls_that_wait_for_a_place(pair):
    servers, target = pair
    with Client(target, timeout_s=PATIENCE_S) as client, ThreadPoolExecutor(1) as threads:
        client.infer("m", **GRAPH)
        before = sum(server.calls["ModelInfer"] for server in servers)
        for server in servers:
            server.room = 0
        call = threads.submit(client.infer, "m", **GRAPH)
        wait_for(
            lambda: sum(server.calls["ModelInfer"] for server in servers) >= before + 2,
            "both to refuse",
        )
        client.close()
        with pytest.raises(Cancelled):
            call.result(PATIENCE_S)


def test_a_request_goes_to_the_server_that_holds_its_graph(make):
    servers = [SmallServer(), SmallServer()]
    servers[0].graphs, servers[1].graphs = ["roads"], ["roads", "papers"]
    with ExitStack() as stack:
        ports = [stack.enter_context(server.running()) for server in servers]
        with make(",".join(f"127.0.0.1:{port}" for port in ports)) as client:
            for _ in range(8):
                assert rows(client.infer("m", graph="papers", **GRAPH)) == 3
            assert servers[0].calls["graph", "papers"] == 0
            with pytest.raises(NotFound, match="graph 'rivers' is on none of 2 machines"):
                client.infer("m", graph="rivers", **GRAPH)


def test_answers_name_their_server(make, pair):
    _, target = pair
    with make(target) as client:
        answer = client.infer("m", **GRAPH)
        assert answer.qos.machine in target.split(",")
        assert answer.qos.attempts == 1
        assert (answer.model, answer.version, rows(answer)) == ("m", "1", 3)


def test_requests_of_a_stream_are_spread_and_survive_a_server(make):
    first, second = SmallProcess(free_ports(1)[0]), SmallServer()
    with ExitStack() as stack, second.running() as port:
        first.start()
        stack.callback(first.end)
        with make(f"127.0.0.1:{first.port},127.0.0.1:{port}", timeout_s=PATIENCE_S) as client:
            for _ in range(50):
                assert rows(client.infer("m", **GRAPH)) == 3
            before = second.calls["ModelInfer"]

            def requests():
                for number in range(200):
                    if number == 100:
                        stack.close()
                    x = np.zeros((1 + number % 7, 2), np.float32)
                    yield Request(model="m", x=x, edge_index=[[0], [0]])
                yield Request(model="m", x="no array", edge_index=[[0], [0]])

            found = dict(client.infer_stream(requests(), timeout_s=PATIENCE_S))
    assert sorted(found) == list(range(201))
    assert isinstance(found.pop(200), ClientError)
    assert all(rows(answer) == 1 + number % 7 for number, answer in found.items())
    assert before < second.calls["ModelInfer"] < before + 200


def test_a_stream_has_an_end_and_failed_requests_do_not_end_it(make, pair):
    servers, target = pair
    servers[0].refusals["ModelInfer"] = [(grpc.StatusCode.INTERNAL, None)]
    servers[1].refusals["ModelInfer"] = [(grpc.StatusCode.INTERNAL, None)]
    with make(target) as client:
        wanted = [Request(model="m", request_id=f"r{n}", **GRAPH) for n in range(20)]
        found = [outcome for _, outcome in client.infer_stream(wanted)]
        # The second server may not have been ready yet.
        assert 1 <= sum(isinstance(one, ServerFault) for one in found) <= 2
        assert len(found) == 20
        for server in servers:
            server.go.clear()
        with pytest.raises(TimedOut):
            list(client.infer_stream(wanted, timeout_s=0.5))
        for server in servers:
            server.go.set()
        assert list(client.infer_stream([])) == []


def test_an_error_that_others_would_give_too_is_the_answer(make, pair):
    servers, target = pair
    for server in servers:
        server.refusals["ModelInfer"] = [(grpc.StatusCode.INTERNAL, None)]
    with make(target) as client:
        with pytest.raises(ServerFault):
            client.infer("m", **GRAPH)
        assert sum(server.calls["ModelInfer"] for server in servers) == 1


def test_a_request_that_is_not_to_be_repeated_is_sent_once(make, pair):
    servers, target = pair
    with make(target) as client:
        client.infer("m", **GRAPH)
        for server in servers:
            server.refusals["ModelInfer"] = [(grpc.StatusCode.UNAVAILABLE, None)]
        before = sum(server.calls["ModelInfer"] for server in servers)
        with pytest.raises(Unavailable):
            client.infer("m", retry=False, **GRAPH)
        assert sum(server.calls["ModelInfer"] for server in servers) == before + 1


def test_a_server_that_says_it_is_not_ready_gets_no_calls(make, pair):
    servers, target = pair
    with make(target) as client:
        servers[0].ready = False
        eventually(lambda: asked_alone(client, servers))


def asked_alone(client, servers):
    """Whether ten calls in a row went to the second server."""
    before = servers[0].calls["ModelInfer"]
    for _ in range(10):
        client.infer("m", **GRAPH)
    return servers[0].calls["ModelInfer"] == before


def test_the_callers_time_holds_over_all_servers(make, pair):
    servers, target = pair
    with make(target) as client:
        client.infer("m", **GRAPH)
        for server in servers:
            server.go.clear()
        with pytest.raises((TimedOut, Unavailable)):
            client.infer("m", timeout_s=1.5, **GRAPH)
        for server in servers:
            server.go.set()


def test_nobody_there(make):
    ports = free_ports(2)
    with make(",".join(f"127.0.0.1:{port}" for port in ports), timeout_s=PATIENCE_S) as client:
        assert not client.ready()
        with pytest.raises(Unavailable, match="of 2 machines none is ready"):
            client.infer("m", retry=False, **GRAPH)


def test_a_closed_client_ends_its_calls(pair):
    servers, target = pair
    client = Client(target)
    client.infer("m", **GRAPH)
    for server in servers:
        server.go.clear()
    failed = []

    def ask():
        try:
            client.infer("m", **GRAPH)
        except (Cancelled, Unavailable) as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    before = sum(server.in_flight for server in servers)
    thread.start()
    eventually(lambda: sum(server.in_flight for server in servers) > before)
    client.close()
    thread.join(PATIENCE_S)
    assert len(failed) == 1
    client.close()
    with pytest.raises(Cancelled):
        client.infer("m", **GRAPH)
    for server in servers:
        server.go.set()


def test_what_is_of_one_server_is_refused(make, pair):
    _, target = pair
    with pytest.raises(ValueError, match="shared with one server"):
        make(target, shared_memory_bytes=1 << 20)
    with pytest.raises(ValueError, match="none twice"):
        make("127.0.0.1:1,127.0.0.1:1")
    with make(target) as client, pytest.raises(InvalidRequest, match="goes to each of them"):
        client.load("m")


def test_one_server_needs_nothing_of_several():
    code = (
        "import sys; from serve.client import Client, AsyncClient; Client('127.0.0.1:1').close();"
        "print([name for name in sys.modules if 'cluster' in name or name.endswith('.several')])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
        timeout=PATIENCE_S,
    ).stdout  # fmt: skip
    assert said.strip() == "[]"


@pytest.mark.slow
def test_each_call_has_its_own_answer_while_servers_are_killed_and_frozen():
    servers = [SmallProcess(port) for port in free_ports(3)]
    rng = random.Random(11)
    over = threading.Event()
    did = Counter()

    def disturb():
        """Kill or freeze one server at a time, so that two are left."""
        while not over.is_set():
            one = rng.choice(servers)
            if rng.random() < 0.5:
                one.end()
                over.wait(0.3)
                one.start()
                did["killed"] += 1
            else:
                one.process.send_signal(signal.SIGSTOP)
                over.wait(3)
                one.process.send_signal(signal.SIGCONT)
                did["frozen"] += 1
            over.wait(0.5)

    with ExitStack() as stack:
        for server in servers:
            server.start()
            stack.callback(server.end)
        target = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        client = stack.enter_context(Client(target, timeout_s=PATIENCE_S))
        client.infer("m", **GRAPH)
        disturber = threading.Thread(target=disturb)
        stack.callback(disturber.join)
        stack.callback(over.set)
        disturber.start()
        began_s = time.monotonic()

        def ask(number):
            wanted = 1 + number % 97
            answers = 0
            while answers < 20 or (time.monotonic() < began_s + 15 and not over.is_set()):
                answer = client.infer(
                    "m", x=np.zeros((wanted, 2), np.float32), edge_index=[[0], [0]]
                )
                assert rows(answer) == wanted
                answers += 1
            return answers

        with ThreadPoolExecutor(6) as threads:
            answered = sum(threads.map(ask, range(6)))
        wait_for(lambda: did["killed"] and did["frozen"], "a kill and a freeze")
    assert answered >= 120


def test_a_call_is_made_by_the_thread_that_waits_for_it(pair, monkeypatch):
    _servers, target = pair
    caller, started = threading.current_thread(), []
    begin = threading.Thread.start

    def noted(thread):
        if threading.current_thread() is caller:
            started.append(thread.name)
        begin(thread)

    with Client(target) as client:
        client.infer("m", **GRAPH)  # and so it looks at its servers
        monkeypatch.setattr(threading.Thread, "start", noted)
        for _ in range(10):
            assert rows(client.infer("m", **GRAPH)) == 3
    assert started == []
