"""Encrypted connections on both front ends: versions, certificates of clients, new files."""

import ctypes
import ctypes.util
import shutil
import socket
import ssl
import threading
from contextlib import suppress

import grpc
import numpy as np
import pytest

from bench.kit.http2_frames import PREFACE, SETTINGS, frame
from bench.kit.waiting import PATIENCE_S, eventually, wait_for
from serve.access.callers import Callers
from serve.access.certificates import CertificateFiles, Certificates
from serve.access.watching import FileWatcher
from serve.client import Client, TlsFiles
from serve.config import ServerConfig
from serve.errors import ConfigError
from serve.native import front_lacks, tls_lacks
from serve.rpc import service
from serve.rpc.server import GrpcServer
from serve.rpc.tls import server_credentials
from serve.wire.messages import INFER_METHOD, STREAM_METHOD
from tests.access.certs import Authority, needs_openssl
from tests.access.support import TOKENS, callers_of, headers
from tests.rpc.fakes import FACTS, FakeEngine
from tests.rpc.test_access import request

pytestmark = needs_openssl
LIVE = f"/{service.NAME}/ServerLive"


class Encrypted:
    """A server with the certificate `server.crt` in a folder of its own."""

    def __init__(self, folder, front, callers=None, *, client_ca=False, **options):
        self.folder = folder
        self.authority = Authority(folder, "authority")
        certificate, key = self.authority.sign("server")
        files = CertificateFiles(
            str(certificate), str(key), str(self.authority.certificate) if client_ca else None
        )
        self.certificates = Certificates(files)
        self.watcher = FileWatcher(self.certificates.watched)
        self.watcher.start()
        self.engine = FakeEngine()
        config = ServerConfig(
            grpc_port=0, front=front, max_queue=16, admin_socket=str(folder / "admin.sock"),
            **options,
        )  # fmt: skip
        self.server = GrpcServer(
            self.engine, lambda: FACTS, lambda _: {}, config,
            callers=callers, certificates=self.certificates,
        )  # fmt: skip
        self.port = self.server.start()

    def close(self):
        self.engine.let_go()
        self.server.stop(2.0)
        self.watcher.stop()

    def channel(self, client=None):
        pair = {}
        if client is not None:
            certificate, key = client
            pair = {"private_key": key.read_bytes(), "certificate_chain": certificate.read_bytes()}
        credentials = grpc.ssl_channel_credentials(self.authority.certificate.read_bytes(), **pair)
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.secure_channel(f"127.0.0.1:{self.port}", credentials, options)


native = pytest.mark.skipif(bool(front_lacks() or tls_lacks()), reason="a library is missing")
FRONTS = pytest.mark.parametrize(
    "front",
    [
        "python",
        pytest.param("native", marks=native),
    ],
)


@pytest.fixture
def encrypted(tmp_path, front):
    server = Encrypted(tmp_path, front)
    yield server
    server.close()


def code(channel, method=INFER_METHOD, metadata=(), message=None):
    try:
        channel.unary_unary(method)(
            request() if message is None else message, metadata=metadata, timeout=PATIENCE_S
        )
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


@FRONTS
def test_calls_of_every_kind_and_the_servers_own(encrypted):
    with encrypted.channel() as channel:
        assert code(channel) == "OK"
        assert code(channel, LIVE, message=b"") == "OK"
        answers = channel.stream_stream(STREAM_METHOD)(iter([request()] * 20), timeout=PATIENCE_S)
        assert len(list(answers)) == 20
    with encrypted.server.own_requests() as send:
        x, edges = np.zeros((3, 4), np.float32), np.zeros((2, 0), np.int64)
        send("gcn", {"x": x, "edge_index": edges}, "own")
    with Client(
        f"https://127.0.0.1:{encrypted.port}", credentials=encrypted.authority.certificate
    ) as client:
        assert client.ready()


