"""Programs that speak HTTP/2 and know nothing of gRPC."""

import re
import struct
import subprocess

import pytest

from bench.kit.http2_frames import prefixed
from bench.kit.waiting import PATIENCE_S
from serve.wire.messages import INFER_METHOD, decode_response
from tests.interop.plan import needs
from tests.rpc.requests import request

HEADERS = ("content-type: application/grpc", "te: trailers")


@pytest.fixture
def body(tmp_path):
    file = tmp_path / "body"
    file.write_bytes(prefixed(request(20)))
    return file


def run(*command):
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def curl(server, *arguments, path=INFER_METHOD):
    needs("curl")
    if b"HTTP2" not in run("curl", "--version"):
        pytest.skip("curl was built without HTTP/2")
    url = f"http://127.0.0.1:{server.port}{path}"
    return run("curl", "--silent", "--http2-prior-knowledge", *arguments, url)


def test_curl_infers(server, body, tmp_path):
    head, answer = tmp_path / "head", tmp_path / "answer"
    curl(
        server,
        *(word for header in HEADERS for word in ("--header", header)),
        *("--data-binary", f"@{body}", "--dump-header", str(head), "--output", str(answer)),
    )
    content = answer.read_bytes()
    assert struct.unpack(">BI", content[:5]) == (0, len(content) - 5)
    assert decode_response(content[5:]).request_id == "r"
    lines = head.read_text().lower().split("\n")
    assert lines[0].startswith("http/2 200")
    assert "content-type: application/grpc" in [line.strip() for line in lines]
    assert "grpc-status: 0" in [line.strip() for line in lines]


@pytest.mark.parametrize(("clients", "streams"), [(1, 60), (8, 8)])
def test_h2load_is_answered_in_full(server, body, clients, streams):
    needs("h2load")
    found = run(
        *("h2load", "-n", "2000", "-c", str(clients), "-m", str(streams), "-d", str(body)),
        *(word for header in HEADERS for word in ("-H", header)),
        f"http://127.0.0.1:{server.port}{INFER_METHOD}",
    ).decode()
    assert "2000 succeeded, 0 failed, 0 errored, 0 timeout" in found
    assert re.search(r"2xx, 0 3xx, 0 4xx, 0 5xx", found)
    assert server.refused["no_thread"] == 0
