"""New models of a start: the others serve meanwhile, and they are calibrated in gaps."""

import json
import shutil
import threading

import grpc
import pytest

from bench.kit.servers import ROOT, ServerProcess
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.client import Client, Unavailable
from serve.errors import ModelError
from serve.server.learning.in_gaps import GAP_S, CalibrationsInGaps
from tests.e2e.support import GOOD, Troubled
from tests.estimate.conftest import calibration as _calibration

calibration = _calibration


@pytest.fixture
def repository(tmp_path):
    """`gcn` and a model that nothing is known of, which waits to be let load."""
    found = Troubled(tmp_path, "gcn")
    found.bar_loading()
    return found


def starting(folder, repository, **server):
    models = {"cache": str(folder / "cache")}
    sections = {"server": server, "device": {"lanes": 2}, "models": models}
    return ServerProcess(folder, repository=repository.root, sections=sections).starting()


def serves(client, model):
    try:
        client.infer(model, **GOOD.tensors)
    except Unavailable:
        return False
    return True


def test_a_model_that_takes_long_keeps_no_other_from_serving(repository, tmp_path):
    with starting(tmp_path, repository) as server, Client(server.target) as client:
        wait_for(lambda: serves(client, "gcn"), "an answer of gcn")
        assert not client.ready()
        assert not server.said_ready
        states = {model.name: model.state for model in client.models()}
        assert states == {"gcn": "READY", "mischief": "LOADING"}
        with pytest.raises(Unavailable, match="mischief' is LOADING"):
            client.infer("mischief", **repository.graph().tensors)
        with grpc.insecure_channel(server.target) as channel:
            assert model_ready(channel, "gcn")
            assert not model_ready(channel, "mischief")
        repository.let_load()
        server.wait_ready()
        assert client.ready()
        client.infer("mischief", **repository.graph().tensors)


def test_a_calibrated_model_that_loads_slowly_keeps_no_other_from_serving(repository, tmp_path):
    repository.let_load()
    with starting(tmp_path, repository) as server:
        server.wait_ready()
    (repository.folder / "open").unlink()
    for kept in (tmp_path / "cache").glob("*.json"):
        table = json.loads(kept.read_bytes())
        assert table["calibration"]["load_ns"] > 0
        if table["calibration"]["model"] == "mischief:1":
            table["calibration"]["load_ns"] = 60_000_000_000
            kept.write_text(json.dumps(table))
    with starting(tmp_path, repository) as server, Client(server.target) as client:
        wait_for(lambda: serves(client, "gcn"), "an answer of gcn")
        assert not client.ready()
        repository.let_load()
        server.wait_ready()
        client.infer("mischief", **repository.graph().tensors)
    assert "calibrating" not in server.log.read_text()


def model_ready(channel, name):
    from serve.pb import grpc_service_pb2 as pb

    call = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelReady",
        request_serializer=pb.ModelReadyRequest.SerializeToString,
        response_deserializer=pb.ModelReadyResponse.FromString,
    )
    return call(pb.ModelReadyRequest(name=name), timeout=PATIENCE_S).ready


def test_with_ready_when_any_a_server_is_ready_before_its_last_model(repository, tmp_path):
    with starting(tmp_path, repository, ready_when="any") as server:
        server.wait_ready()
        with Client(server.target) as client:
            assert client.ready()
            assert {m.state for m in client.models()} == {"READY", "LOADING"}
            repository.let_load()
            wait_for(lambda: all(m.state == "READY" for m in client.models()), "mischief")


def test_a_server_that_is_told_to_stop_waits_for_no_model(repository, tmp_path):
    with starting(tmp_path, repository) as server:
        with Client(server.target) as client:
            wait_for(lambda: serves(client, "gcn"), "an answer of gcn")
        assert server.stop() == 0
        assert not server.said_ready


def test_a_new_model_serves_on_rough_estimates_and_is_calibrated_in_a_gap(tmp_path):
    shutil.copytree(ROOT / "configs" / "models" / "gcn", tmp_path / "models" / "gcn")
    cache = tmp_path / "cache"
    models = {"cache": str(cache), "calibration_s": 1.5}
    sections = {"models": models, "device": {"lanes": 1}}
    server = ServerProcess(
        tmp_path,
        repository=tmp_path / "models",
        sections=sections,
    )
    with server, Client(server.target) as client:
        rough = client.estimate("gcn", num_nodes=1000, num_edges=10_000)
        client.infer("gcn", **GOOD.tensors)
        wait_for(lambda: list(cache.glob("*.json")), "the calibration")
        (kept,) = cache.glob("*.json")
        wait_for(lambda: "gcn:1: calibrated" in server.log.read_text(), "the news in the log")
        exact = client.estimate("gcn", num_nodes=1000, num_edges=10_000)
        assert client.infer("gcn", **GOOD.tensors).output.shape[0] == len(GOOD.x)
    assert json.loads(kept.read_bytes())["calibration"]["model"] == "gcn:1"
    # Memory is traced alike, whatever the time: it is never less than with the usual calibration.
    assert rough.reserve_bytes == exact.reserve_bytes


def test_a_rough_calibration_promises_what_most_runs_kept(calibration):
    counts = (1000, 10_000)
    rough = calibration.rough()
    assert rough.time.at(*counts) == pytest.approx(1.2 * calibration.time.at(*counts))
    assert rough.memory == calibration.memory


class Entry:
    def __init__(self, key):
        self.key, self.is_rough, self.retired = key, True, False
        self.spec = self


def test_calibrations_wait_for_gaps_and_one_that_fails_is_not_tried_again():
    idle_s, done = 0.0, []
    entries = [Entry("bad"), Entry("good")]
    tried = threading.Event()

    def complete(entry):
        done.append(entry.key)
        if entry.key == "bad":
            raise ModelError("no")
        entry.is_rough = False
        tried.set()

    asked = threading.Event()

    def idle():
        asked.set()
        return idle_s

    found = CalibrationsInGaps(lambda: entries, idle, complete)
    found.start()
    assert asked.wait(PATIENCE_S)
    assert done == [], "the server is busy"
    idle_s = GAP_S
    assert tried.wait(PATIENCE_S)
    found.stop()
    assert done == ["bad", "good"]
