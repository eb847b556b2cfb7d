"""`gnnserve serve` with certificates, tokens, a tenant with a rate and the admin socket."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import grpc
import numpy as np
import pytest

from bench.kit.servers import ServerProcess
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.access.tokens import TenantLimits, Token, TokensFile, hash_of, read_tokens, write_tokens
from serve.client import Client, Forbidden, TlsFiles, Unauthenticated
from serve.wire.messages import INFER_METHOD, encode_request
from tests.access.certs import Authority, needs_openssl
from tests.access.support import LONG_AGO
from tests.processes import rows

pytestmark = needs_openssl

#: By what each may do. None of them may appear in any log.
TOKENS = {name: f"gnn_{name}_{name * 5}" for name in ("infer", "observe", "admin", "slow", "late")}
WRONG = "gnn_" + "wrong" * 9
GRAPH = {"x": np.zeros((3, 32), np.float32), "edge_index": np.array([[0, 1], [1, 2]])}


class Site:
    """A server with everything of docs/access.md, and clients of it."""

    def __init__(self, folder, **sections):
        self.folder = folder
        self.authority = Authority(folder, "authority")
        self.certificate, self.key = self.authority.sign("server")
        self.client = self.authority.sign("client", "DNS:client.example")
        self.tokens = folder / "tokens.toml"
        tenant = TenantLimits(name="slow", requests_per_s=1e-6)
        known = [
            Token(principal=name, roles=(role,), hash=hash_of(TOKENS[name]))
            for name, role in (
                ("infer", "infer"), ("observe", "observe"), ("admin", "admin"), ("slow", "infer")
            )
        ]  # fmt: skip
        known.append(
            Token(
                principal="late", roles=("infer",), hash=hash_of(TOKENS["late"]), expires=LONG_AGO
            )
        )
        write_tokens(self.tokens, TokensFile(token=tuple(known), tenant=(tenant,)))
        self.socket = folder / "admin.sock"
        tls = {"certificate": str(self.certificate), "key": str(self.key)}
        self.server = ServerProcess(
            folder,
            own_group=True,
            sections={
                "server": {"admin_socket": str(self.socket)},
                "server.tls": {**tls, **sections.pop("tls", {})},
                "auth": {"tokens_file": str(self.tokens)},
                "models": {"load": ["gcn"]},
                **sections,
            },
        )

    def url(self, port=None):
        return f"https://localhost:{port or self.server.grpc_port}"

    def infer(self, token=None, **options):
        files = TlsFiles(ca_file=self.authority.certificate)
        with Client(self.url(), credentials=files, token=token, **options) as client:
            return client.infer("gcn", **GRAPH)

    def code(self, method, token=None, message=b""):
        root = self.authority.certificate.read_bytes()
        metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        with grpc.secure_channel(
            self.url().removeprefix("https://"), grpc.ssl_channel_credentials(root)
        ) as channel:
            try:
                channel.unary_unary(method)(message, metadata=metadata, timeout=PATIENCE_S)
            except grpc.RpcError as error:
                return error.code().name
        return "OK"

    def asked_by(self, token):
        return self.code(INFER_METHOD, token, encode_request("gcn", GRAPH))

    def curl(self, path, *options, token=None):
        """Return the status of HTTP and the body."""
        bearer = () if token is None else ("-H", f"Authorization: Bearer {token}")
        done = subprocess.run(
            [
                "curl", "-sS", "--max-time", str(PATIENCE_S), "--cacert",
                str(self.authority.certificate), "-w", "\n%{http_code}", *bearer, *options,
                self.url(self.server.http_port) + path,
            ],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        body, _, status = done.stdout.rpartition("\n")
        return int(status), body

    def no_secret_is_told(self, *said):
        """Fail when a token, or any line of a private key, is in a log or in `said`."""
        keys = self.key.read_text() + self.client[1].read_text()
        secrets = [*TOKENS.values(), WRONG]
        secrets += [line for line in keys.splitlines() if line and not line.startswith("-")]
        told = "\n".join((self.server.log.read_text(), *self.server._lines, *said))
        assert told
        assert [secret for secret in secrets if secret in told] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("site"))
    with site.server:
        yield site
    # The whole run: what the server said of itself, and what it kept of each request.
    site.no_secret_is_told(json.dumps(rows(site.server), default=str))


def test_our_client(site):
    assert site.infer(TOKENS["infer"]).output.shape == (3, 5)
    for token in (None, WRONG, TOKENS["late"]):
        with pytest.raises(Unauthenticated) as caught:
            site.infer(token)
        site.no_secret_is_told(str(caught.value))
    with pytest.raises(Forbidden):
        site.infer(TOKENS["observe"])


@pytest.mark.parametrize(
    ("credential", "wanted"),
    [
        (None, "UNAUTHENTICATED"),
        (WRONG, "UNAUTHENTICATED"),
        (TOKENS["late"], "UNAUTHENTICATED"),
        (TOKENS["infer"], "OK"),
        (TOKENS["observe"], "PERMISSION_DENIED"),
    ],
    ids=["none", "wrong", "expired", "infer", "observe"],
)
def test_codes_of_grpc(site, credential, wanted):
    message = encode_request("gcn", GRAPH)
    assert site.code(INFER_METHOD, credential, message) == wanted
    assert site.code("/inference.GRPCInferenceService/ServerLive", credential) == "OK"
    load = "/inference.GRPCInferenceService/RepositoryModelLoad"
    assert site.code(load, credential, message) in ("UNAUTHENTICATED", "PERMISSION_DENIED")


def test_curl(site):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = {
        "inputs": [
            {"name": name, "datatype": kind, "shape": list(array.shape), "data": array.tolist()}
            for (name, array), kind in zip(GRAPH.items(), ("FP32", "INT64"), strict=True)
        ]
    }
    ask = ("-d", json.dumps(body))
    status, answer = site.curl("/v2/models/gcn/infer", *ask, token=TOKENS["infer"])
    assert status == 200
    assert json.loads(answer)["outputs"][0]["shape"] == [3, 5]
    for token, wanted in ((None, 401), (WRONG, 401), (TOKENS["late"], 401), ("observe", 403)):
        status, said = site.curl("/v2/models/gcn/infer", *ask, token=TOKENS.get(token, token))
        assert status == wanted
        site.no_secret_is_told(said)
    assert site.curl("/v2/health/live")[0] == 200
    assert site.curl("/metrics")[0] == 401
    assert site.curl("/metrics", token=TOKENS["infer"])[0] == 403
    status, metrics = site.curl("/metrics", token=TOKENS["observe"])
    assert status == 200
    assert 'gnnserve_transport_refused_total{reason="unauthenticated"}' in metrics


def test_tritonclient_over_both_ports(site):
    triton_grpc = pytest.importorskip("tritonclient.grpc")
    triton_http = pytest.importorskip("tritonclient.http")
    bearer = {"authorization": f"Bearer {TOKENS['infer']}"}
    over_grpc = triton_grpc.InferenceServerClient(
        f"localhost:{site.server.grpc_port}",
        ssl=True,
        root_certificates=str(site.authority.certificate),
    )
    over_http = triton_http.InferenceServerClient(
        f"localhost:{site.server.http_port}",
        ssl=True,
        ssl_options={"ca_certs": str(site.authority.certificate)},
    )
    for module, client in ((triton_grpc, over_grpc), (triton_http, over_http)):
        inputs = []
        for (name, array), kind in zip(GRAPH.items(), ("FP32", "INT64"), strict=True):
            inputs.append(module.InferInput(name, list(array.shape), kind))
            inputs[-1].set_data_from_numpy(array)
        with client:
            answer = client.infer("gcn", inputs, headers=bearer)
            assert answer.as_numpy("output").shape == (3, 5)
            with pytest.raises(Exception, match="authorization") as caught:
                client.infer("gcn", inputs)
            site.no_secret_is_told(str(caught.value))


def test_a_tenants_rate(site):
    """The first request of a second is taken; the next second is far away."""
    codes = [site.asked_by(TOKENS["slow"]) for _ in range(3)]
    assert codes == ["OK", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]
    assert site.infer(TOKENS["infer"]).output.shape == (3, 5)


def test_a_load_is_sent_encrypted_with_a_token(site, tmp_path):
    def load(*arguments):
        command = [sys.executable, "-m", "loadgen", "--target", site.url(), "--workload", "gcn"]
        command += ["--requests", "5", "--rate", "50", "--scale", "0.01", "--max-nodes", "200"]
        command += ["--ca", str(site.authority.certificate), "--timeout", str(PATIENCE_S), "--json"]
        return subprocess.run(
            [*command, *map(str, arguments)],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    files = {name: tmp_path / name for name in ("infer", "slow")}
    for name, file in files.items():
        file.write_text(TOKENS[name] + "\n")
    done = load("--token-file", files["infer"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["by_status"] == {"OK": 5}
    # Each request carries the token of its tenant, who has had its one request already.
    tenants = ["--tenant", "slow", "--token-file", f"slow={files['slow']}"]
    done = load(*tenants, "--token-file", files["infer"])
    assert json.loads(done.stdout)["by_status"] == {"RESOURCE_EXHAUSTED": 5}
    assert "authentication" in load().stderr.lower() or "token" in load().stderr.lower()


def test_the_admin_socket_and_nobody_else_administers(site):
    command = [sys.executable, "-m", "serve", "model", "load", "gcn", "--target"]
    done = subprocess.run(
        [*command, f"unix:{site.socket}"], capture_output=True, text=True, timeout=2 * PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    load = "/inference.GRPCInferenceService/RepositoryModelLoad"
    assert site.code(load, TOKENS["admin"], b"\x12\x03gcn") == "PERMISSION_DENIED"


def test_rotation_under_load_loses_nothing(site):
    """Tokens and the certificate are replaced and SIGHUP is sent; who has a token that stays
    notices nothing, and who has a new one is let in."""
    content = read_tokens(site.tokens)
    codes, done = [], threading.Event()

    def ask():
        while not done.is_set():
            codes.append(site.asked_by(TOKENS["infer"]))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(3):
            token = f"gnn_rotated_{turn}"
            row = Token(principal="new", roles=("infer",), hash=hash_of(token))
            write_tokens(
                site.tokens, TokensFile(token=(*content.token, row), tenant=content.tenant)
            )
            certificate, key = site.authority.sign(f"next{turn}")
            shutil.move(key, site.key)
            shutil.move(certificate, site.certificate)
            os.kill(site.server.pid, signal.SIGHUP)
            message = encode_request("gcn", GRAPH)
            wait_for(
                lambda token=token, message=message: (
                    site.code(INFER_METHOD, token, message) == "OK"
                ),
                "the new token",
            )
            if turn:
                assert site.asked_by(f"gnn_rotated_{turn - 1}") == "UNAUTHENTICATED"
        before = len(codes)
        wait_for(lambda: len(codes) > before, "requests after the last change")
    finally:
        done.set()
        for thread in threads:
            thread.join()
        write_tokens(site.tokens, content)
    assert set(codes) == {"OK"}
    log = site.server.log.read_text()
    assert log.count("reading configuration, tokens and certificates again") == 3
    assert "stopping" not in log


def test_certificates_of_clients(tmp_path):
    site = Site(tmp_path, tls={"client_ca": str(tmp_path / "authority.crt")})
    content = read_tokens(site.tokens)
    box = Token(principal="box", roles=("infer",), certificate="client.example")
    write_tokens(site.tokens, TokensFile(token=(*content.token, box), tenant=content.tenant))
    certificate, key = site.client
    known = TlsFiles(ca_file=site.authority.certificate, certificate_file=certificate, key_file=key)
    with site.server:
        with Client(site.url(), credentials=known) as client:
            assert client.infer("gcn", **GRAPH).output.shape == (3, 5)
            with pytest.raises(Forbidden):
                client.load("gcn")
        assert site.asked_by(TOKENS["infer"]) == "UNAVAILABLE"
    site.no_secret_is_told()
