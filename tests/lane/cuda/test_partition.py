"""Multiprocessors reserved for short runs: which stream a run uses, over calls that are made up."""

from types import SimpleNamespace

import pytest
import torch

from serve.lane.cuda.cuda_queue import Copies, CudaQueue, Pinned
from serve.lane.cuda.partition import Partition
from serve.lane.cuda.queues import HostQueue
from serve.lane.cuda.streams import UNPARTITIONED, StreamKind
from serve.native_cuda import CudaError
from tests.lane.cuda.test_queues import cuda as cuda
from tests.lane.cuda.test_queues import library as library
from tests.lane.cuda.test_recurring_runs import ARGS, RECUR, Rig
from tests.written_models import written_gcn


class Calls:
    """A driver that reserves groups of eight of 132 multiprocessors."""

    def __init__(self, *, refuses=False):
        self.refuses, self.streams = refuses, []

    def partition(self, device, reserved_sms):
        if self.refuses:
            raise CudaError("a green context: operation not supported (cudaError 801)")
        return 4711 + device, -(-reserved_sms // 8) * 8, 132

    def partition_stream(self, context):
        self.streams.append(context)
        return 900 + len(self.streams)


def test_what_is_reserved_is_told(caplog):
    caplog.set_level("INFO")
    assert Partition.open(Calls(), 0, 12) is not None
    assert "16 of 132 multiprocessors are reserved" in caplog.text


def test_nothing_is_reserved_where_nothing_is_asked_or_the_driver_cannot(caplog):
    assert Partition.open(Calls(), 0, 0) is None
    assert caplog.text == ""
    assert Partition.open(Calls(refuses=True), 0, 8) is None
    assert "no multiprocessors are reserved for short runs: a green context" in caplog.text


def test_bounded_runs_have_a_stream_of_the_partition(cuda, library):
    cuda.ExternalStream = lambda handle, device: SimpleNamespace(cuda_stream=handle)
    device, calls, pinned = torch.device("cpu"), Calls(), Pinned(library)
    partition = Partition.open(calls, 1, 8)
    queues = [CudaQueue(device, Copies(device), pinned, partition) for _ in range(2)]
    assert calls.streams == [4712, 4712]
    for number, queue in enumerate(queues, 1):
        assert queue.kinds == tuple(StreamKind)
        with queue.running(StreamKind.BOUNDED):
            assert queue.stream == 900 + number
        with queue.running():
            assert queue.stream < 900
    assert CudaQueue(device, Copies(device), pinned).kinds == UNPARTITIONED


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return written_gcn(tmp_path_factory.mktemp("repository"), ARGS)


@pytest.mark.parametrize("reserved_sms", [0, 8])
def test_a_bounded_run_is_on_its_stream_where_there_is_one(spec, monkeypatch, reserved_sms):
    used = []
    running = HostQueue.running

    def watched(self, kind=StreamKind.ORDINARY):
        used.append(kind)
        return running(self, kind)

    rig = Rig(reserved_sms=reserved_sms)
    try:
        rig.load(spec)
        monkeypatch.setattr(HostQueue, "running", watched)
        rig.ask(bounded=True)
        rig.ask()
        # An urgent run that is to be bounded stays off the reserved part.
        rig.device.urgency.begin(rig.device.urgency.add_lane(), 1000)
        rig.ask(bounded=True, run_ns=10)
        rig.ask(run_ns=10)
        kinds = {shape.kind for shape in rig.place._recurring.replays._asked}
    finally:
        rig.close()
    bounded = StreamKind.BOUNDED if reserved_sms else StreamKind.ORDINARY
    urgent = StreamKind.BOUNDED if reserved_sms else StreamKind.URGENT
    assert used == [bounded, StreamKind.ORDINARY, urgent, StreamKind.URGENT]
    assert kinds == set(used)


def test_a_bounded_run_is_captured_for_its_own_stream(spec):
    rig = Rig(reserved_sms=8)
    try:
        rig.load(spec)
        for _ in range(RECUR):
            rig.ask(bounded=True)
        (shape,) = rig.place._recurring.replays._runs
        assert shape.kind is StreamKind.BOUNDED
    finally:
        rig.close()
