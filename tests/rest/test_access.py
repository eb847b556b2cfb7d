"""Every path of the HTTP port with every kind of credential, and encrypted connections."""

import base64
import http.client
import socket
import ssl
from contextlib import ExitStack, suppress
from unittest.mock import Mock

import pytest

from bench.kit.waiting import PATIENCE_S
from serve.access.certificates import CertificateFiles, Certificates
from serve.access.rules import ROLES
from serve.access.settings import AccessSettings
from serve.obs.http import HttpPort, listening_socket
from serve.rest.connections import MOST_CONNECTIONS
from serve.rest.documentation import Documentation
from serve.rest.infer_paths import InferPaths
from serve.rest.live import LivePage
from serve.rest.paths import Paths
from serve.rest.process import missing_packages
from tests.access.certs import Authority, needs_openssl
from tests.access.support import CREDENTIALS, TOKENS, callers_of, write_file
from tests.rest.conftest import Gateway
from tests.rpc.fakes import FEATURES

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason="packages are missing")

FREE, INFER, OBSERVE, EITHER, ADMIN = "free", "infer", "observe", "infer observe", ""
MODEL, REGION = "/v2/models/gcn", "/v2/systemsharedmemory/region/r"
INFERENCE = {
    "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [1, FEATURES], "data": [0.0] * FEATURES},
        {"name": "edge_index", "datatype": "INT64", "shape": [2, 0], "data": []},
    ]
}
#: By request: who may make it, and the status that they get.
CELLS = {
    "GET /": (OBSERVE, 200),
    "GET /live/assets/live.css": (FREE, 200),
    "GET /live/events?window=never": (OBSERVE, 400),
    "GET /live/requests?from=1&until=2": (OBSERVE, 400),
    "GET /live/requests/r1": (OBSERVE, 400),
    "GET /docs": (FREE, 200),
    "GET /docs/docs.css": (FREE, 200),
    "GET /openapi.json": (OBSERVE, 200),
    "GET /nothing": (FREE, 404),
    "GET /v2": (EITHER, 200),
    "GET /v2/health/live": (FREE, 200),
    "GET /v2/health/ready": (FREE, 200),
    "GET /v2/models": (OBSERVE, 200),
    "GET /v2/models/stats": (OBSERVE, 200),
    f"GET {MODEL}": (EITHER, 200),
    f"GET {MODEL}/ready": (FREE, 200),
    f"GET {MODEL}/config": (EITHER, 200),
    f"GET {MODEL}/stats": (OBSERVE, 200),
    f"GET {MODEL}/versions/1/stats": (OBSERVE, 200),
    f"POST {MODEL}/infer": (INFER, 200),
    f"POST {MODEL}/versions/1/infer": (INFER, 200),
    "POST /predictions/gcn": (INFER, 200),
    "PUT /predictions/gcn/1": (INFER, 200),
    "POST /v2/repository/index": (OBSERVE, 200),
    "POST /v2/repository/models/gcn/load": (ADMIN, 200),
    "POST /v2/repository/models/gcn/unload": (ADMIN, 200),
    "GET /v2/repository/versions": (OBSERVE, 200),
    "GET /v2/repository/models/gcn/versions": (OBSERVE, 200),
    "POST /v2/repository/models/gcn/versions": (ADMIN, 400),
    "GET /v2/systemsharedmemory/status": (INFER, 200),
    "POST /v2/systemsharedmemory/unregister": (INFER, 200),
    f"GET {REGION}/status": (INFER, 404),
    f"POST {REGION}/unregister": (INFER, 200),
    "GET /v2/cudasharedmemory/status": (INFER, 501),
    "GET /v2/trace/setting": (ADMIN, 501),
    "GET /metrics": (OBSERVE, 200),
    "GET /report.json": (OBSERVE, 503),
}


def test_no_path_is_without_a_row():
    made = [*InferPaths(Mock(), Mock(), 1).table(), *Paths(Mock(), Mock(), Mock()).table()]
    made += [*Documentation(Mock(), made).table(), *LivePage(Mock()).table()]
    shown = {f"{path.method} {path.path}" for path in made}
    assert shown == {method for method in ROLES if not method.startswith("/")}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    access = AccessSettings(tokens_file=str(write_file(folder)))
    with ExitStack() as stack:
        Gateway.database = folder / "none.db"
        stack.callback(setattr, Gateway, "database", None)
        yield Gateway(stack, access, folder)


@pytest.mark.parametrize("credential", CREDENTIALS)
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_has_its_status(guarded, cell, credential):
    verb, path = cell.split()
    who, status = CELLS[cell]
    body = INFERENCE if "infer" in path or "predictions" in path else None
    headers = {}
    if credential != "none":
        headers["Authorization"] = f"Bearer {TOKENS[credential]}"
    answer = guarded.ask(verb, path, body, **headers)
    roles = {"admin": EITHER, "other tenant": INFER}.get(credential, credential).split()
    if who == FREE or set(roles) & set(who.split()):
        assert answer.status == status, answer.body
        return
    unknown = credential in ("none", "wrong", "expired")
    assert answer.status == (401 if unknown else 403), answer.body
    assert ("www-authenticate" in answer.headers) is unknown
    assert answer.json["error"]
    assert TOKENS.get(credential, "?") not in answer.body.decode()


