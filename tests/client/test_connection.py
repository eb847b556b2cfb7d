"""How clients reach a server: targets, encryption, tokens, time limits, repeats, back-pressure."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from bench.kit.waiting import PATIENCE_S, wait_for
from serve.client import (
    AsyncClient,
    Cancelled,
    Client,
    Exhausted,
    Forbidden,
    InvalidRequest,
    NotFound,
    Request,
    TimedOut,
    TlsFiles,
    Unauthenticated,
    Unavailable,
)
from serve.client.channel import address_of
from serve.client.retries import Attempts, TimeLimit
from tests.client.certificates import Authority
from tests.client.small_server import SmallServer

GRAPH = {"x": np.zeros((3, 2), np.float32), "edge_index": [[0, 1], [1, 2]]}
BUSY = grpc.StatusCode.RESOURCE_EXHAUSTED
GONE = grpc.StatusCode.UNAVAILABLE


async def until(happened):
    """Return once `happened()` is true, while the event loop goes on."""
    await asyncio.to_thread(wait_for, happened, "a call to arrive")


@pytest.fixture
def small():
    return SmallServer()


@pytest.fixture
def plain(small):
    with small.running() as port:
        yield f"127.0.0.1:{port}"


# -- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "address", "encrypted"),
    [
        ("example.org:9000", "example.org:9000", False),
        ("example.org", "example.org:8001", False),
        ("http://example.org", "example.org:80", False),
        ("grpc://example.org", "example.org:8001", False),
        ("https://example.org", "example.org:443", True),
        ("https://example.org/", "example.org:443", True),
        ("grpcs://example.org:9000", "example.org:9000", True),
        ("[::1]:9000", "[::1]:9000", False),
        ("https://[::1]", "[::1]:443", True),
        ("unix:/run/gnnserve.sock", "unix:/run/gnnserve.sock", False),
        ("dns:///example.org:9000", "dns:///example.org:9000", False),
    ],
)
def test_targets_are_urls_or_addresses(given, address, encrypted):
    found = address_of(given, max_message_bytes=1)
    assert (found.target, found.credentials is not None) == (address, encrypted)


@pytest.mark.parametrize(
    ("given", "options", "told"),
    [
        ("ftp://example.org", {}, "unknown scheme ftp://"),
        ("example.org:port", {}, "port"),
        ("", {}, "it names no host"),
        ("https://example.org/models", {}, "and nothing else"),
        ("https://me:secret@example.org", {}, "and nothing else"),
        ("http://example.org", {"credentials": TlsFiles()}, "is not encrypted"),
        (
            "example.org",
            {"token": "t"},
            "would be sent unencrypted; write https://example.org:8001",
        ),
        ("example.org", {"metadata": {"a key": "v"}}, "'a key'"),
        ("example.org", {"metadata": {"grpc-timeout": "v"}}, "begin with 'grpc-'"),
        ("example.org", {"metadata": {"a": b"v"}}, "bytes need a key that ends in '-bin'"),
        ("example.org", {"metadata": {"a": "line\n"}}, "printable ASCII"),
        ("https://example.org", {"credentials": TlsFiles(key_file="k")}, "go together"),
    ],
)
def test_what_cannot_be_meant_is_told(given, options, told):
    with pytest.raises(ValueError, match=told.replace("(", r"\(")):
        address_of(given, max_message_bytes=1, **options)


def test_a_file_that_is_no_certificate_is_named(tmp_path):
    path = tmp_path / "ca.der"
    path.write_bytes(b"\x30\x82")
    with pytest.raises(ValueError, match=r"ca\.der is not in PEM format"):
        Client("https://example.org", credentials=path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pem"):
        Client("https://example.org", credentials=tmp_path / "nowhere.pem")


def test_a_token_is_kept_out_of_what_is_printed():
    found = address_of("https://example.org", token="secret", max_message_bytes=1)
    assert "secret" not in repr(found)
    assert found.metadata() == (("authorization", "Bearer secret"),)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "unix"])
def test_proxies_are_not_asked_for_loopback(host):
    target = "unix:/run/x" if host == "unix" else f"{host}:1"
    assert ("grpc.enable_http_proxy", 0) in address_of(target, max_message_bytes=1).options
    elsewhere = address_of("example.org:1", max_message_bytes=1)
    assert "grpc.enable_http_proxy" not in dict(elsewhere.options)


def test_a_proxy_in_the_environment_does_not_take_loopback_calls(make, plain, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with make(plain) as client:
        assert client.infer("m", **GRAPH).output.shape == (3, 1)


# -- encryption and identity ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates") / "ours")


def server_credentials(authority, *, client_ca=None):
    certificate, key = authority.issue("localhost")
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())],
        client_ca.certificate.read_bytes() if client_ca else None,
        require_client_auth=client_ca is not None,
    )


def test_a_private_authority_is_trusted_when_it_is_given(make, small, authority):
    with small.running(server_credentials(authority)) as port:
        for target, credentials in (
            (f"https://localhost:{port}", authority.certificate),
            (f"grpcs://localhost:{port}", str(authority.certificate)),
            (f"localhost:{port}", TlsFiles(ca_file=authority.certificate)),
            (
                f"https://127.0.0.1:{port}",
                TlsFiles(ca_file=authority.certificate, server_name="localhost"),
            ),
            (
                f"https://localhost:{port}",
                grpc.ssl_channel_credentials(authority.certificate.read_bytes()),
            ),
        ):
            with make(target, credentials=credentials) as client:
                assert client.infer("m", **GRAPH).output.shape == (3, 1)


def test_without_it_the_server_is_not_trusted(make, small, authority, tmp_path):
    stranger = Authority(tmp_path / "stranger")
    with small.running(server_credentials(authority)) as port:
        for credentials in (None, stranger.certificate):
            with (
                make(f"https://localhost:{port}", credentials=credentials) as client,
                pytest.raises(Unavailable),
            ):
                client.infer("m", **GRAPH, retry=False)
        with (
            make(f"https://127.0.0.1:{port}", credentials=authority.certificate) as client,
            pytest.raises(Unavailable),
        ):
            client.infer("m", **GRAPH, retry=False)
    assert small.calls["ModelInfer"] == 0


def test_servers_that_ask_for_a_certificate_get_it(make, small, authority, tmp_path):
    ours, stranger = authority.issue("client"), Authority(tmp_path / "stranger").issue("client")
    credentials = server_credentials(authority, client_ca=authority)
    with small.running(credentials) as port:
        for pair, is_known in ((ours, True), (stranger, False), ((None, None), False)):
            files = TlsFiles(
                ca_file=authority.certificate, certificate_file=pair[0], key_file=pair[1]
            )
            with make(f"https://localhost:{port}", credentials=files) as client:
                if is_known:
                    assert client.infer("m", **GRAPH).output.shape == (3, 1)
                else:
                    with pytest.raises(Unavailable):
                        client.infer("m", **GRAPH, retry=False)


def test_tokens_and_metadata_come_with_every_call(make, small, authority):
    small.token = "right"
    with small.running(server_credentials(authority)) as port:
        target, ca = f"https://localhost:{port}", authority.certificate
        for token in ("wrong", None):
            with (
                make(target, credentials=ca, token=token) as client,
                pytest.raises(Unauthenticated, match="who are you"),
            ):
                client.infer("m", **GRAPH)
        with make(
            target, credentials=ca, token="right", metadata={"X-Team": "a", "x-bin": b"\0"}
        ) as client:
            client.infer("m", **GRAPH)
            assert (small.metadata["x-team"], small.metadata["x-bin"]) == ("a", b"\0")
            client.interface("m")
            client.load("m")


def test_a_function_gives_the_token_of_each_call(make, small, plain):
    tokens = iter(["first", "second"])
    with make(plain, token=lambda: next(tokens)) as client:
        for expected in ("first", "second"):
            client.infer("m", **GRAPH)
            assert small.metadata["authorization"] == f"Bearer {expected}"


def test_what_a_token_does_not_allow_is_forbidden(make, small, plain):
    small.refusals["ModelInfer"] = [(grpc.StatusCode.PERMISSION_DENIED, None)]
    with make(plain) as client, pytest.raises(Forbidden):
        client.infer("m", **GRAPH)


# -- repeats --------------------------------------------------------------------------------------


def test_a_refusal_that_says_when_is_repeated_then(make, small, plain):
    small.refusals["ModelInfer"] = [(BUSY, 30), (BUSY, 30), (GONE, None)]
    began_s = time.monotonic()
    with make(plain) as client:
        client.infer("m", **GRAPH)
    assert time.monotonic() - began_s >= 0.03 + 0.03 + 0.1
    assert small.calls["ModelInfer"] == 4


@pytest.mark.parametrize(
    ("refusal", "kind", "options"),
    [
        ((BUSY, None), Exhausted, {}),  # it is too big for good
        ((BUSY, 60_000), Exhausted, {"timeout_s": 30.0}),  # later than the caller waits
        ((BUSY, 1), Exhausted, {"retry": False}),
        ((GONE, None), Unavailable, {"retry": False}),
        ((grpc.StatusCode.INVALID_ARGUMENT, None), InvalidRequest, {}),
    ],
)
def test_what_does_not_help_is_not_repeated(make, small, plain, refusal, kind, options):
    small.refusals["ModelInfer"] = [refusal]
    with make(plain) as client, pytest.raises(kind):
        client.infer("m", **GRAPH, **options)
    assert small.calls["ModelInfer"] == 1


def test_a_server_that_stays_away_is_given_up(make, small, plain):
    small.refusals["ModelInfer"] = [(GONE, None)] * 9
    with make(plain) as client, pytest.raises(Unavailable):
        client.infer("m", **GRAPH)
    assert small.calls["ModelInfer"] == 4


def test_changes_are_repeated_only_when_nothing_was_done(make, small, plain):
    small.refusals["UpdateGraph"] = [(GONE, None)]
    small.refusals["RepositoryModelLoad"] = [(GONE, None)]
    with make(plain) as client:
        with pytest.raises(Unavailable):
            client.update_graph("g", add_x=np.zeros((1, 2)))
        with pytest.raises(Unavailable):
            client.load("m")
        assert (small.calls["UpdateGraph"], small.calls["RepositoryModelLoad"]) == (1, 1)
        small.refusals["UpdateGraph"] = [(BUSY, 1)]
        client.update_graph("g", add_x=np.zeros((1, 2)))
    assert small.calls["UpdateGraph"] == 3


def test_waits_are_longer_than_asked_for_and_not_all_alike():
    error = Exhausted("RESOURCE_EXHAUSTED", "full", 1.0)
    waits = {Attempts(TimeLimit(None)).wait_s(error) for _ in range(50)}
    assert len(waits) > 1
    assert min(waits) >= 1.0
    assert max(waits) <= 1.25


# -- time limits and back-pressure ----------------------------------------------------------------


def test_calls_have_a_time_limit_by_default(make, small, plain):
    with make(plain) as client:
        client.infer("m", **GRAPH)
        # gRPC rounds it up.
        assert 0 < small.remaining_s <= 61
    with make(plain, timeout_s=None) as client:
        client.infer("m", **GRAPH)
    assert small.remaining_s is None or small.remaining_s > 1e6


def test_a_requests_own_limit_includes_the_wait_for_its_turn(small, plain):
    small.go.clear()
    with Client(plain, max_in_flight=1) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.infer, "m", **GRAPH)
        wait_for(lambda: small.in_flight == 1, "the first request")
        with pytest.raises(TimedOut, match="requests in flight: at most 1 at once"):
            client.infer("m", **GRAPH, timeout_s=0.05)
        small.go.set()
        first.result(PATIENCE_S)
        assert client.infer("m", **GRAPH, timeout_s=PATIENCE_S)


def test_a_requests_own_limit_includes_the_wait_for_its_turn_in_a_loop(small, plain):
    async def main():
        small.go.clear()
        async with AsyncClient(plain, max_in_flight=1) as client:
            first = asyncio.create_task(client.infer("m", **GRAPH))
            await until(lambda: small.in_flight)
            with pytest.raises(TimedOut, match="requests in flight: at most 1 at once"):
                await client.infer("m", **GRAPH, timeout_s=0.05)
            waiting = asyncio.create_task(client.infer("m", **GRAPH))
            await asyncio.sleep(0)
            waiting.cancel()
            small.go.set()
            await first
            await client.infer("m", **GRAPH)

    asyncio.run(main())


@pytest.mark.slow
def test_ten_thousand_at_once_are_answered_sixty_four_at_a_time(small, plain):
    async def main():
        async with AsyncClient(plain, timeout_s=PATIENCE_S) as client:
            return await asyncio.gather(*(client.infer("m", GRAPH) for _ in range(10_000)))

    answers = asyncio.run(main())
    assert len(answers) == 10_000
    assert all(answer.output.shape == (3, 1) for answer in answers)
    assert small.calls["ModelMetadata"] == 1
    assert small.most_in_flight <= 64


def test_threads_wait_for_their_turn(small, plain):
    with Client(plain, max_in_flight=4) as client, ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda _: client.infer("m", GRAPH), range(200)))
    assert len(answers) == 200
    assert small.calls["ModelMetadata"] == 1
    assert small.most_in_flight <= 4


def test_all_that_wait_for_one_question_share_its_failure(small, plain):
    small.go.clear()
    small.refusals["ModelMetadata"] = [(grpc.StatusCode.NOT_FOUND, None)]

    async def main():
        async with AsyncClient(plain) as client:
            asked = [asyncio.create_task(client.infer("m", GRAPH)) for _ in range(20)]
            await until(lambda: small.calls["ModelMetadata"])
            small.go.set()
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert {type(each) for each in found} == {NotFound}
            assert small.calls["ModelMetadata"] == 1
            assert (await client.infer("m", GRAPH)).output.shape == (3, 1)

    asyncio.run(main())


def test_one_callers_short_limit_is_not_the_others(small, plain):
    small.go.clear()

    async def main():
        async with AsyncClient(plain) as client:
            hasty = asyncio.create_task(client.infer("m", GRAPH, timeout_s=0.1))
            await until(lambda: small.calls["ModelMetadata"])
            patient = asyncio.create_task(client.infer("m", GRAPH))
            with pytest.raises(TimedOut):
                await hasty
            small.go.set()
            assert (await patient).output.shape == (3, 1)

    asyncio.run(main())


def test_requests_of_streams_have_the_clients_limit(client, engine):
    [(_, answer)] = client.infer_stream(
        [Request(model="gcn", x=np.zeros((2, 4)), edge_index=[[0], [1]])]
    )
    assert answer.output.shape[0] == 2
    assert 0 < engine.calls[-1].timeout_ns <= 60e9


def test_a_closed_client_says_so(make, plain):
    client = make(plain)
    with client:
        client.infer("m", **GRAPH)
    if make is Client:
        with pytest.raises(Cancelled, match="the client is closed"):
            client.infer("m", **GRAPH)
