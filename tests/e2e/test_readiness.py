"""Ready means ready: not before every model is warm, and not once the server stops."""

import contextlib
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import tritonclient.grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.kit.servers import ServerProcess
from tests.e2e.support import GOOD, Troubled, assert_equal, infer, raw_channel
from tests.processes import http_get, wait_for

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def trouble(tmp_path):
    return Troubled(tmp_path, "gcn")


def health(channel: grpc.Channel, name: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=name)
    status: int = health_pb2_grpc.HealthStub(channel).Check(request).status
    return status


def told(server: ServerProcess) -> dict[str, object]:
    """What the server says of its readiness in all the ways it can be asked."""
    with (
        grpc.insecure_channel(server.target) as channel,
        tritonclient.grpc.InferenceServerClient(server.target) as client,
    ):
        return {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model": client.is_model_ready("gcn"),
            "health": health(channel),
            "health of gcn": health(channel, "gcn"),
            "http live": http_get(server, "/v2/health/live")[0],
            "http ready": http_get(server, "/v2/health/ready")[0],
        }


NOT_READY = {
    "live": True,
    "ready": False,
    "model": False,
    "health": NOT_SERVING,
    "health of gcn": NOT_SERVING,
    "http live": 200,
    "http ready": 503,
}
READY = {
    "live": True,
    "ready": True,
    "model": True,
    "health": SERVING,
    "health of gcn": SERVING,
    "http live": 200,
    "http ready": 200,
}


def test_ready_is_told_after_the_warm_up_and_until_the_stop(tmp_path, trouble):
    trouble.bar_loading()
    server = ServerProcess(tmp_path, repository=trouble.root)
    with server.starting(), raw_channel(server) as call, ThreadPoolExecutor(1) as threads:
        wait_for(lambda: "model gcn: serving" in server.log.read_text(), "the first model")
        assert told(server) == NOT_READY
        with pytest.raises(grpc.RpcError) as caught:
            infer(call, "gcn", GOOD)
        assert caught.value.code() is UNAVAILABLE
        assert "starting" in caught.value.details()
        assert not server.said_ready

        trouble.let_load()
        server.wait_ready()
        assert told(server) == READY

        with trouble.holding() as graph:
            held = threads.submit(infer, call, "mischief", graph)
            wait_for(trouble.running, "a running request")
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "draining" in server.log.read_text(), "the drain")
            assert told(server) == NOT_READY
            with pytest.raises(grpc.RpcError) as caught:
                infer(call, "gcn", GOOD)
            assert caught.value.code() is UNAVAILABLE
            assert "shutting down" in caught.value.details()
        assert_equal(held.result().outputs["output"], trouble.expected(graph))
        assert server.wait() == 0


def test_watchers_hear_of_every_change(tmp_path):
    server = ServerProcess(tmp_path, sections={"models": {"load": ["gcn"]}})
    heard: list[int] = []

    with server.starting(), grpc.insecure_channel(server.target) as channel:

        def watch() -> None:
            request = health_pb2.HealthCheckRequest()
            stream = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True)
            with contextlib.suppress(grpc.RpcError):
                heard.extend(change.status for change in stream)

        watcher = threading.Thread(target=watch)
        watcher.start()
        server.wait_ready()
        wait_for(lambda: heard[-1:] == [SERVING], "SERVING")
        assert server.stop() == 0
        watcher.join()
    # It may have come too late for the first of them.
    assert heard[-2:] == [SERVING, NOT_SERVING]
    assert heard.count(SERVING) == 1