@FRONTS
def test_who_does_not_encrypt_or_does_not_trust_is_not_heard(encrypted):
    with grpc.insecure_channel(f"127.0.0.1:{encrypted.port}") as channel:
        assert code(channel) == "UNAVAILABLE"
    other = Authority(encrypted.folder, "other")
    credentials = grpc.ssl_channel_credentials(other.certificate.read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{encrypted.port}", credentials) as channel:
        assert code(channel) == "UNAVAILABLE"
    with encrypted.channel() as channel:
        assert code(channel) == "OK"


@FRONTS
def test_versions_and_protocol(encrypted):
    context = ssl.create_default_context(cafile=encrypted.authority.certificate)
    context.set_alpn_protocols(["http/1.1", "h2"])
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context.minimum_version = context.maximum_version = version
        with (
            socket.create_connection(("127.0.0.1", encrypted.port), PATIENCE_S) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            assert connection.version() == version.name.replace("_", ".")
            assert connection.selected_alpn_protocol() == "h2"
    old = ssl.create_default_context(cafile=encrypted.authority.certificate)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", encrypted.port), PATIENCE_S) as plain,
        pytest.raises(OSError, match=r"alert|EOF|reset"),
    ):
        old.wrap_socket(plain, server_hostname="127.0.0.1")


@FRONTS
def test_certificates_of_clients_are_principals(tmp_path, front):
    server = Encrypted(tmp_path, front, callers_of(tmp_path), client_ca=True)
    known = server.authority.sign("known", "DNS:box.example")
    unknown = server.authority.sign("unknown", "URI:spiffe://example/x")
    (tmp_path / "foreign").mkdir()
    foreign = Authority(tmp_path / "foreign", "foreign").sign("box", "DNS:box.example")
    config = f"/{service.NAME}/RepositoryModelLoad"
    try:
        with server.channel(known) as channel:
            assert code(channel) == "OK"
            assert server.engine.calls[-1].tenant == "box"
            assert code(channel, config, message=b"") == "PERMISSION_DENIED"
            # A token says more than the certificate.
            assert code(channel, metadata=headers("observe")) == "PERMISSION_DENIED"
            assert code(channel, metadata=headers("infer")) == "OK"
            assert server.engine.calls[-1].tenant == "first"
        with server.channel(unknown) as channel:
            assert code(channel) == "UNAUTHENTICATED"
            assert code(channel, config, message=b"") == "UNAUTHENTICATED"
            assert code(channel, LIVE, message=b"") == "OK"
            forged = (("gnnserve-peer", "box.example"), ("gnnserve-inside", "guess"))
            assert code(channel, metadata=forged) == "UNAUTHENTICATED"
            assert code(channel, f"/{service.NAME}/ServerMetadata", forged, b"") == (
                "UNAUTHENTICATED"
            )
        for stranger in (None, foreign):
            with server.channel(stranger) as channel:
                assert code(channel, LIVE, message=b"") == "UNAVAILABLE"
    finally:
        server.close()


@native
def test_a_revoked_certificate_opens_no_connection_any_more(tmp_path):
    server = Encrypted(tmp_path, "native", Callers(certificates=True), client_ca=True)
    good, lost = (server.authority.sign(name, f"DNS:{name}.example") for name in ("good", "lost"))

    def let_in(client):
        with server.channel(client) as channel:
            return code(channel, LIVE, message=b"") == "OK"

    try:
        assert let_in(lost)
        with server.authority.certificate.open("a") as file:
            file.write(server.authority.revoke(lost[0]))
        eventually(lambda: not let_in(lost))
        assert let_in(good)
    finally:
        server.close()


def test_grpcs_own_front_takes_no_list_of_revoked_certificates(tmp_path):
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("server")
    with authority.certificate.open("a") as file:
        file.write(authority.revoke())
    files = CertificateFiles(str(certificate), str(key), str(authority.certificate))
    with pytest.raises(ConfigError, match="native"):
        server_credentials(Certificates(files))


@FRONTS
def test_without_tokens_a_certificate_is_a_client(tmp_path, front):
    server = Encrypted(tmp_path, front, Callers(certificates=True), client_ca=True)
    try:
        with server.channel(server.authority.sign("one", "DNS:one.example")) as channel:
            assert code(channel) == "OK"
            assert server.engine.calls[-1].tenant == "one.example"
            load = f"/{service.NAME}/RepositoryModelLoad"
            assert code(channel, load, message=b"") == "PERMISSION_DENIED"
    finally:
        server.close()


def serial_of(port, authority):
    """Return the serial number of the certificate that new connections get."""
    context = ssl.create_default_context(cafile=authority)
    with (
        socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        return connection.getpeercert()["serialNumber"]


@FRONTS
def test_new_certificates_count_and_lose_no_request(encrypted):
    """One client keeps its connection, another makes a new one for each call."""
    ca = encrypted.authority.certificate
    codes, stop = [], threading.Event()

    def ask_on_one():
        with encrypted.channel() as channel:
            while not stop.is_set():
                codes.append(code(channel))

    def ask_on_many():
        while not stop.is_set():
            with encrypted.channel() as channel:
                codes.append(code(channel))

    threads = [threading.Thread(target=ask) for ask in (ask_on_one, ask_on_many)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(3):
            before = serial_of(encrypted.port, ca)
            certificate, key = encrypted.authority.sign(f"next{turn}")
            shutil.copy(key, encrypted.folder / "key.new")
            shutil.copy(certificate, encrypted.folder / "certificate.new")
            # Between these two, key and certificate do not fit each other.
            (encrypted.folder / "key.new").rename(encrypted.folder / "server.key")
            (encrypted.folder / "certificate.new").rename(encrypted.folder / "server.crt")
            wait_for(lambda before=before: serial_of(encrypted.port, ca) != before, "the new one")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(codes) > 10
    assert set(codes) == {"OK"}


@FRONTS
def test_broken_files_change_nothing(encrypted, caplog):
    serial = serial_of(encrypted.port, encrypted.authority.certificate)
    (encrypted.folder / "server.key").write_text("no key")
    wait_for(lambda: "stay as they were" in caplog.text, "the complaint")
    assert serial_of(encrypted.port, encrypted.authority.certificate) == serial
    assert "PRIVATE KEY" not in caplog.text


@pytest.mark.parametrize("wrong", ["certificate", "key", "client_ca"])
@pytest.mark.parametrize("content", [None, "", "-----BEGIN CERTIFICATE-----\nx\n"])
def test_a_file_that_cannot_be_used_stops_the_start(tmp_path, wrong, content):
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("server")
    names = {"certificate": certificate, "key": key, "client_ca": authority.certificate}
    names[wrong] = tmp_path / "wrong.pem"
    if content is not None:
        names[wrong].write_text(content)
    with pytest.raises(ConfigError, match=r"server\.tls\..*wrong\.pem"):
        Certificates(CertificateFiles(**{name: str(path) for name, path in names.items()}))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_no_session_is_kept_of_a_connection(tmp_path, version):
    certificate, key = Authority(tmp_path, "authority").sign("server")
    context = CertificateFiles(str(certificate), str(key)).load().context
    sessions = []
    for _ in range(8):
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        client.maximum_version = version
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = [client.wrap_bio(back, there), context.wrap_bio(there, back, server_side=True)]
        for _ in range(4):
            for side in sides:
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        assert sides[1].version() == version.name.replace("_", ".")
        sessions.append(context.session_stats()["number"])
    assert sessions[-1] == sessions[0]


def test_a_key_of_another_certificate_is_told(tmp_path):
    authority = Authority(tmp_path, "authority")
    certificate, _ = authority.sign("one")
    _, key = authority.sign("two")
    with pytest.raises(ConfigError, match="key values mismatch"):
        Certificates(CertificateFiles(str(certificate), str(key)))


@FRONTS
def test_tritonclient_with_ssl_and_a_token(tmp_path, front):
    triton = pytest.importorskip("tritonclient.grpc")
    server = Encrypted(tmp_path, front, callers_of(tmp_path))
    options = {
        "ssl": True, "root_certificates": str(server.authority.certificate),
        "url": f"localhost:{server.port}",
    }  # fmt: skip
    bearer = {"authorization": f"Bearer {TOKENS['infer']}"}
    try:
        with triton.InferenceServerClient(**options) as client:
            assert client.is_server_live()
            assert client.get_model_metadata("gcn", headers=bearer).name == "gcn"
            with pytest.raises(Exception, match="UNAUTHENTICATED"):
                client.get_model_metadata("gcn")
    finally:
        server.close()


@FRONTS
def test_our_client_with_a_certificate(tmp_path, front):
    server = Encrypted(tmp_path, front, callers_of(tmp_path), client_ca=True)
    certificate, key = server.authority.sign("box", "DNS:box.example")
    files = TlsFiles(
        ca_file=server.authority.certificate, certificate_file=certificate, key_file=key
    )
    try:
        with Client(f"https://127.0.0.1:{server.port}", credentials=files) as client:
            assert client.describe().version == FACTS.version
    finally:
        server.close()


@FRONTS
def test_large_messages_go_both_ways_beside_small_ones(encrypted):
    rows = 300_000
    x = np.random.default_rng(1).standard_normal((rows, 4), dtype=np.float32)
    edges = np.zeros((2, 0), np.int64)
    with Client(
        f"https://127.0.0.1:{encrypted.port}", credentials=encrypted.authority.certificate
    ) as client:
        for _ in range(3):
            answer = client.infer("gcn", x=x, edge_index=edges)
            np.testing.assert_array_equal(answer.output, x[:, :3])
            small = client.infer("gcn", x=x[:5], edge_index=edges)
            np.testing.assert_array_equal(small.output, x[:5, :3])


@FRONTS
def test_noise_and_silence_harm_nobody(encrypted):
    rng = np.random.default_rng(2)
    silent = []
    try:
        for size in (0, 1, 5, 100, 20_000):
            connection = socket.create_connection(("127.0.0.1", encrypted.port), PATIENCE_S)
            silent.append(connection)
            # The head of a handshake record, with anything in it.
            connection.sendall((b"\x16\x03\x01\x20\x00" + rng.bytes(size))[:size])
        with encrypted.channel() as channel:
            assert code(channel) == "OK"
    finally:
        for connection in silent:
            connection.close()


class KeyRenewing:
    """A client by OpenSSL itself: Python's does not renew its keys."""

    def __init__(self, port):
        api = ctypes.CDLL(ctypes.util.find_library("ssl"))
        for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
            getattr(api, name).restype = ctypes.c_void_p
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._socket.settimeout(None)  # OpenSSL waits for it
        context = ctypes.c_void_p(api.SSL_CTX_new(ctypes.c_void_p(api.TLS_client_method())))
        api.SSL_CTX_set_alpn_protos(context, b"\x02h2", 3)
        self._session, self._api = ctypes.c_void_p(api.SSL_new(context)), api
        api.SSL_set_fd(self._session, self._socket.fileno())
        assert api.SSL_connect(self._session) == 1
        hello = PREFACE + frame(SETTINGS, 0, 0, b"")
        assert api.SSL_write(self._session, hello, len(hello)) == len(hello)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def renew(self, most):
        """Renew the keys, and ask for the server's; returns how often until the end."""
        for count in range(most):
            asked = self._api.SSL_key_update(self._session, 1)
            if asked != 1 or self._api.SSL_do_handshake(self._session) != 1:
                return count
        return most


@native
@pytest.mark.parametrize("front", ["native"])
def test_keys_are_not_renewed_without_end(encrypted):
    """Each costs the server as much as a hundred times its bytes."""
    with KeyRenewing(encrypted.port) as client:
        assert client.renew(300) == 300
    with encrypted.channel() as channel:
        assert code(channel) == "OK"
        assert encrypted.server.refused["control_frames"] == 0
        # What the socket holds when the connection ends was sent in vain.
        with KeyRenewing(encrypted.port) as client:
            assert client.renew(1_000_000) < 1_000_000
        assert encrypted.server.refused["control_frames"] == 1
        assert code(channel) == "OK"
