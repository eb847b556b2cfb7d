"""Bodies that are wrong on purpose: an answer below 500, and bounded memory."""

import gzip
import json
import os
import socket
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.kit.waiting import PATIENCE_S, wait_for
from tests.rest.conftest import MOST_BYTES
from tests.rest.test_paths import EDGES, INFER, X, request, tensor

EDGE_INPUT = tensor("edge_index", EDGES, "INT64")


def with_x(data, shape=(3, 4), datatype="FP32", **fields):
    """A request as text, whose x has `data`, which is JSON already."""
    x = {"name": "x", "datatype": datatype, "shape": list(shape), "data": "DATA", **fields}
    return json.dumps({"inputs": [x, EDGE_INPUT]}).replace('"DATA"', data).encode()


ROW = "[1,2,3,4]"
BODIES = {
    "nothing": b"",
    "null": b"null",
    "a number": b"7",
    "a list": b"[]",
    "no JSON": b"inputs=1",
    "half": b'{"inputs":[{"name":"x"',
    "open text": b'{"inputs":[{"name":"x',
    "two documents": b"{}{}",
    "no inputs": b'{"id":"a"}',
    "inputs of null": b'{"inputs":null}',
    "inputs of texts": b'{"inputs":["x"]}',
    "no UTF-8": b'{"inputs":[],"id":"\xff\xfe"}',
    "elements of no UTF-8": with_x('["?"]', (1,), "BYTES").replace(b"?", b"\xff"),
    "lone surrogate": b'{"inputs":[],"id":"\\ud800"}',
    "a byte of zero": b'{"inputs":[]}\x00',
    "deep lists": b"[" * 100_000,
    "deep lists that close": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep parameters": b'{"inputs":[],"parameters":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    "deep data": with_x("[" * 50_000 + "]" * 50_000),
    "NaN": with_x("[NaN" + ",0" * 11 + "]"),
    "Infinity": with_x("[-Infinity" + ",0" * 11 + "]"),
    "too large for FP32": with_x("[1e39" + ",0" * 11 + "]"),
    "huge integer": with_x("[" + "9" * 5_000 + ",0" * 11 + "]"),
    "huge exponent": with_x("[1e999999999" + ",0" * 11 + "]"),
    "text among numbers": with_x('["1"' + ",0" * 11 + "]"),
    "null among numbers": with_x("[null" + ",0" * 11 + "]"),
    "truth among numbers": with_x("[true" + ",0" * 11 + "]"),
    "ragged": with_x(f"[{ROW},{ROW},[1,2,3]]"),
    "nested too deep": with_x(f"[[{ROW},{ROW},{ROW}]]"),
    "one list too many": with_x(f"[{ROW},{ROW},{ROW},{ROW}]"),
    "too few": with_x("[1,2,3]"),
    "data is an object": with_x('{"a":1}'),
    "data is a number": with_x("0"),
    "data is null": with_x("null"),
    "data of objects": with_x("[{}]"),
    "a marker by an escaped key": with_x("[1]").replace(b'"data"', b'"d\\u0061ta"'),
    "data twice by an escaped key": with_x('[1],"d\\u0061ta":[0]'),
    "negative shape": with_x("[]", shape=(-1, 4)),
    "huge shape": with_x("[1]", shape=(2**62, 2**62)),
    "shape beyond 64 bits": with_x("[]", shape=(2**80, 0)),
    "shape of floats": with_x("[1]", shape=(1.5, 2)),
    "a shape of a million": with_x("[]", shape=[0] * 200_000),
    "as deep as its shape": with_x("[" * 150_000 + "1" + "]" * 150_000, shape=[1] * 150_000),
    "unknown datatype": with_x("[]", datatype="FP8"),
    "BF16 as numbers": with_x("[1]", datatype="BF16"),
    "BYTES": with_x('["a","\\ud800"]', shape=(2,), datatype="BYTES"),
    "wrong datatype": with_x("[1,2,3,4,5,6,7,8,9,10,11,12]", datatype="INT32"),
    "half precision beyond its range": with_x("[1e6" + ",0" * 11 + "]", datatype="FP16"),
    "same input twice": json.dumps({"inputs": [EDGE_INPUT, EDGE_INPUT]}).encode(),
    "10,000 inputs": json.dumps({"inputs": [EDGE_INPUT] * 3_000}).encode(),
    "10,000 parameters": json.dumps(
        request(parameters={f"p{number}": number for number in range(10_000)})
    ).encode(),
    "parameter beyond 64 bits": json.dumps(request(parameters={"seed": 2**64})).encode(),
    "parameter of a list": json.dumps(request(parameters={"seed": [1]})).encode(),
    "parameter of null": json.dumps(request(parameters={"seed": None})).encode(),
    "parameter of the wrong kind": json.dumps(request(parameters={"tenant": 5})).encode(),
    "long name": with_x("[1]", name="x" * 100_000),
    "binary without bytes": with_x("0", parameters={"binary_data_size": 48}),
    "negative binary size": json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1],
                     "parameters": {"binary_data_size": -1}}]}
    ).encode(),
    "binary_data_output of 1": json.dumps(
        request(parameters={"binary_data_output": 1})
    ).encode(),
    "a million numbers too many": with_x("[" + "0," * 400_000 + "0]"),
    "an unknown region": json.dumps({"inputs": [
        {"name": "x", "datatype": "FP32", "shape": [3, 4], "parameters":
         {"shared_memory_region": "no", "shared_memory_byte_size": 48}}, EDGE_INPUT]}).encode(),
}  # fmt: skip


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_wrong_body_is_the_clients_mistake(gateway, engine, body):
    answer = gateway.post(INFER, body)
    assert 400 <= answer.status < 500, answer.json
    assert answer.json["error"]
    assert not engine.calls
    assert gateway.post(INFER, request()).status == 200


