"""The server's life: ports, health, reflection, drain."""

import queue
import socket
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bench.kit.waiting import PATIENCE_S, eventually
from serve.config import ServerConfig
from serve.errors import ConfigError, ModelError, NotReady
from serve.pb import grpc_service_pb2 as pb
from serve.pb import grpc_service_pb2_grpc
from serve.rpc.server import GrpcServer
from serve.rpc.watchdog import Watchdog
from serve.wire.messages import INFER_METHOD, STREAM_METHOD, decode_response, encode_request
from tests.rpc.fakes import FACTS, FakeEngine
from tests.rpc.requests import TENSORS

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def message(request_id=""):
    return encode_request("gcn", TENSORS, request_id=request_id)


@pytest.fixture
def health(channel):
    return health_pb2_grpc.HealthStub(channel)


def check(health, name=""):
    return health.Check(health_pb2.HealthCheckRequest(service=name)).status


def make_server(engine, **options):
    return GrpcServer(engine, lambda: FACTS, lambda since_s: {}, ServerConfig(**options))


def test_a_taken_port_is_a_precise_error(server, engine):
    second = make_server(engine, grpc_port=server.port)
    with pytest.raises(ConfigError) as caught:
        second.start()
    text = str(caught.value)
    assert "server.grpc_port" in text
    assert f"127.0.0.1:{server.port}" in text
    assert "Address already in use" in text
    second.stop(0.0)


def test_a_start_that_fails_leaves_nothing(server, engine, front, monkeypatch, tmp_path):
    """Whichever step fails: no thread is left, and the port can be had again."""
    before = set(threading.enumerate())

    def left():
        return set(threading.enumerate()) - before

    with pytest.raises(ConfigError, match="Address already in use"):
        make_server(engine, grpc_port=server.port, front=front).start()
    eventually(lambda: not left())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def fail(*_):
        raise ConfigError("the last step")

    monkeypatch.setattr(Watchdog, "start", fail)
    with pytest.raises(ConfigError, match="the last step"):
        make_server(engine, grpc_port=port, front=front).start()
    eventually(lambda: not left())
    monkeypatch.undo()
    again = make_server(engine, grpc_port=port, front=front)
    assert again.start() == port
    again.stop(0.0)
    again.stop(0.0)


