"""Large bodies, which are received past the event loop."""

import asyncio
import gzip
import http.client
import json
import socket
from contextlib import ExitStack, suppress
from functools import partial

import pytest

from bench.kit.waiting import PATIENCE_S, wait_for
from serve.rest.process import missing_packages
from tests.rest.conftest import MOST_BYTES
from tests.rest.test_limits import HEAD, HastyGateway, connect, refused
from tests.rest.test_paths import INFER, request

h11 = pytest.importorskip("h11")
connections = pytest.importorskip("serve.rest.connections", exc_type=ImportError)
direct_bodies = pytest.importorskip("serve.rest.direct_bodies", exc_type=ImportError)
LEAST_BYTES = direct_bodies.LEAST_BYTES

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def padded(size_bytes, **fields):
    """Return a request of that size."""
    return json.dumps(request(**fields)).encode().ljust(size_bytes)


@pytest.fixture(scope="module")
def hasty():
    if missing_packages():
        pytest.skip("the gateway's packages")
    with ExitStack() as stack:
        yield HastyGateway(stack)


@pytest.mark.parametrize("size", [LEAST_BYTES - 1, LEAST_BYTES, 700_001, MOST_BYTES])
def test_one_connection_serves_bodies_of_any_size(gateway, size):
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    used = set()
    for number, body in enumerate(
        (padded(size, id="0"), padded(900, id="1"), padded(size, id="2"))
    ):
        connection.request("POST", INFER, body)
        used.add(connection.sock)
        answer = connection.getresponse()
        told = answer.read()
        assert answer.status == 200, told
        assert json.loads(told)["id"] == str(number)
    assert len(used) == 1
    connection.close()


def test_a_body_may_come_in_any_pieces_and_with_the_next_request(gateway):
    body = padded(500_000)
    sent = HEAD.format(len(body)).encode() + body + LIVE
    with connect(gateway) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin in range(0, len(sent), 99_991):
            client.sendall(sent[begin : begin + 99_991])
        answers = client.makefile("rb").read()
    assert answers.count(b"HTTP/1.1 200") == 2


def test_a_client_that_waits_to_be_asked_for_the_body_is_asked(gateway):
    body = padded(400_000)
    head = HEAD.format(len(body)).replace("\r\n\r\n", "\r\nExpect: 100-continue\r\n\r\n")
    with connect(gateway) as client:
        client.sendall(head.encode())
        answers = client.makefile("rb")
        assert answers.readline().split()[1] == b"100"
        assert answers.readline() == b"\r\n"
        client.sendall(body)
        assert answers.readline().split()[1] == b"200"


def test_a_large_body_may_be_compressed(gateway):
    body = gzip.compress(padded(600_000), compresslevel=0)
    assert len(body) > LEAST_BYTES
    assert gateway.post(INFER, body, Content_Encoding="gzip").status == 200


def test_a_large_body_that_stops_is_408_and_its_connection_ends(hasty):
    before = refused(hasty, "no_body")
    with connect(hasty) as client:
        client.sendall(HEAD.format(800_000).encode() + b" " * 300_000)
        answers = client.makefile("rb")
        assert answers.readline().split()[1] == b"408"
        with suppress(ConnectionResetError):  # some bytes were never read
            answers.read()  # until the end, which comes
    assert refused(hasty, "no_body") == before + 1
    assert hasty.post(INFER, padded(800_000)).status == 200


def test_a_client_that_leaves_within_its_body_leaves_nothing(hasty):
    for _ in range(5):
        with connect(hasty) as client:
            client.sendall(HEAD.format(MOST_BYTES).encode() + b" " * 700_000)
    wait_for(lambda: b"gnnserve_rest_held_bytes 0.0" in hasty.get("/metrics").body, "all bytes")
    assert hasty.post(INFER, padded(800_000)).status == 200


def test_h11_tells_how_much_of_a_body_is_to_come():
    """What a body is received past the event loop by."""
    connection = connections.Connection.__new__(connections.Connection)
    connection.conn = h11.Connection(h11.SERVER)
    assert connection.body_left is None
    connection.conn.receive_data(HEAD.format(1000).encode() + b"{" * 10)
    assert isinstance(connection.conn.next_event(), h11.Request)
    assert connection.body_left == 1000
    assert isinstance(connection.conn.next_event(), h11.Data)
    assert connection.body_left == 990
    connection.conn._reader._remaining = 0
    assert isinstance(connection.conn.next_event(), h11.EndOfMessage)


def test_only_large_bodies_of_known_length_are_received_so():
    """In this process, by an application that answers how its body came."""
    uvicorn = pytest.importorskip("uvicorn")
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse

    from serve.rest.counts import Counts

    async def app(scope, receive, send):
        size_bytes = int(dict(scope["headers"]).get(b"content-length", LEAST_BYTES))
        asked = Request(scope, receive)
        body = await direct_bodies.receive_directly(asked, size_bytes)
        told = str(len(await asked.body())) + " by the loop" if body is None else str(sum(body))
        await PlainTextResponse(told)(scope, receive, send)

    async def ask(port, head, body):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + head + b"\r\n\r\n" + body
        )
        answer = await reader.read()
        writer.close()
        return answer.rpartition(b"\r\n")[2].decode()

    async def play():
        all_connections = connections.Connections(Counts(), PATIENCE_S)
        config = uvicorn.Config(
            app, http=partial(connections.Connection, all_connections), ws="none", lifespan="off",
            log_config=None,
        )  # fmt: skip
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.startup(sockets=[listener])
        port = listener.getsockname()[1]
        large, small = b"\1" * LEAST_BYTES, b"\1" * (LEAST_BYTES - 1)
        found = [
            await ask(port, b"Content-Length: %d" % len(body), body) for body in (large, small)
        ]
        chunk = b"%x\r\n" % len(large) + large + b"\r\n0\r\n\r\n"
        found.append(await ask(port, b"Transfer-Encoding: chunked", chunk))
        await server.shutdown(sockets=[listener])
        return found

    async def in_time():
        async with asyncio.timeout(PATIENCE_S):
            return await play()

    assert asyncio.run(in_time()) == [
        f"{LEAST_BYTES}",
        f"{LEAST_BYTES - 1} by the loop",
        f"{LEAST_BYTES} by the loop",
    ]