def test_what_json_allows_is_taken(gateway):
    doubled = with_x("[0" + ",0" * 11 + '],"data":' + json.dumps(X.reshape(-1).tolist()))
    spaced = json.dumps(request(), indent=8).encode().replace(b"\n", b"\r\n\t")
    for body in (doubled, spaced):
        answer = gateway.post(INFER, body)
        assert answer.status == 200, answer.body
        assert answer.json["outputs"][0]["data"][0] == pytest.approx(2)


@settings(max_examples=150)
@given(data=st.data())
def test_no_mutation_of_a_request_is_an_error_of_ours(shared_gateway, data):
    body = bytearray(json.dumps(request(id="a")).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        piece = data.draw(st.sampled_from([b"", b"[", b"]", b"{", b'"', b",", b"-", b"0", b"e9"]))
        body[at : at + data.draw(st.integers(0, 3))] = piece
    assert shared_gateway.post(INFER, bytes(body)).status < 500


@pytest.mark.parametrize(
    ("length", "status"), [("x", 400), ("-1", 400), ("1e3", 400), ("9" * 30, 400), ("²", 400)]
)
def test_a_wrong_length_of_the_json_is_refused(gateway, length, status):
    body = json.dumps(request()).encode()
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        head = (
            f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
            f"Inference-Header-Content-Length: {length}\r\nConnection: close\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        assert client.makefile("rb").readline().split()[1] == str(status).encode()


def test_a_body_beyond_the_limit_is_413_and_never_read(gateway):
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: {2**40}\r\n\r\n"
        client.sendall(head.encode())
        assert client.makefile("rb").readline().split()[1] == b"413"


def test_a_body_in_chunks_is_bounded_too(gateway):
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(f"POST {INFER} HTTP/1.1\r\nHost: a\r\n".encode())
        client.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(MOST_BYTES // 0x10000 + 1):
            client.sendall(chunk)
        assert client.makefile("rb").readline().split()[1] == b"413"


@pytest.mark.parametrize("module", [gzip, zlib])
def test_a_bomb_is_not_unpacked(gateway, module):
    before = peak_bytes(gateway)
    bomb = module.compress(b" " * 200 * MOST_BYTES)
    assert len(bomb) < MOST_BYTES
    coding = {gzip: "gzip", zlib: "deflate"}[module]
    answer = gateway.post(INFER, bomb, Content_Encoding=coding)
    assert answer.status == 413
    assert peak_bytes(gateway) - before < 20 * MOST_BYTES


def test_a_body_with_two_lengths_is_refused(gateway, engine):
    """One counts towards what bodies may take together, and the other one would come."""
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n".encode())
        body = json.dumps(request()).encode()
        client.sendall(
            b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        )
        assert client.makefile("rb").readline().split()[1] == b"400"
    assert not engine.calls


@pytest.mark.parametrize(
    "body",
    [
        b"no gzip",
        gzip.compress(b"x" * 1000)[:20],
        gzip.compress(json.dumps(request()).encode()) + b"more",
        gzip.compress(json.dumps(request()).encode()) + gzip.compress(b"more"),
    ],
    ids=["no gzip", "cut off", "more behind it", "two parts"],
)
def test_a_broken_compression_is_refused(gateway, body):
    assert gateway.post(INFER, body, Content_Encoding="gzip").status == 400
    assert gateway.post(INFER, body, Content_Encoding="zstd").status == 415


def test_memory_stays_in_proportion_to_the_body(gateway):
    """A quarter of a million numbers, which as objects and a list would take 8 MiB."""
    gateway.post(INFER, request())
    before = peak_bytes(gateway)
    body = with_x("[" + "1.5," * (MOST_BYTES // 4 - 200) + "1]", shape=(MOST_BYTES // 4 - 199, 1))
    assert gateway.post(INFER, body).status == 400  # one feature, not four
    first = peak_bytes(gateway)
    assert first - before < 8 * MOST_BYTES
    for _ in range(60):
        assert gateway.post(INFER, body).status == 400
    assert peak_bytes(gateway) - first < 48 * MOST_BYTES  # the heap's gaps, but no body is kept


def peak_bytes(gateway):
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("name", ["a" * 100_000, "%00", "%ff", "..", "%2e%2e", "a%20b", "ä"])
def test_a_strange_name_is_not_found(gateway, name):
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.settimeout(PATIENCE_S)
        client.sendall(f"GET /v2/models/{name} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        status = client.makefile("rb").readline().split()[1]
        assert status in (b"400", b"404", b"431")
    assert gateway.get("/v2/models/gcn").status == 200


@pytest.mark.parametrize("path", ["/nothing", "/docs/nothing", "/live/assets/nothing"])
def test_a_host_that_is_no_address_costs_no_error_of_ours(gateway, path):
    assert gateway.get(path, Host="[").status == 404


@pytest.mark.parametrize("origin", ["http://[", "null", "x", "http://[::1", "//["])
def test_a_page_of_no_address_is_of_another_site(gateway, engine, origin):
    answer = gateway.post(INFER, request(), Origin=origin)
    assert answer.status == 403, answer.body
    assert not engine.calls


def test_no_descriptor_is_left_open(gateway):
    folder = Path(f"/proc/{gateway.process.pid}/fd")
    gateway.post(INFER, request())
    wait_for(lambda: b"gnnserve_rest_connections 1.0" in gateway.get("/metrics").body, "quiet")
    before = len(os.listdir(folder))
    for _ in range(20):
        gateway.post(INFER, b"{")
        gateway.get("/metrics")
    wait_for(lambda: len(os.listdir(folder)) <= before + 1, "their end")
