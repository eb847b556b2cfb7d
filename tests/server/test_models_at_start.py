"""New models of a start: the others serve meanwhile, and they are calibrated in gaps."""

import json
import shutil
import threading
import time
from types import SimpleNamespace

import grpc
import msgspec
import pytest

from bench.kit.servers import ROOT, ServerProcess
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.client import Client, Unavailable
from serve.errors import ModelError
from serve.estimate.estimator import ModelEstimator, Overhead
from serve.server.calibrations import Calibrations, RolloutSettings
from serve.server.learning import in_gaps
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


@pytest.mark.live
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


@pytest.mark.live
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


@pytest.mark.live
def test_with_ready_when_any_a_server_is_ready_before_its_last_model(repository, tmp_path):
    with starting(tmp_path, repository, ready_when="any") as server:
        server.wait_ready()
        with Client(server.target) as client:
            assert client.ready()
            assert {m.state for m in client.models()} == {"READY", "LOADING"}
            repository.let_load()
            wait_for(lambda: all(m.state == "READY" for m in client.models()), "mischief")


@pytest.mark.live
def test_a_server_that_is_told_to_stop_waits_for_no_model(repository, tmp_path):
    with starting(tmp_path, repository) as server:
        with Client(server.target) as client:
            wait_for(lambda: serves(client, "gcn"), "an answer of gcn")
        assert server.stop() == 0
        assert not server.said_ready


@pytest.mark.live
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
        wait_for(lambda: "gcn:1: calibrated" in server.log.read_text(), "the news in the log")
        (kept,) = cache.glob("*.json")
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
    def __init__(self, key, why="it was calibrated for a short time"):
        self.key, self.why, self.retired = key, why, False
        self.spec = self

    @property
    def is_rough(self):
        return "short" in self.why


def test_calibrations_wait_for_gaps_and_one_that_fails_is_not_tried_again():
    idle_s, done = 0.0, []
    entries = [Entry("bad"), Entry("good")]
    tried = threading.Event()

    def complete(entry, yields):
        assert yields, "requests go first in a gap"
        done.append(entry.key)
        if entry.key == "bad":
            raise ModelError("no")
        entry.why = ""
        tried.set()

    asked = threading.Event()

    def idle():
        asked.set()
        return idle_s

    found = CalibrationsInGaps(lambda: entries, idle, lambda entry: entry.why, complete)
    found.start()
    assert asked.wait(PATIENCE_S)
    assert done == [], "the server is busy"
    idle_s = GAP_S
    assert tried.wait(PATIENCE_S)
    found.stop()
    assert done == ["bad", "good"]


def test_a_calibration_that_the_stop_interrupts_is_not_told(caplog):
    def complete(entry, yields):
        found.begin_stop()
        raise ModelError("the process that measured the model died")

    found = CalibrationsInGaps(
        lambda: [Entry("rough")], lambda: GAP_S, lambda entry: entry.why, complete
    )
    found.start()
    found._thread.join(PATIENCE_S)
    assert not found._thread.is_alive()
    assert "stay rough" not in caplog.text


def test_a_model_in_doubt_is_calibrated_in_gaps_ever_more_rarely(monkeypatch):
    monkeypatch.setattr(in_gaps, "_PERIOD_S", 0.001)
    now_s, done = [0.0], []
    doubted, rough = Entry("doubted", "its runs take 1.4 times as long"), Entry("rough")

    def complete(entry, yields):
        assert yields
        done.append((entry.key, now_s[0]))
        if entry is rough:
            entry.why = ""

    found = CalibrationsInGaps(
        lambda: [doubted, rough], lambda: GAP_S, lambda entry: entry.why, complete,
        monotonic_s=lambda: now_s[0],
    )  # fmt: skip
    found.start()
    try:
        wait_for(lambda: len(done) == 2, "both")
        assert [key for key, _ in done] == ["rough", "doubted"]
        for later_s in (599.0, 600.0, 1799.0, 1800.0):
            now_s[0] = later_s
            before = len(done)
            if later_s % 10 == 0:
                wait_for(lambda before=before: len(done) > before, f"one at {later_s} s")
            else:
                time.sleep(0.05)
    finally:
        found.stop()
    assert done[2:] == [("doubted", 600.0), ("doubted", 1800.0)]


@pytest.mark.parametrize(
    ("ratio", "runs", "told"), [(1.4, 60, "1.40"), (0.7, 60, "0.70"), (1.4, 20, ""), (1.1, 60, "")]
)
def test_runs_that_disagree_with_a_calibration_call_for_another(calibration, ratio, runs, told):
    estimator = ModelEstimator(calibration, Overhead())
    for _ in range(runs):
        estimator.observe_run((1000, 10_000), round(ratio * estimator.fitted_ns(1000, 10_000)))
    entry = SimpleNamespace(estimator=estimator, is_rough=False)
    assert told in (why := why_due(entry))
    assert bool(why) is bool(told)
    estimator.retime(calibration.time)
    assert why_due(entry) == ""


def test_a_calibration_of_a_busy_machine_says_so_and_is_made_anew(calibration):
    busy = msgspec.structs.replace(calibration, busy_share=0.4)
    assert "others had the core for 40%" in busy.remarks
    assert calibration.remarks == ""
    entry = SimpleNamespace(estimator=ModelEstimator(busy, Overhead()), is_rough=False)
    assert why_due(entry) == "the machine was busy"
    entry.estimator.retime(calibration.time)
    assert why_due(entry) == ""


def why_due(entry):
    settings = RolloutSettings("auto", 6.0, 60.0, 1 << 30)
    return Calibrations(None, None, settings, None, threading.Lock()).why_due(entry)
