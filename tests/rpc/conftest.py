import grpc
import pytest

from serve.config import ServerConfig
from serve.native import front_lacks
from serve.pb import gnnserve_pb2_grpc, grpc_service_pb2_grpc
from serve.rpc import server as rpc_server
from serve.rpc.server import GrpcServer
from tests.rpc.fakes import FACTS, FakeEngine

REPORT = {
    "requests": 5,
    "answered": 4,
    "violations": 1,
    "violation_rate": 0.25,
    "latency_over_qt": {"p50": 0.5, "p90": 0.75, "p99": 1.5},
    "by_model": {"gcn": {"requests": 5, "latency_over_qt": {"p50": 0.5}}},
    "by_cause": {"queue": 1, "prepare": 0},
    "memory": {"budget_bytes": 2**40, "peak_bytes": 12},
    "rejected": {"too_big": 1},
    "overhead": {"queue": 0.125},
    "a_field_of_tomorrow": 1,
}


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def reports():
    """Return a list that collects the `since_s` of every report asked for."""
    return []


@pytest.fixture(params=["python", "native"])
def front(request):
    """Each front end in turn; the native one only where its library is."""
    if request.param == "native" and (lacks := front_lacks()):
        pytest.skip(lacks)
    return request.param


@pytest.fixture
def server(engine, reports, front, monkeypatch):
    def report(since_s):
        reports.append(since_s)
        return REPORT

    server = GrpcServer(
        engine,
        lambda: FACTS,
        report,
        ServerConfig(grpc_port=0, max_message="1 MiB", max_queue=16, front=front),
    )
    server.port = server.start()
    yield server
    engine.let_go()
    monkeypatch.setattr(rpc_server, "_REFUSE_S", 0.0)  # nobody asks any more
    server.stop(2.0)


@pytest.fixture
def target(server):
    return f"127.0.0.1:{server.port}"


@pytest.fixture
def channel(target):
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(target, options) as channel:
        yield channel


@pytest.fixture
def standard(channel):
    return grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture
def own(channel):
    return gnnserve_pb2_grpc.GnnServeStub(channel)
