"""A lane that is a thread replays what recurs, and answers as if it had launched it."""

import mmap
import socket
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from serve.estimate.calibration import Calibration
from serve.ipc import messages
from serve.ipc.messages import (
    LoadModel,
    ModelLoaded,
    Part,
    ProbeModel,
    RunTask,
    TaskDone,
    TensorRef,
    UnloadModel,
)
from serve.ipc.setup import DevicePlace, LaneSetup
from serve.ipc.shared_pool import LANE_WORDS_BYTES
from serve.ipc.stop_word import StopWord
from serve.lane.channel import LaneChannel
from serve.lane.cuda.device import CudaDevice
from serve.lane.cuda.place import CudaPlace
from serve.lane.cuda.streams import StreamKind
from serve.lane.loop import Lane
from serve.lane.measure.probe_signature import probe_signature
from serve.native_cuda import CudaError
from tests.written_models import written_gcn

FEATURES, CLASSES = 6, 3
ARGS = {
    "in_channels": FEATURES, "out_channels": CLASSES, "hidden_channels": 8, "num_layers": 2,
}  # fmt: skip
EDGES_AT, OUTPUT_AT, POOL_BYTES = 16 << 10, 48 << 10, 1 << 20
RECUR = 8


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return written_gcn(tmp_path_factory.mktemp("repository"), ARGS)


class Rig:
    """A lane in this process, its pool, and the other end of its channel."""

    def __init__(self, replay_bytes=1, arena=None, **place):
        """`arena` stands in for what places the device's memory."""
        self.pool = mmap.mmap(-1, POOL_BYTES)
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        place = DevicePlace("cpu", replay_bytes=replay_bytes, **place)
        self.device = CudaDevice.open(LaneSetup("test", (), 1, 0, 0, 30, 0, place=place), self.pool)
        self.device = replace(self.device, arena=arena)
        word = StopWord(self.pool, POOL_BYTES - LANE_WORDS_BYTES)
        channel = LaneChannel(theirs)
        self.place = CudaPlace(channel, self.pool, self.device, word)
        self.lane = Lane(channel, self.place)
        self._theirs = theirs
        self.rng = np.random.default_rng(0)

    def close(self):
        self.ours.close()
        self._theirs.close()

    def load(
        self, spec, key="m", *, replay_most=1000, executor="eager", any_size=False, gather_threads=0
    ):
        signature = self.signature_of(spec)
        message = LoadModel(
            key, spec, signature, executor, replay_most=replay_most, replay_any_size=any_size,
            gather_threads=gather_threads,
        )  # fmt: skip
        assert self.lane._load(message) == ModelLoaded(key)
        self.reference = self.lane._models[key].loaded

    def signature_of(self, spec):
        return probe_signature(self.model(spec))

    def model(self, spec):
        return self.place.load_to_measure(spec, "eager")[0]

    def ask(self, num_nodes=20, num_edges=60, key="m", parts=1, run_ns=0, bounded=False):
        """One run on a new graph: the lane's answer, which is what the model gives."""
        x = self.rng.standard_normal((num_nodes, FEATURES), dtype=np.float32)
        edges = self.rng.integers(0, num_nodes, (2, num_edges))
        for start, value in ((0, x), (EDGES_AT, edges)):
            self.pool[start : start + value.nbytes] = value.tobytes()
        refs = (
            TensorRef("x", "float32", x.shape, 0),
            TensorRef("edge_index", "int64", edges.shape, EDGES_AT),
        )
        size = 4 * num_nodes * CLASSES
        all_parts = tuple(Part(refs, OUTPUT_AT + number * size, size) for number in range(parts))
        task = RunTask(5, key, all_parts, 1 << 30, run_ns, bounded)
        answer = self.place.run(task, self.lane._models[key])
        assert isinstance(answer, TaskDone), answer
        self.place.tidy(answer)
        expected = self.reference.run(
            {"x": torch.from_numpy(x), "edge_index": torch.from_numpy(edges)}
        )
        for number in range(parts):
            start = OUTPUT_AT + number * size
            found = np.frombuffer(self.pool[start : start + size], np.float32)
            np.testing.assert_allclose(
                found.reshape(expected.shape), expected.numpy(), rtol=1e-4, atol=1e-5
            )
        return answer


