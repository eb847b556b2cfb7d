"""The order a lane gives its work on a GPU, written down by streams and events that do nothing."""

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from serve.lane.cuda import cuda_queue
from serve.lane.cuda.cuda_queue import Copies, CudaQueue, Pinned
from serve.lane.cuda.queues import HostQueue, HotRows
from serve.lane.cuda.streams import StreamKind
from serve.native_cuda import CudaError


class Recorder:
    """Stands in for ``torch.cuda``: writes down who was told what."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.streams: list[SimpleNamespace] = []
        self.events = 0

    def Stream(self, device=None, priority=0):
        name = f"s{len(self.streams)}"
        stream = SimpleNamespace(
            name=name,
            priority=priority,
            cuda_stream=100 + len(self.streams),
            wait_event=lambda event: self.said.append(f"{name} waits for {event.name}"),
        )
        self.streams.append(stream)
        return stream

    def Event(self, blocking=False):
        self.events += 1
        name = f"e{self.events}"
        return SimpleNamespace(
            name=name,
            record=lambda stream: self.said.append(f"{stream.name} records {name}"),
            synchronize=lambda: self.said.append(f"host waits for {name}"),
        )

    @contextmanager
    def current(self, stream):
        self.said.append(f"on {stream.name}")
        yield
        self.said.append(f"off {stream.name}")

    @contextmanager
    def device(self, _):
        yield


@pytest.fixture
def cuda(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(cuda_queue, "_cuda", recorder)
    monkeypatch.setattr(torch.cuda, "stream", recorder.current)
    monkeypatch.setattr(torch.cuda, "device", recorder.device)
    return recorder


@pytest.fixture
def queue(cuda):
    """s0 and s1 copy up and down; s2 is ordinary, s3 urgent."""
    device = torch.device("cpu")
    return CudaQueue(device, Copies(device))


def test_a_lane_has_its_streams_once(queue, cuda):
    for _ in range(40):
        with queue.running(StreamKind.URGENT):
            queue.upload({"x": torch.zeros(1)})
            queue.download(torch.zeros(1), torch.zeros(1))
    assert [stream.priority for stream in cuda.streams] == [0, 0, 0, -1]


@pytest.mark.parametrize(("kind", "lane"), [(StreamKind.ORDINARY, "s2"), (StreamKind.URGENT, "s3")])
def test_work_waits_for_its_copies_and_the_host_for_the_answer_only(queue, cuda, kind, lane):
    place = torch.zeros(3)
    with queue.running(kind):
        placed = queue.upload({"x": torch.ones(3)})
        queue.download(placed["x"] * 2, place)
    assert place.tolist() == [2.0, 2.0, 2.0]
    assert cuda.said == [
        f"on {lane}",
        "on s0",
        "s0 records e1",
        "off s0",
        f"{lane} waits for e1",
        f"{lane} records e2",
        "s1 waits for e2",
        "on s1",
        "s1 records e3",
        "off s1",
        "host waits for e3",
        f"off {lane}",
    ]


def test_what_a_run_uploads_later_waits_for_what_it_has_launched(queue, cuda):
    """It may go where kernels that have not run yet are about to read or write."""
    with queue.running():
        queue.upload({"x": torch.ones(3)})
        cuda.said.clear()
        queue.upload({"y": torch.ones(3)})
    up = ["on s0", "s0 records e3", "off s0", "s2 waits for e3", "off s2"]
    assert cuda.said == ["s2 records e2", "s0 waits for e2", *up]
    cuda.said.clear()
    with queue.running():
        queue.fill({}, {})
    assert "s2 records e4" not in cuda.said


def test_a_failed_run_is_waited_for_on_every_stream(queue, cuda):
    with queue.running():
        cuda.said.clear()
        queue.finish()
    waited = [said for said in cuda.said if said.startswith("host")]
    assert waited == ["host waits for e1", "host waits for e2", "host waits for e3"]
    assert {said.split()[0] for said in cuda.said if "records" in said} == {"s0", "s2", "s1"}


def test_two_lanes_share_copy_streams_and_nothing_else(cuda):
    device = torch.device("cpu")
    copies = Copies(device)
    CudaQueue(device, copies)
    CudaQueue(device, copies)
    assert len(cuda.streams) == 2 + 2 * 2


class Bus:
    """Stands in for the compiled library: rows are gathered at the address the device sees."""

    AWAY = 1 << 40

    def __init__(self, said):
        self.said = said

    def register(self, address, size_bytes, device):
        return address + self.AWAY

    def unregister(self, address):
        self.said.append("unregistered")

    def gather(self, table, ids, num_rows, row_bytes, out, *, stream, hot, slot_of):
        self.said.append(f"gathers on {stream}")
        for row in range(num_rows):
            wanted = ctypes.c_int64.from_address(ids + 8 * row).value
            source = table - self.AWAY + wanted * row_bytes
            slot = ctypes.c_int32.from_address(slot_of + 4 * wanted).value if slot_of else -1
            if slot >= 0:
                source = hot + slot * row_bytes
            ctypes.memmove(out + row * row_bytes, source, row_bytes)


def test_rows_of_pinned_memory_are_gathered_by_the_device(cuda):
    device = torch.device("cpu")
    whole = torch.arange(60.0).view(20, 3)
    pinned = Pinned(Bus(cuda.said))
    pinned.register(whole.data_ptr(), whole.nbytes)
    queue = CudaQueue(device, Copies(device), pinned)
    table, ids = whole[5:], torch.tensor([4, 0, 14, 4])
    expected = HostQueue().gather(table, ids)
    cuda.said.clear()
    with queue.running(StreamKind.URGENT):
        assert torch.equal(queue.gather(table, ids), expected)
    # On the lane's stream, which waits for the ids.
    assert cuda.said == [
        "on s3", "on s0", "s0 records e1", "off s0", "s3 waits for e1", "gathers on 103", "off s3",
    ]  # fmt: skip
    slot_of = torch.full((len(table),), -1, dtype=torch.int32)
    slot_of[4] = 0
    hot = HotRows(slot_of, torch.full((1, 3), -1.0))
    with queue.running():
        found = queue.gather(table, ids, hot)
    assert torch.equal(found, HostQueue().gather(table, ids, hot))
    assert (found == -1).all(1).tolist() == [True, False, False, True]
    with queue.running():
        placed = queue.upload({"ids": ids})["ids"]
        cuda.said.clear()
        assert torch.equal(queue.gather(table, ids, placed=placed), expected)
    assert cuda.said == ["gathers on 102", "off s2"]
    pinned.unregister(whole.data_ptr())
    cuda.said.clear()
    with queue.running():
        assert torch.equal(queue.gather(table, ids, hot), expected)
    assert not any(said.startswith("gathers") for said in cuda.said)


def test_memory_that_is_pinned_in_part_is_not_read_in_place(cuda):
    whole = torch.zeros(20, 3)
    pinned = Pinned(Bus(cuda.said))
    pinned.register(whole.data_ptr(), whole.nbytes - 4)
    assert pinned.seen(whole) is None
    assert pinned.seen(whole[1:19]) == whole.data_ptr() + 12 + Bus.AWAY


class Graphs:
    """Stands in for the compiled library's captures."""

    def __init__(self, said):
        self.said, self.fails = said, ""

    def __getattr__(self, name):
        def call(*arguments):
            self.said.append(f"{name} {list(arguments)}")
            if name == self.fails:
                raise CudaError(name)
            return 77

        return call