def test_a_probe_without_a_credential_hears_that_a_model_is_not_ready(guarded):
    guarded.engine.ready = False
    try:
        for model in ("gcn", "nope"):
            answer = guarded.get(f"/v2/models/{model}/ready")
            assert (answer.status, answer.json["ready"]) == (503, False)
        bearer = f"Bearer {TOKENS['infer']}"
        assert guarded.get("/v2/models/nope/ready", Authorization=bearer).status == 404
    finally:
        guarded.engine.ready = True


def test_a_browser_may_send_the_token_as_a_password(guarded):
    basic = base64.b64encode(f"anybody:{TOKENS['observe']}".encode()).decode()
    assert guarded.get("/metrics", Authorization=f"Basic {basic}").status == 200


def test_tenants_count_through_the_gateway(guarded):
    for tenant, status in (("first", 200), ("guest", 403)):
        body = INFERENCE | {"parameters": {"tenant": tenant}}
        bearer = f"Bearer {TOKENS['infer']}"
        answer = guarded.post(f"{MODEL}/infer", body, Authorization=bearer)
        assert answer.status == status


def test_a_large_body_without_a_credential_is_not_read(guarded):
    """The head alone is refused: no byte of the body that it announces is waited for."""
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=PATIENCE_S)
    try:
        connection.putrequest("POST", f"{MODEL}/infer")
        connection.putheader("Content-Length", "1000000")
        connection.endheaders()
        assert connection.getresponse().status == 401
    finally:
        connection.close()


def context_of(authority, client=None):
    context = ssl.create_default_context(cafile=authority.certificate)
    if client is not None:
        context.load_cert_chain(*client)
    return context


def get(port, path, context, **headers):
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE_S, context=context)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


@needs_openssl
def test_the_gateway_encrypts_and_knows_certificates(tmp_path):
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("server")
    box = authority.sign("box", "DNS:box.example")
    other = authority.sign("other", "DNS:other.example")
    access = AccessSettings(tokens_file=str(write_file(tmp_path)), certificates=True)
    with ExitStack() as stack:
        Gateway.certificates = CertificateFiles(
            str(certificate), str(key), str(authority.certificate)
        )
        stack.callback(setattr, Gateway, "certificates", None)
        gateway = Gateway(stack, access, tmp_path)
        assert get(gateway.port, MODEL, context_of(authority, box)) == 200
        assert get(gateway.port, MODEL, context_of(authority, other)) == 401
        bearer = {"Authorization": f"Bearer {TOKENS['observe']}"}
        assert get(gateway.port, "/metrics", context_of(authority, other), **bearer) == 200
        assert get(gateway.port, "/metrics", context_of(authority, box)) == 403
        assert get(gateway.port, "/v2/health/live", context_of(authority, other)) == 200
        with pytest.raises((OSError, http.client.HTTPException)):
            get(gateway.port, "/v2/health/live", context_of(authority))
        with pytest.raises((OSError, http.client.HTTPException)):
            gateway.get("/v2/health/live")


@pytest.mark.parametrize("value", ["Bearer \xe9", "Bearer a\tb", "Bearer \t{token}", "\xff"])
def test_a_token_that_grpc_cannot_carry_is_none(tmp_path, value):
    value = value.format(token=TOKENS["infer"])
    with ExitStack() as stack:
        gateway = Gateway(stack, AccessSettings(tokens_file=str(write_file(tmp_path))), tmp_path)
        assert gateway.get(f"{MODEL}/ready", Authorization=value).status == 200
        assert gateway.get(MODEL, Authorization=value).status == 401


@needs_openssl
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x20\x00"])
def test_handshakes_that_never_end_are_bounded_in_number_and_time(tmp_path, monkeypatch, sent):
    authority = Authority(tmp_path, "authority")
    files = CertificateFiles(*map(str, authority.sign("server")))
    monkeypatch.setattr(Gateway, "certificates", files)
    monkeypatch.setattr(Gateway, "receive_timeout_s", 3.0)
    with ExitStack() as stack:
        gateway = Gateway(stack)

        def refused(reason):
            context = context_of(authority)
            body = read(gateway.port, "/metrics", context).decode()
            return float(body.split(f'{{reason="{reason}"}} ')[1].split()[0])

        before = refused("no_request")
        for _ in range(MOST_CONNECTIONS + 20):
            one = socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S)
            stack.enter_context(one).sendall(sent)
        with suppress(ConnectionError):
            assert one.recv(1) == b""
        assert refused("no_request") > before
        assert refused("connections") >= 20


def read(port, path, context):
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE_S, context=context)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


@needs_openssl
def test_the_port_without_a_gateway_has_the_same_rules(tmp_path):
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("server")
    certificates = Certificates(CertificateFiles(str(certificate), str(key)))
    listener = listening_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    http_port = HttpPort(
        listener, live=lambda: True, ready=lambda: True, metrics=lambda _: b"up 1\n",
        database=tmp_path / "none.db", callers=callers_of(tmp_path), certificates=certificates,
    )  # fmt: skip
    http_port.start()
    try:
        context = context_of(authority)
        assert get(port, "/v2/health/ready", context) == 200
        assert get(port, "/metrics", context) == 401
        for credential, status in (("observe", 200), ("infer", 403), ("expired", 401)):
            bearer = {"Authorization": f"Bearer {TOKENS[credential]}"}
            assert get(port, "/metrics", context, **bearer) == status
        assert get(port, "/nothing", context) == 404
        plain = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        plain.request("GET", "/v2/health/live")
        with pytest.raises((OSError, http.client.HTTPException)):
            plain.getresponse()
    finally:
        http_port.stop()
