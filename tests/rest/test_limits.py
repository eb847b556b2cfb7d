"""What a client can cost the gateway: each is bounded, told and counted."""

import asyncio
import http.client
import json
import re
import socket
from contextlib import ExitStack, suppress

import pytest

from bench.kit.waiting import PATIENCE_S, wait_for
from serve.rest.byte_budget import BudgetExhausted, ByteBudget
from serve.rest.counts import Counts
from serve.rest.process import missing_packages
from tests.rest.conftest import MOST_BYTES, Gateway
from tests.rest.test_paths import INFER, request

MOST_CONNECTIONS = pytest.importorskip(
    "serve.rest.connections", exc_type=ImportError
).MOST_CONNECTIONS
Request = pytest.importorskip("starlette.requests").Request
BodyReader = pytest.importorskip("serve.rest.bodies", exc_type=ImportError).BodyReader

HEAD = f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: {{}}\r\n\r\n"


class HastyGateway(Gateway):
    """A gateway that gives clients little time."""

    receive_timeout_s = 1.0


@pytest.fixture(scope="module")
def hasty():
    if missing_packages():
        pytest.skip("the gateway's packages")
    with ExitStack() as stack:
        yield HastyGateway(stack)


def refused(gateway, reason):
    text = gateway.get("/metrics").body.decode()
    found = re.search(rf'^gnnserve_rest_refused_total{{reason="{reason}"}} (\S+)$', text, re.M)
    return float(found[1])


def connect(gateway):
    client = socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE_S)
    client.settimeout(PATIENCE_S)
    return client


@pytest.mark.parametrize("sent", [b"", b"GET /v2 HTTP/1.1\r\nx: y\r\n"])
def test_a_request_that_never_comes_is_cut_off(hasty, sent):
    before = refused(hasty, "no_request")
    with connect(hasty) as client:
        client.sendall(sent)
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
    wait_for(lambda: refused(hasty, "no_request") > before, "its count")


def test_a_head_that_drips_is_cut_off(hasty):
    with connect(hasty) as client:
        client.sendall(b"GET /v2 HTTP/1.1\r\n")

        def ended():
            try:
                client.sendall(b"x: y\r\n")
            except OSError:
                return True
            return False

        wait_for(ended, "the end of the connection")


def test_a_body_that_never_comes_is_408(hasty):
    before = refused(hasty, "no_body")
    with connect(hasty) as client:
        client.sendall(HEAD.format(1000).encode() + b"{")
        assert client.makefile("rb").readline().split()[1] == b"408"
    assert refused(hasty, "no_body") == before + 1


def test_bodies_beyond_what_may_be_held_wait_and_then_are_503(hasty):
    with ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(connect(hasty))
            client.sendall(HEAD.format(MOST_BYTES).encode())
        # They are given up on after a second too, so that others get their turn.
        statuses = [hasty.post(INFER, b"{" + b" " * (MOST_BYTES - 1)).status for _ in range(3)]
    assert set(statuses) <= {400, 503}
    wait_for(lambda: b"gnnserve_rest_held_bytes 0.0" in hasty.get("/metrics").body, "all bytes")
    assert hasty.post(INFER, request()).status == 200


def test_an_idle_connection_gives_way_to_a_new_one(gateway):
    before = refused(gateway, "connections")
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(gateway)) for _ in range(MOST_CONNECTIONS)]
        assert gateway.get("/v2").status == 200
        wait_for(lambda: refused(gateway, "connections") > before, "their count")
        assert len(idle) == MOST_CONNECTIONS
    assert gateway.post(INFER, request()).status == 200


def test_requests_in_flight_do_not_give_way(gateway, engine):
    engine.hold_all = True
    with ExitStack() as stack:
        asked = []
        for _ in range(8):
            connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
            stack.callback(connection.close)
            connection.request("POST", INFER, json.dumps(request()).encode())
            asked.append(connection)
        engine.wait_for_calls(8)
        for _ in range(MOST_CONNECTIONS + 50):
            stack.enter_context(connect(gateway))
        engine.let_go()
        assert [one.getresponse().status for one in asked] == [200] * 8