@pytest.fixture
def rig(spec):
    found = Rig()
    found.load(spec)
    yield found
    found.close()


def test_what_recurs_is_replayed_with_what_is_asked_now(rig, launches):
    for _ in range(RECUR):
        rig.ask()
    assert (len(rig.place._recurring.replays), launches) == (1, [])
    for _ in range(3):
        answer = rig.ask()
        assert answer.rows == (20,)
        assert answer.columns == CLASSES
        # Nothing of the task's buffer was used, so nothing is learned from it.
        assert (answer.peak_bytes, answer.held_bytes) == (None, None)
    assert len(launches) == 3
    rig.ask(num_nodes=21)
    rig.ask(num_edges=0)
    assert len(launches) == 3


def test_what_is_never_the_same_or_does_not_gain_is_launched(rig, spec, launches):
    rig.load(spec, "never", replay_most=0)
    for _ in range(2 * RECUR):
        rig.ask(parts=2)
        rig.ask(num_nodes=400, num_edges=601)
        rig.ask(key="never")
    assert launches == []
    assert len(rig.place._recurring.replays) == 0


def test_an_urgent_run_is_replayed_on_the_urgent_stream_only(rig, launches):
    rig.device.urgency.begin(rig.device.urgency.add_lane(), 1000)
    for _ in range(RECUR):
        rig.ask(run_ns=10)
    (shape,) = rig.place._recurring.replays._runs
    assert shape.kind is StreamKind.URGENT
    rig.ask(run_ns=10)
    assert len(launches) == 1
    rig.ask(run_ns=999)
    assert len(launches) == 1


def test_a_lane_with_work_waiting_does_not_capture(rig):
    rig.ours.send(messages.encode(messages.Stop()))
    for _ in range(RECUR + 2):
        rig.ask()
    assert len(rig.place._recurring.replays) == 0
    rig._theirs.recv(1 << 16)
    rig.ask()
    assert len(rig.place._recurring.replays) == 1


def test_nothing_is_captured_while_the_device_loads_or_another_lane_captures(rig):
    with rig.device.capturing:
        for _ in range(RECUR + 2):
            rig.ask()
        assert len(rig.place._recurring.replays) == 0
    rig.ask()
    assert len(rig.place._recurring.replays) == 1


def test_a_run_that_can_be_launched_no_more_is_launched_the_other_way(rig, launches, monkeypatch):
    for _ in range(RECUR + 1):
        rig.ask()
    assert len(launches) == 1

    def refused():
        raise CudaError("cudaGraphLaunch: out of memory (cudaError 2)")

    launches[0].launch = refused
    for _ in range(2 * RECUR):
        rig.ask()
    assert len(launches) == 1


def test_unloading_forgets_its_runs(rig, spec, launches):
    for _ in range(RECUR):
        rig.ask()
    rig.lane.handle(UnloadModel("m"))
    assert len(rig.place._recurring.replays) == 0
    rig.load(spec)
    rig.ask()
    assert launches == []


def test_calibration_tells_up_to_which_size_replaying_gains(rig, spec, monkeypatch):
    raced, results = [], [(1152, ""), (0, "they give other answers")]

    def race(model, signature, recorder, site, *, any_size):
        raced.append((model.executor, recorder, any_size))
        return results.pop(0)

    monkeypatch.setattr("serve.lane.cuda.place.replay_most", race)
    said = rig.lane._probe(ProbeModel(spec, 0.1, 64 << 20, "csr"))
    found = msgspec.msgpack.decode(said.calibration, type=Calibration)
    # The executor that was chosen, in the lane's own memory.
    assert raced == [("csr", rig.place._recurring.recorder, True)]
    assert (found.replay_most, found.replay_any_size, found.replay_reason) == (1152, True, "")

    said = rig.lane._probe(ProbeModel(spec, 0.1, 64 << 20, "eager"))
    found = msgspec.msgpack.decode(said.calibration, type=Calibration)
    assert (found.replay_most, found.replay_any_size) == (0, False)
    assert found.replay_reason == "runs are not captured: they give other answers"


def test_a_device_without_memory_for_it_captures_nothing(spec, launches):
    rig = Rig(replay_bytes=0)
    rig.load(spec)
    for _ in range(2 * RECUR):
        rig.ask()
    assert launches == []
    rig.close()
