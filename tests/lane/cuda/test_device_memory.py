"""What lanes of a GPU take of its memory outside of tasks, over an arena that writes it down."""

import socket
from types import SimpleNamespace

import pytest
import torch

from serve.ipc import messages
from serve.ipc.messages import LoadModel, MemoryTaken, ModelLoaded, TakesLess, UnloadModel
from serve.lane.cuda.device import CudaDevice
from serve.lane.models.loader import LoadedModel
from serve.models import zoo
from serve.models.repository import find
from serve.models.writer import write_model
from serve.native_cuda import CudaError
from tests.lane.cuda.test_recurring_runs import ARGS, RECUR, Rig

ROOM_BYTES = 1 << 20


class Memory:
    """Stands in for a lane's memory."""

    def __init__(self):
        self.inserted = 0
        self.refused = 0

    def most_bytes(self):
        return 1 << 30

    def insert(self, limit_bytes):
        assert not self.inserted
        self.inserted, self.refused = limit_bytes, 0

    def clear(self):
        self.inserted = 0
        return 0

    def stop_when(self, address, value):
        pass

    def peak_bytes(self):
        return 0

    held_peak_bytes = peak_bytes

    def refused_bytes(self):
        return self.refused


@pytest.fixture
def spec(tmp_path):
    write_model(tmp_path, "gcn", zoo.gcn(**ARGS), factory="serve.models.zoo:gcn", args=ARGS)
    return find(tmp_path, "gcn")


@pytest.fixture
def rig():
    found = Rig(warm_up_bytes=ROOM_BYTES)
    found.place.meter = Memory()
    yield found
    found.close()


@pytest.fixture
def runs(monkeypatch, rig):
    """For each run of a model its nodes, the buffer it had, and whether others had to wait."""
    found = []
    inner = LoadedModel.run

    def watched(self, inputs):
        memory, warming = rig.place.meter, rig.device.warming
        found.append((inputs["x"].shape[0], memory.inserted, warming.locked()))
        if memory.refused:
            raise RuntimeError("refused")
        return inner(self, inputs)

    monkeypatch.setattr(LoadedModel, "run", watched)
    return found


def test_a_model_is_warmed_up_in_a_buffer_that_goes_back(rig, spec, runs):
    rig.load(spec)
    of_load = [(buffer, waits) for _, buffer, waits in runs if buffer]
    assert of_load == [(ROOM_BYTES, True)] * 8
    assert not rig.place.meter.inserted
    assert not rig.device.warming.locked()


@pytest.mark.parametrize("refused", [0, 100])
def test_what_does_not_fit_is_not_warmed_up_and_what_fails_is_told(rig, spec, monkeypatch, refused):
    signature = rig.signature_of(spec)

    def fail(self, inputs):
        rig.place.meter.refused = refused
        raise RuntimeError("it does not run")

    monkeypatch.setattr(LoadedModel, "run", fail)
    answer = rig.lane._load(LoadModel("m", spec, signature, "eager"))
    assert isinstance(answer, ModelLoaded) == bool(refused)
    assert not rig.place.meter.inserted


def test_libraries_take_their_workspaces_before_any_model_and_on_both_streams(monkeypatch):
    streams = []
    monkeypatch.setattr(torch, "addmm", lambda bias, *factors: streams.append(bias.shape))
    rig = Rig()
    rig.close()
    assert streams == [(32,)] * 2


def test_what_is_held_beside_the_plan_is_told_before_the_answer_and_once(rig, spec, monkeypatch):
    arena = SimpleNamespace(static_bytes=1000 + spec.weights_bytes, outlived_bytes=0)
    unplanned_bytes = CudaDevice.unplanned_bytes

    def of_this_arena(device):
        hot, place = SimpleNamespace(held_bytes=300), SimpleNamespace(static_bytes=600)
        found = SimpleNamespace(arena=arena, place=place, hot=hot, models=device.models)
        return unplanned_bytes(found)

    monkeypatch.setattr(CudaDevice, "unplanned_bytes", of_this_arena)
    rig.load(spec)
    assert told(rig) == [MemoryTaken(100)]
    monkeypatch.setattr(rig.place.meter, "clear", lambda: arena.outlived_bytes)
    for outlived_bytes, expected in ((50, [MemoryTaken(150)]), (50, []), (0, [])):
        arena.outlived_bytes = outlived_bytes
        rig.place.meter.inserted = 0
        rig.ask()
        assert told(rig) == expected
    arena.static_bytes = 0
    rig.lane.handle(UnloadModel("m"))
    assert told(rig) == [MemoryTaken(0)]


def test_a_captured_run_takes_nothing_of_the_tasks_memory_and_says_so(rig, spec, launches):
    rig.load(spec)
    limits, insert = [], rig.place.meter.insert
    rig.place.meter.insert = lambda limit_bytes: limits.append(limit_bytes) or insert(limit_bytes)
    for _ in range(RECUR):
        rig.ask()
    assert (len(limits), told(rig), launches) == (RECUR, [], [])
    rig.ask()
    assert (len(limits), told(rig), len(launches)) == (RECUR, [TakesLess(5, 0)], 1)

    def refused():
        raise CudaError("cudaGraphLaunch: out of memory (cudaError 2)")

    # What it gave back may be another's by now: it must not be launched in that.
    launches[0].launch = refused
    with pytest.raises(AssertionError, match=r"'out_of_memory', message='its captured run"):
        rig.ask()
    assert (len(limits), told(rig)) == (RECUR, [TakesLess(5, 0)])
    rig.ask()
    assert (len(limits), told(rig)) == (RECUR + 1, [])


def test_a_captured_run_that_takes_little_says_nothing(spec, launches):
    """A word to the scheduler costs more than the memory of most runs is worth."""
    rig = Rig(slab_bytes=1 << 40)
    rig.place.meter = Memory()
    rig.load(spec)
    for _ in range(RECUR + 1):
        rig.ask()
    assert (told(rig), len(launches)) == ([], 1)
    rig.close()


def told(rig):
    """What the lane has said since this was asked last."""
    found = []
    while True:
        try:
            packet = rig.ours.recv(messages.MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return found
        found.append(messages.decode_from_lane(packet))