def test_clients_that_hang_up_harm_no_others(gateway, engine):
    """However fast they are: the gateway resets the calls of all on one connection."""
    engine.hold_all = True
    content = json.dumps(request(id="gone")).encode()
    head = f"POST {INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    with ExitStack() as stack:
        patient = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
        stack.callback(patient.close)
        patient.request("POST", INFER, json.dumps(request(id="patient")).encode())
        engine.wait_for_calls(len(engine.calls) + 1)
        for _ in range(20):
            before = len(engine.calls)
            with ExitStack() as batch:
                for _ in range(100):
                    batch.enter_context(connect(gateway)).sendall(head.encode() + content)
                engine.wait_for_calls(before + 100)
        engine.let_go()
        assert patient.getresponse().status == 200
    assert gateway.rpc.refused["resets"] == 0


def test_a_connection_serves_many_requests(gateway):
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    for number in range(5):
        connection.request("POST", INFER, json.dumps(request(id=str(number))).encode())
        used = connection.sock
        assert json.loads(connection.getresponse().read())["id"] == str(number)
        assert connection.sock is used
    connection.close()


def test_requests_may_be_sent_before_earlier_answers(gateway):
    with connect(gateway) as client:
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
        client.shutdown(socket.SHUT_WR)
        # Whoever closes their side after a request has gone; the first may be answered.
        client.makefile("rb").read()
    with connect(gateway) as client:
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n" * 2)
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert client.makefile("rb").read().count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_what_is_no_http_is_refused(gateway, junk):
    with connect(gateway) as client:
        client.sendall(junk + b"\r\n\r\n")
        answer = client.makefile("rb").read()
        assert answer.split()[1] in (b"400", b"404")
    assert gateway.get("/v2").status == 200


def test_an_answer_that_nobody_reads_is_held_no_longer_than_allowed(gateway, monkeypatch):
    """The watcher, by a clock of its own."""
    pytest.importorskip("uvicorn")
    from serve.rest import connections
    from serve.rest.counts import Counts

    class Transport:
        aborted = False

        def get_write_buffer_size(self):
            return 10

        def abort(self):
            self.aborted = True

    class Connection:
        began_s = unread_s = None
        since_s = 0.0

        def __init__(self):
            self.transport = Transport()

    tally = Counts()
    watched = connections.Connections(tally, 10.0)
    one = Connection()
    watched.opened(one)
    watched._check(100.0)
    watched._check(100.0 + connections.SEND_S)
    assert not one.transport.aborted
    one.unread_s = None  # it has read some
    watched._check(101.0 + connections.SEND_S)
    watched._check(102.0 + 2 * connections.SEND_S)
    assert one.transport.aborted
    assert b'{reason="slow_reader"} 1.0' in tally.text()


def test_the_budget_serves_in_order_and_loses_nothing():
    async def play():
        budget = ByteBudget(10)
        order = []

        async def hold(name, size_bytes, limit_s=PATIENCE_S):
            async with budget.holding(size_bytes, limit_s):
                order.append(name)
                await asyncio.sleep(0)

        async with budget.holding(8, PATIENCE_S):
            waiting = [asyncio.ensure_future(hold(name, size)) for name, size in
                       (("large", 10), ("small", 1), ("beyond", 99))]  # fmt: skip
            await asyncio.sleep(0)
            assert order == []  # a small one does not overtake a large one for ever
            with pytest.raises(BudgetExhausted):
                await hold("late", 1, 0.01)
            given_up = asyncio.ensure_future(hold("cancelled", 1))
            await asyncio.sleep(0)
            given_up.cancel()
        await asyncio.gather(*waiting)
        assert order == ["large", "small", "beyond"]
        assert budget.held_bytes == 0

    asyncio.run(play())


def test_a_request_without_a_body_needs_no_room():
    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def ask():
        bodies = BodyReader(Counts(), most_bytes=100, total_bytes=100, limit_s=0.01)
        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        async with bodies.holding(100), bodies.received(request) as body:
            return bytes(body)

    assert asyncio.run(ask()) == b""


def test_one_that_gives_up_while_bytes_come_free_only_gives_up():
    async def play():
        budget = ByteBudget(10)

        async def hold():
            async with budget.holding(5, PATIENCE_S):
                raise AssertionError("it had given up")

        async with budget.holding(8, PATIENCE_S):
            given_up = asyncio.ensure_future(hold())
            await asyncio.sleep(0)
            given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert budget.held_bytes == 0

    asyncio.run(play())