@pytest.fixture
def graphs(cuda):
    return Graphs(cuda.said)


@pytest.fixture
def capturing(cuda, graphs):
    """s0 and s1 copy up and down; s2 is ordinary, s3 urgent."""
    device = torch.device("cpu")
    return CudaQueue(device, Copies(device), Pinned(graphs))


def test_a_run_is_captured_on_the_lanes_stream_and_launched_behind_its_inputs(capturing, cuda):
    place, answer = torch.zeros(3), torch.zeros(3)
    with capturing.running(StreamKind.URGENT):
        run = capturing.capture(lambda: place * 2)
    cuda.said.clear()
    with capturing.running(StreamKind.URGENT):
        capturing.fill({"x": place}, {"x": torch.ones(3), "other": torch.ones(5)})
        run.launch()
        capturing.download(run.output, answer)
    run.forget()
    assert place.tolist() == [1.0, 1.0, 1.0]
    assert cuda.said == [
        "on s3", "on s0", "s0 records e1", "off s0", "s3 waits for e1", "replay [77, 103]",
        "s3 records e2", "s1 waits for e2", "on s1", "s1 records e3", "off s1", "host waits for e3",
        "off s3", "forget [77]",
    ]  # fmt: skip


@pytest.mark.parametrize("ends", [True, False])
def test_a_capture_that_fails_is_ended(capturing, cuda, graphs, ends):
    def work():
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs.fails = "" if ends else "end_capture"
    with capturing.running():
        cuda.said.clear()
        with pytest.raises(RuntimeError, match="not permitted"):
            capturing.capture(work)
    forgotten = ["forget [77]"] if ends else []
    assert cuda.said == ["capture [102]", "end_capture [102]", *forgotten, "off s2"]


def test_what_is_captured_without_a_library_is_refused(queue):
    with queue.running(), pytest.raises(CudaError, match="no library"):
        queue.capture(lambda: torch.zeros(1))
