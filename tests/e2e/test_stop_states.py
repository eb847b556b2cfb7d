"""SIGTERM in whatever state a server is: it ends in time, and nothing of it is left."""

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.kit.http2_frames import in_frames, prefixed
from bench.kit.servers import ROOT, ServerProcess
from serve.wire.messages import INFER_METHOD, STREAM_METHOD, encode_request
from tests.e2e.support import GOOD, hanging_model, infer, random_graph, raw_channel
from tests.processes import PATIENCE_S, descendants, http_get, is_running, metric, rows, wait_for
from tests.rpc.http2 import Http2

#: Beyond both together the server ends itself by force, with code 1. The latter is 5 by default,
#: which a busy machine may exceed.
DRAIN_S, STOP_S = 2.0, 30.0


@contextmanager
def calls_that_never_send_a_message(server) -> Iterator[None]:
    """Half of them begin one."""
    with Http2(server.grpc_port) as bare, Http2(server.grpc_port) as begun:
        bare.head(INFER_METHOD, 100)
        for _ in range(50):
            begun.send(in_frames(begun.head(INFER_METHOD), prefixed(b"", claims=1 << 20)))
        begun.ping()
        yield


@contextmanager
def clients_that_read_nothing(server) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(10):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port)))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 500)
            events = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port)))
            events.sendall(b"GET /live/events HTTP/1.1\r\nHost: a\r\n\r\n")
        yield


@contextmanager
def streams_and_watches(server) -> Iterator[None]:
    with ExitStack() as stack:
        client = stack.enter_context(Http2(server.grpc_port))
        client.head(STREAM_METHOD, 30)
        channel = stack.enter_context(grpc.insecure_channel(server.target))
        watch = health_pb2_grpc.HealthStub(channel).Watch
        open_calls = [watch(health_pb2.HealthCheckRequest()) for _ in range(30)]
        for one in open_calls:
            next(one)
        yield


@contextmanager
def answers_that_nobody_reads(server) -> Iterator[None]:
    """Large ones, over gRPC: their client opens no window."""
    message = encode_request("gcn", random_graph(5_000, 10).tensors)
    with Http2(server.grpc_port, window_bytes=0) as deaf:
        deaf.most_streams()  # its windows hold from now on
        for _ in range(3):
            stream = deaf.head(INFER_METHOD)
            deaf.send(in_frames(stream, prefixed(message)))
            deaf.data(stream, b"", end=True)
        wait_for(lambda: len(rows(server)) == 3, "their runs")
        yield


@contextmanager
def a_database_that_another_process_locks(server) -> Iterator[None]:
    with (
        closing(sqlite3.connect(server.database, isolation_level=None)) as other,
        raw_channel(server) as call,
    ):
        other.execute("BEGIN IMMEDIATE")
        infer(call, "gcn", GOOD)
        yield


@contextmanager
def a_gateway_that_stands_still(server) -> Iterator[None]:
    (gateway,) = (
        pid for pid, words in descendants(server.pid).items() if "serve.rest.run" in words
    )
    os.kill(gateway, signal.SIGSTOP)
    yield


@contextmanager
def lanes_that_restart(server) -> Iterator[None]:
    """Their fork server is gone too."""
    for child in descendants(server.pid):
        for lane in descendants(child):
            os.kill(lane, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)
            break
    wait_for(
        lambda: (
            metric(server, "gnnserve_lanes_up") < 2
            or metric(server, "gnnserve_lane_restarts_total") > 0
        ),
        "their loss",
    )
    yield


@contextmanager
def a_full_disk(server) -> Iterator[None]:
    filling = server.folder / "disk" / "filling"
    with suppress(OSError):
        filling.write_bytes(bytes(4 << 20))
    assert shutil.disk_usage(filling).free < 1 << 16
    with raw_channel(server) as call:
        for _ in range(50):
            infer(call, "gcn", GOOD)
    yield


@contextmanager
def clients_that_drip(server) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(15):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port)))
            client.sendall(b"GET /metrics HTTP/1.0\r\nx:")
        yield


@contextmanager
def clients_of_all_kinds(server) -> Iterator[None]:
    """None of them has anything to do with the others."""
    with ExitStack() as stack:
        for kind in (
            calls_that_never_send_a_message, clients_that_read_nothing, streams_and_watches,
            answers_that_nobody_reads, clients_that_drip,
        ):  # fmt: skip
            stack.enter_context(kind(server))
        yield


@contextmanager
def a_load_that_hangs(server) -> Iterator[None]:
    with _loading(server, loads=False):
        wait_for(lambda: "hangs:1: calibrating" in server.log.read_text(), "the load")
        yield


@contextmanager
def a_calibration_that_hangs(server) -> Iterator[None]:
    with _loading(server, loads=True):
        wait_for(lambda: "the first run" in server.log.read_text(), "the run")
        yield


@contextmanager
def _loading(server, *, loads: bool) -> Iterator[None]:
    """A client waits for a model that hangs, until it is told that there will be none."""
    hanging_model(server.folder / "models", loads=loads)
    with grpc.insecure_channel(server.target) as channel, ThreadPoolExecutor(1) as threads:
        load = channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")
        # One field, the model's name.
        loading = threads.submit(load, b"\x12\x05hangs", timeout=PATIENCE_S)
        yield
        with pytest.raises(grpc.RpcError) as caught:
            loading.result()
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@contextmanager
def lanes_that_stand_still(server) -> Iterator[None]:
    """Somebody has stopped them, and a request needs one."""
    for child in descendants(server.pid):
        for lane in descendants(child):
            os.kill(lane, signal.SIGSTOP)
    with raw_channel(server) as call, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(infer, call, "gcn", GOOD)
        wait_for(lambda: metric(server, "gnnserve_requests_inside") > 0, "the request")
        yield
        # The lanes are ended and start again meanwhile, or the drain ends before.
        with suppress(grpc.RpcError):
            asked.result()


STATES = (
    clients_of_all_kinds, a_database_that_another_process_locks, a_gateway_that_stands_still,
    lanes_that_restart, a_full_disk, a_load_that_hangs, a_calibration_that_hangs,
    lanes_that_stand_still,
)  # fmt: skip


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two MiB in the server's folder, for the report."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_stop_ends_in_time(tmp_path, request, state):
    sections = {
        "server": {"drain_timeout_s": DRAIN_S, "stop_timeout_s": STOP_S},
        "models": {"load": ["gcn"]},
    }
    if state is a_full_disk:
        disk = request.getfixturevalue("small_disk")
        sections["report"] = {"database": str(disk / "report.db")}
    repository = tmp_path / "models"
    shutil.copytree(ROOT / "configs" / "models" / "gcn", repository / "gcn")
    options = {"repository": repository, "sections": sections}
    with ServerProcess(tmp_path, **options) as server, state(server):
        processes = descendants(server.pid)
        assert server.stop() == 0, server.log.read_text()[-3000:]
    wait_for(lambda: not any(map(is_running, processes)), "the end of all processes")
    assert http_get(server, "/v2/health/live")[0] == 0
