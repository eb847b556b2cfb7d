"""TLS handshakes as an attack: each costs the server a signature, and its client little."""

import itertools
import select
import socket
import ssl
import subprocess
from contextlib import ExitStack, suppress

import pytest

from bench.kit.waiting import PATIENCE_S, eventually, wait_for
from serve.native import front_lacks, tls_lacks
from tests.access.certs import needs_openssl
from tests.rpc.test_tls import Encrypted, code

pytestmark = [
    needs_openssl,
    pytest.mark.skipif(bool(front_lacks() or tls_lacks()), reason="a library is missing"),
]
#: Handshakes that one address begins at once.
MANY = 250


@pytest.fixture
def serving(tmp_path):
    """Return a function that starts a server with options."""
    with ExitStack() as stack:

        def start(**options):
            server = Encrypted(tmp_path, "native", **options)
            stack.callback(server.close)
            return server

        yield start


def hello():
    """Return what a client says first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    back, there = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(back, there).do_handshake()
    return there.read()


def connected(stack, port, source):
    """Return a socket of one of this machine's addresses."""
    one = socket.create_connection(("127.0.0.1", port), PATIENCE_S, (source, 0))
    return stack.enter_context(one)


def slow_key(folder):
    """Have the server sign with a key of 4,096 bits: some milliseconds each time."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:4096", "-nodes", "-subj", "/CN=server",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "slow.key",
         "-out", folder / "slow.crt"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder / "slow.crt", folder / "slow.key"


def test_addresses_have_their_turns_one_after_the_other(tmp_path, serving):
    """One that begins many handshakes makes its own wait, and not those of others."""
    server = serving()
    certificate, key = slow_key(tmp_path)
    serial = ssl.PEM_cert_to_DER_cert(certificate.read_text())
    key.replace(server.folder / "server.key")
    certificate.replace(server.folder / "server.crt")
    wait_for(lambda: shown(server.port) == serial, "the slow key")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.set_alpn_protocols(["h2"])
    with ExitStack() as stack:
        first = hello()
        many = [connected(stack, server.port, "127.0.0.2") for _ in range(MANY)]
        other = connected(stack, server.port, "127.0.0.3")
        for one in many:
            one.sendall(first)
        stack.enter_context(client.wrap_socket(other))
        answered, _, _ = select.select(many, [], [], 0)
        assert len(answered) < MANY / 2
        # They wait, and are not refused.
        for one in many:
            assert one.recv(1) != b""
        assert server.server.refused["handshake"] == 0


def shown(port):
    """Return the certificate that the server shows."""
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port)))


@pytest.mark.parametrize("parts", [(), (slice(0, 1),), (slice(0, 100), slice(100, -1))])
def test_a_handshake_that_never_ends_is_ended(serving, parts):
    """Whether its client says nothing, little, or nearly all."""
    server = serving(receive_timeout_s=1.0)
    with server.channel() as channel, ExitStack() as stack:
        assert code(channel) == "OK"
        client = connected(stack, server.port, "127.0.0.1")
        for part in parts:
            client.sendall(hello()[part])
        assert client.recv(1) == b""
        assert server.server.refused["handshake"] == 1
        assert code(channel) == "OK"


def test_a_handshake_of_a_byte_now_and_then_is_ended(serving):
    server = serving(receive_timeout_s=1.0)
    with ExitStack() as stack:
        client = connected(stack, server.port, "127.0.0.1")
        client.settimeout(0.05)
        rest = iter(itertools.chain(b"\x16\x03\x01\x20\x00", itertools.repeat(0)))
        with suppress(ConnectionError):
            while True:
                client.sendall(bytes([next(rest)]))
                with suppress(TimeoutError):
                    assert client.recv(1) == b""
                    break
        eventually(lambda: server.server.refused["handshake"] == 1)
    with server.channel() as channel:
        assert code(channel) == "OK"


def test_a_handshake_in_records_of_a_byte_succeeds(serving):
    """It costs little, and is no reason to refuse anybody."""
    server = serving()
    whole = hello()
    body = whole[5:]
    with ExitStack() as stack:
        client = connected(stack, server.port, "127.0.0.1")
        client.sendall(b"".join(b"\x16\x03\x01\x00\x01" + bytes([one]) for one in body))
        # A record of the handshake: the server's part.
        assert client.recv(1) == b"\x16"


def test_clients_that_hang_up_in_a_handshake_leave_nothing(serving):
    server = serving()
    for whole in (False, True):
        for _ in range(MANY):
            with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as client:
                client.sendall(hello() if whole else b"\x16")
    with server.channel() as channel:
        assert code(channel) == "OK"
        # This one, and that of the server's watchdog.
        eventually(lambda: server.server._front._front.counts()["open_connections"] <= 2)