@pytest.mark.parametrize(("host", "warns"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_front_that_one_client_can_stop_is_told_where_others_reach_it(
    engine, front, caplog, host, warns
):
    make_server(engine, host=host, grpc_port=0, front=front)
    told = [line for line in caplog.messages if "one client can keep all others out" in line]
    assert bool(told) == (warns and front == "python")


def test_an_address_that_is_not_ours_is_a_precise_error(engine):
    server = make_server(engine, host="192.0.2.1", grpc_port=0)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: Cannot assign"):
        server.start()
    server.stop(0.0)


def test_ipv6_addresses_work(engine):
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    server = make_server(engine, host="::1", grpc_port=0)
    with grpc.insecure_channel(f"[::1]:{server.start()}") as channel:
        assert channel.unary_unary(INFER_METHOD)(message())
    server.stop(1.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_the_servers_own_requests_come_as_all_do_and_are_not_counted(engine, host):
    server = make_server(engine, host=host, grpc_port=0)
    port = server.start()
    with server.own_requests() as send:
        send("gcn", TENSORS, "our own")
        (call,) = engine.calls
        assert (call.model, call.client_id) == ("gcn", "our own")
        assert call.tensors["edge_index"].data == TENSORS["edge_index"].tobytes()
        engine.fail_with = ModelError("it broke")
        with pytest.raises(NotReady, match="INTERNAL: it broke"):
            send("gcn", TENSORS, "our own")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (found,) = stub.ModelStatistics(pb.ModelStatisticsRequest(name="gcn")).model_stats
    assert (found.inference_count, found.inference_stats.fail.count) == (0, 0)
    server.stop(1.0)


def _has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_health_follows_the_engine_and_its_models(health, engine):
    for name in ("", "inference.GRPCInferenceService", "gnnserve.v1.GnnServe", "gcn", "gin"):
        assert check(health, name) == SERVING
    engine.unload("gcn")
    assert (check(health, "gcn"), check(health, "gin"), check(health)) == (
        NOT_SERVING,
        SERVING,
        SERVING,
    )
    engine.ready = False
    assert (check(health), check(health, "gin")) == (NOT_SERVING, NOT_SERVING)
    engine.ready = True
    assert (check(health), check(health, "gcn")) == (SERVING, NOT_SERVING)
    with pytest.raises(grpc.RpcError) as caught:
        check(health, "nope")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_has_the_methods_of_later_releases_of_its_protocol(engine, monkeypatch):
    added = []
    monkeypatch.setattr(
        health_pb2_grpc.HealthServicer, "Later", lambda *_: "unimplemented", raising=False
    )
    monkeypatch.setattr(
        health_pb2_grpc,
        "add_HealthServicer_to_server",
        lambda servicer, _: added.append(servicer.Later),
    )
    make_server(engine, grpc_port=0).stop(0.0)
    assert added[0](None, None) == "unimplemented"


def test_a_model_removed_from_the_repository_stops_serving(health, engine):
    del engine.infos["gcn"]
    assert check(health, "gcn") == NOT_SERVING


def test_health_changes_are_watched(health, engine):
    watch = health.Watch(health_pb2.HealthCheckRequest(service="gcn"), timeout=PATIENCE_S)
    assert next(watch).status == SERVING
    reads = engine.repository_reads
    engine.ready = False
    assert next(watch).status == NOT_SERVING
    engine.ready = True
    assert next(watch).status == SERVING
    engine.unload("gcn")
    assert next(watch).status == NOT_SERVING
    assert engine.repository_reads == reads  # requests would wait for it, four times a second
    watch.cancel()
    unknown = health.Watch(health_pb2.HealthCheckRequest(service="nope"), timeout=PATIENCE_S)
    assert next(unknown).status == UNKNOWN
    unknown.cancel()


def test_reflection_describes_every_service(channel):
    ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    request = reflection_pb2.ServerReflectionRequest
    names = {
        "inference.GRPCInferenceService",
        "gnnserve.v1.GnnServe",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    symbols = (request(file_containing_symbol=name) for name in sorted(names))
    wanted = [request(list_services=""), *symbols]
    listed, *files = ask(iter(wanted), timeout=PATIENCE_S)
    assert {service.name for service in listed.list_services_response.service} == names
    for found in files:
        assert found.file_descriptor_response.file_descriptor_proto, found.error_response


def test_stopping_answers_what_was_taken_and_refuses_the_rest(server, channel, engine, health):
    infer = channel.unary_unary(INFER_METHOD)
    engine.hold_all = True
    taken = [infer.future(message(str(i))) for i in range(4)]
    engine.wait_for_calls(4)
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert next(watch).status == SERVING
    left = queue.SimpleQueue()
    stopping = threading.Thread(target=lambda: left.put(server.stop(PATIENCE_S)))
    stopping.start()
    assert next(watch).status == NOT_SERVING
    ready = channel.unary_unary(
        "/inference.GRPCInferenceService/ServerReady",
        pb.ServerReadyRequest.SerializeToString,
        pb.ServerReadyResponse.FromString,
    )
    assert not ready(pb.ServerReadyRequest()).ready
    with pytest.raises(grpc.RpcError) as caught:
        infer(message("late"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in caught.value.details()
    assert stopping.is_alive()
    engine.let_go()
    assert [decode_response(call.result()).request_id for call in taken] == list("0123")
    stopping.join(PATIENCE_S)
    assert left.get() == 0
    with pytest.raises(grpc.RpcError) as caught:
        infer(message("later"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_stopping_waits_for_the_answers_of_streams(server, channel, engine):
    engine.hold_all = True
    requests = queue.SimpleQueue()
    stream = channel.stream_stream(STREAM_METHOD)(iter(requests.get, None), timeout=PATIENCE_S)
    requests.put(message("a"))
    engine.wait_for_calls(1)
    stopping = threading.Thread(target=server.stop, args=(PATIENCE_S,))
    stopping.start()
    eventually(lambda: server.draining)
    requests.put(message("b"))
    assert b"shutting down" in next(stream)
    engine.let_go()
    assert b"uid-1" in next(stream)
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)  # the client never ended it
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    stopping.join(PATIENCE_S)
    requests.put(None)


def test_what_is_not_done_in_time_is_cancelled_and_counted(server, channel, engine):
    engine.hold_all = True
    call = channel.unary_unary(INFER_METHOD).future(message("stuck"))
    engine.wait_for_calls(1)
    assert server.stop(0.05) == 1
    assert call.exception().code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    eventually(lambda: [c.client_id for c in engine.cancelled] == ["stuck"])


def test_servers_come_and_go_without_leaving_threads():
    names = ("rpc", "health", "stream")
    before = set(threading.enumerate())
    for _ in range(3):
        server = make_server(FakeEngine(), grpc_port=0)
        with grpc.insecure_channel(f"127.0.0.1:{server.start()}") as channel:
            channel.unary_unary(INFER_METHOD)(message())
        server.stop(1.0)
    begun = lambda: set(threading.enumerate()) - before  # noqa: E731
    eventually(lambda: not [t for t in begun() if t.name.startswith(names)])
