"""Lanes of the GPU benches: what they keep stays out of tasks, and a lane that fails is no result.

The device is made up: its memory is counted, its streams do nothing.
"""

import argparse
import json
import threading
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import concurrency, kit
from bench.gpu.kit import Result, Rig
from bench.gpu.lanes import Lane, at_once, kept_busy
from serve.lane.cuda import cuda_queue
from serve.lane.cuda.cuda_queue import Copies
from serve.lane.cuda.queues import HostQueue
from serve.lane.cuda.streams import StreamKind
from tests.gpu import equality
from tests.lane.cuda.test_queues import Library

WORKSPACE_BYTES = 32 << 20


class Device:
    """Memory by task; a thread's first product on a stream takes something that it keeps."""

    def __init__(self) -> None:
        self.kept: set[tuple[int, int]] = set()
        self.of_thread = threading.local()
        self.count = 0

    def product(self) -> None:
        key = threading.get_ident(), getattr(self.of_thread, "stream", 0)
        if key not in self.kept:
            self.kept.add(key)
            if (memory := getattr(self.of_thread, "memory", None)) is not None:
                memory.live_bytes += WORKSPACE_BYTES


class Memory:
    def __init__(self, device: Device) -> None:
        self.device, self.live_bytes = device, 0

    def insert(self, limit_bytes: int) -> None:
        self.live_bytes, self.device.of_thread.memory = 0, self

    def clear(self) -> int:
        self.device.of_thread.memory = None
        return self.live_bytes


class Streams(HostQueue):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.known, device.count = device, device.count + 2
        self.first = device.count

    @contextmanager
    def running(self, kind=StreamKind.ORDINARY):
        self.known.of_thread.stream = self.first + (kind is StreamKind.URGENT)
        yield
        self.known.of_thread.stream = 0


class Model(torch.nn.Module):
    """A product; `fails` says at which run of all."""

    runs, fails = 0, None

    def __init__(self, *_args, **_sizes) -> None:
        super().__init__()

    def forward(self, x, _edges):
        Model.runs += 1
        if Model.runs == Model.fails:
            raise ArithmeticError("made to fail")
        return torch.mm(x, torch.ones(x.shape[1], 16))


@pytest.fixture
def device(monkeypatch):
    device, real = Device(), torch.mm

    def product(a, b):
        device.product()
        return real(a, b)

    class MadeUp(Rig):
        @classmethod
        def open(cls, slab_bytes, *, dry):
            return cls(True, slab_bytes) if slab_bytes > 1 else Rig(True, 1)

        def queue(self, reserved_sms=0):
            return Streams(device)

        def memory(self):
            return Memory(device)

    for module in (equality, concurrency):
        monkeypatch.setattr(module, "Rig", MadeUp)
    for module in (kit, equality):
        monkeypatch.setattr(module, "MODELS", {"gcn": Model, "gat": Model})
    monkeypatch.setattr(kit, "machine_facts", dict)
    monkeypatch.setattr(kit, "gpu_facts", lambda _: [])
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(Model, "runs", 0)
    return device


def outcome(bench, tmp_path):
    """Exit code and what was written."""
    result = Result("made up", True, tmp_path / "result.json")
    with result.part("all of it"):
        bench.body(result, argparse.Namespace(dry=False, quick=True))
    code = result.finish()
    return code, json.loads((tmp_path / "result.json").read_text())


@pytest.mark.parametrize("bench", [equality, concurrency])
def test_what_libraries_keep_is_in_no_tasks_buffer(device, bench, tmp_path):
    code, found = outcome(bench, tmp_path)
    assert [row for row in found["checks"] if not row["passed"]] == []
    assert code == 0
    by_lane = Counter(thread for thread, stream in device.kept if stream)
    assert set(by_lane.values()) == {2}, "products on both streams of every lane"


def test_a_task_that_leaves_something_behind_fails(device):
    lane = Lane(Streams(device), Memory(device))
    device.kept.clear()
    with pytest.raises(RuntimeError, match=f"has left {WORKSPACE_BYTES} bytes"):
        lane.call(
            lane.run, Model(), {"x": torch.ones(2, 2), "edge_index": torch.ones(2, 2)}, 1 << 30
        )


def test_a_task_runs_in_its_lanes_thread_only(device):
    lane = Lane(Streams(device), Memory(device))
    with pytest.raises(RuntimeError, match="in the lane's thread"):
        lane.run(Model(), {"x": torch.ones(2, 2), "edge_index": torch.ones(2, 2)}, 1 << 30)


def test_a_lane_that_fails_fails_its_part_and_is_not_timed(device, tmp_path, monkeypatch):
    # Of the last lanes, after everything was warm.
    monkeypatch.setattr(Model, "fails", 40)
    code, found = outcome(concurrency, tmp_path)
    failed = [row for row in found["checks"] if not row["passed"]]
    assert code == 1
    assert "ArithmeticError: made to fail" in failed[0]["found"]
    assert not any(key.startswith("lanes") for key in found)


def test_equality_is_not_told_from_some_of_the_models(device, tmp_path, monkeypatch):
    monkeypatch.setattr(Model, "fails", 2)
    _, found = outcome(equality, tmp_path)
    (aim,) = found["aims"]
    assert not aim["reached"]
    assert aim["found"]["models"] == "3 of 4"


def test_all_pieces_end_before_the_failure_of_one_is_raised():
    lanes = [Lane(HostQueue(), None) for _ in range(2)]
    ended = threading.Event()
    failing = lambda: 1 / 0  # noqa: E731
    with pytest.raises(ZeroDivisionError):
        at_once([(lanes[0], failing), (lanes[1], ended.set)])
    assert ended.is_set()
    assert at_once([(lane, lambda: 7) for lane in lanes]) == [7, 7]


def test_what_keeps_a_device_busy_ends_with_its_bench_and_its_failure_is_told():
    lane, runs = Lane(HostQueue(), None), []
    with pytest.raises(KeyError, match="measured"), kept_busy([lane], runs.append):
        raise KeyError("measured")
    lane.call(runs.clear)
    begun = threading.Event()

    def fail(_):
        begun.set()
        raise ArithmeticError("made to fail")

    with pytest.raises(ArithmeticError), kept_busy([lane], fail):
        assert begun.wait(60)
    assert runs == []


@pytest.fixture
def streams(monkeypatch):
    """torch's streams: 32 of a priority, handed out in turn."""
    given = Counter()

    def stream(_device=None, priority=0):
        given[priority] += 1
        return SimpleNamespace(cuda_stream=100 * (1 - priority) + given[priority] % 32)

    fake = SimpleNamespace(Stream=stream, current_stream=lambda _: None, set_stream=lambda _: None)
    monkeypatch.setattr(cuda_queue, "_cuda", fake)


def test_lanes_share_no_stream_with_each_other_or_the_copies(streams):
    here = torch.device("cpu")
    rig = Rig(True, 1, Library(), copies=Copies(here), device=here)
    lanes = rig.lanes(9)
    for count in (2, 9, 4, 8) * 3:
        assert rig.lanes(count) == lanes[:count]
    with pytest.raises(RuntimeError, match="streams are one"):
        rig.lanes(33)
