"""A repository that is written to carelessly: what was loaded serves on, and a start finds it."""

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
import tritonclient.grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException

from bench.kit.servers import ServerProcess
from bench.kit.waiting import PATIENCE_S
from serve.models.writer import write_model
from serve.pb import grpc_service_pb2 as pb
from serve.pb import grpc_service_pb2_grpc as stubs
from serve.wire.messages import encode_request
from tests.e2e import mischief
from tests.e2e.support import GOOD, REPOSITORY, Troubled, assert_equal, infer, raw_channel
from tests.processes import descendants, http_get, metric, wait_for


@pytest.fixture(scope="module")
def trouble(tmp_path_factory):
    """Of `gcn` the newest version is half copied."""
    found = Troubled(tmp_path_factory.mktemp("repository"), "gcn")
    shutil.copytree(found.root / "gcn" / "1", found.root / "gcn" / "3")
    weights = found.root / "gcn" / "3" / "weights.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    return found


@pytest.fixture(scope="module")
def careless(tmp_path_factory, trouble):
    folder = tmp_path_factory.mktemp("careless")
    with ServerProcess(folder, repository=trouble.root, sections={"device": {"lanes": 1}}) as found:
        yield found


@pytest.fixture
def call(careless):
    with raw_channel(careless) as found:
        yield found


@pytest.fixture
def client(careless):
    with tritonclient.grpc.InferenceServerClient(careless.target) as found:
        yield found


def test_a_start_serves_the_newest_version_that_loads(careless, call, client, reference):
    assert http_get(careless, "/v2/health/ready")[0] == 200
    answer = infer(call, "gcn", GOOD)
    assert answer.version == "1"
    assert_equal(answer.outputs["output"], reference("gcn", GOOD))
    rows = [row for row in client.get_model_repository_index().models if row.name == "gcn"]
    assert [(row.version, row.state) for row in rows] == [("1", "READY"), ("3", "UNAVAILABLE")]
    assert "3/weights.safetensors: truncated" in rows[1].reason
    assert "3/weights.safetensors: truncated" in careless.log.read_text()
    assert client.is_model_ready("gcn")
    assert not client.is_model_ready("gcn", "3")
    with grpc.insecure_channel(careless.target) as channel:
        request = health_pb2.HealthCheckRequest(service="gcn")
        status = health_pb2_grpc.HealthStub(channel).Check(request).status
    assert status == health_pb2.HealthCheckResponse.SERVING


def test_a_mended_version_takes_over_and_a_broken_one_does_not(call, client, trouble):
    with pytest.raises(InferenceServerException, match=r"version 3 of model 'gcn' does not load"):
        client.load_model("gcn")
    assert infer(call, "gcn", GOOD).version == "1"
    name = "weights.safetensors"
    shutil.copy(REPOSITORY / "gcn" / "1" / name, trouble.root / "gcn" / "3" / name)
    client.load_model("gcn")
    assert infer(call, "gcn", GOOD).version == "3"


@pytest.mark.parametrize("version", ["9" * 5000, "9" * 200, "١"])
def test_a_version_that_is_none_is_the_clients_error(call, careless, version):
    # A request's names have at most 256 bytes.
    too_long = len(version) > 256
    codes = [grpc.StatusCode.INVALID_ARGUMENT if too_long else grpc.StatusCode.NOT_FOUND]
    codes.append(grpc.StatusCode.NOT_FOUND)
    for code, refused in zip(
        codes,
        (
            lambda: call(_request_for(version), timeout=PATIENCE_S),
            lambda: _metadata(careless, version),
        ),
        strict=True,
    ):
        with pytest.raises(grpc.RpcError) as caught:
            refused()
        assert caught.value.code() is code
    assert "Traceback" not in careless.log.read_text()


def _request_for(version):
    return encode_request("gcn", GOOD.tensors, version=version)


def _metadata(server, version):
    with grpc.insecure_channel(server.target) as channel:
        stub = stubs.GRPCInferenceServiceStub(channel)
        return stub.ModelMetadata(pb.ModelMetadataRequest(name="gcn", version=version), timeout=60)


def test_what_was_loaded_is_served_whatever_becomes_of_its_files(careless, call, trouble):
    """Also by a lane that is started afterwards."""
    graph = trouble.graph(num_nodes=20)
    expected = infer(call, "mischief", graph).outputs["output"]
    assert_equal(expected, trouble.expected(graph))
    weights = trouble.folder / "1" / "weights.safetensors"
    size_bytes = weights.stat().st_size
    with weights.open("r+b") as file:  # other numbers, in place
        file.seek(size_bytes - 16)
        file.write(bytes(16))
    assert_equal(infer(call, "mischief", graph).outputs["output"], expected)
    os.truncate(weights, size_bytes - 40)
    (trouble.folder / "model.py").write_text("raise RuntimeError('not this one')\n")
    assert_equal(infer(call, "mischief", graph).outputs["output"], expected)

    restarts = metric(careless, "gnnserve_lane_restarts_total")
    (lane,) = lanes_of(careless)
    os.kill(lane, signal.SIGKILL)
    wait_for(lambda: metric(careless, "gnnserve_lane_restarts_total") > restarts, "a new lane")
    wait_for(lambda: metric(careless, "gnnserve_lanes_up") == 1, "the new lane to be up")
    assert lanes_of(careless) != {lane}
    answer = infer(call, "mischief", graph)
    assert answer.version == "1"
    assert_equal(answer.outputs["output"], expected)


def test_answers_are_of_one_version_while_weights_are_written_to(careless, trouble, client, call):
    """Of the loaded one, whatever the file holds; after an explicit load, of the new one alone."""
    weights = trouble.root / "written" / "1" / "weights.safetensors"
    graph = trouble.graph(num_nodes=20)
    contents, outputs = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        module = mischief.build()
        write_model(trouble.root, "written", module, factory="./model.py:build", args={})
        contents.append(weights.read_bytes())
        with torch.inference_mode():
            outputs.append(module.linear(torch.from_numpy(graph.x)).numpy())
    shutil.copy(mischief.__file__, trouble.root / "written" / "model.py")
    client.load_model("written")
    loaded, asked, going = 1, [0, 0], True

    def ask() -> None:
        while going:
            before = loaded
            answer = infer(call, "written", graph).outputs["output"]
            (which,) = [n for n in (0, 1) if np.allclose(answer, outputs[n], atol=1e-5)]
            assert before is None or loaded is not before or which == before
            asked[which] += 1

    with ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(ask) for _ in range(2)]
        try:
            while sum(asked) < 1_000 and not any(one.done() for one in asking):
                new = 1 if sum(asked) < 500 else 0
                half = len(contents[new]) // 2
                with weights.open("r+b") as file:  # in place, in two steps, and cut between them
                    file.write(contents[new][:half])
                    file.flush()
                    infer(call, "written", graph)
                    file.truncate(half)
                    infer(call, "written", graph)
                    file.write(contents[new][half:])
                if loaded != new:
                    loaded = None  # either, while it loads
                    client.load_model("written")
                    loaded = new
        finally:
            going = False
    for one in asking:
        one.result()
    assert min(asked) > 0
    assert sum(asked) >= 1_000


def lanes_of(server):
    """Processes that have the pool mapped, the server itself left out."""
    found = set()
    for pid in descendants(server.pid):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # it has just ended
        if "memfd:gnnserve-pool" in maps:
            found.add(pid)
    return found
