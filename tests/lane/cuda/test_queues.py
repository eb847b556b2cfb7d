"""What a lane tells the compiled library and torch about its work on a GPU, in which order.

csrc/tests/copies_test.cpp tests what the library makes of it.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from serve.lane.cuda import cuda_queue
from serve.lane.cuda.cuda_queue import Copies, CudaQueue, Pinned
from serve.lane.cuda.queues import HostQueue, HotRows
from serve.lane.cuda.streams import StreamKind
from serve.native_cuda import GATHER_THREADS, CudaError

HERE = torch.device("cpu")


class Recorder:
    """Stands in for ``torch.cuda``: hands out streams, and keeps the current one."""

    def __init__(self) -> None:
        self.streams: list[SimpleNamespace] = []
        self.current = SimpleNamespace(cuda_stream=0)

    def Stream(self, device=None, priority=0):
        stream = SimpleNamespace(priority=priority, cuda_stream=100 + len(self.streams))
        self.streams.append(stream)
        return stream

    def current_stream(self, device=None):
        return self.current

    def set_stream(self, stream):
        self.current = stream


class Library:
    """Stands in for the compiled library: writes down what it is told and copies at once.

    The device sees pinned memory AWAY from where the host does.
    """

    AWAY = 1 << 40

    def __init__(self) -> None:
        self.said: list[str] = []
        self.fails = ""

    def route(self, device, up, down):
        self.said.append(f"route over {up} and {down}")
        return 7

    def upload(self, route, stream, copies, *, behind):
        self.said.append(f"{len(copies) // 3} up for {stream}{' behind it' if behind else ''}")
        self._copy(copies)

    def download(self, route, stream, copies):
        self.said.append(f"{len(copies) // 3} down from {stream}")
        self._copy(copies)

    def _copy(self, copies):
        for to, source, size_bytes in zip(*[iter(copies)] * 3, strict=True):
            ctypes.memmove(to, source, size_bytes)

    def finish(self, route, stream):
        self.said.append(f"finish {stream}")

    def register(self, address, size_bytes, device):
        return address + self.AWAY

    def unregister(self, address):
        self.said.append("unregistered")

    def gather(self, table, ids, num_rows, row_bytes, out, *, stream, hot, slot_of, most_threads):
        self.said.append(f"gathers on {stream}")
        self.threads = most_threads
        for row in range(num_rows):
            wanted = ctypes.c_int64.from_address(ids + 8 * row).value
            source = table - self.AWAY + wanted * row_bytes
            slot = ctypes.c_int32.from_address(slot_of + 4 * wanted).value if slot_of else -1
            if slot >= 0:
                source = hot + slot * row_bytes
            ctypes.memmove(out + row * row_bytes, source, row_bytes)

    def capture(self, stream):
        self.said.append(f"capture {stream}")

    def end_capture(self, stream):
        self.said.append(f"end_capture {stream}")
        if self.fails == "end_capture":
            raise CudaError("end_capture")
        return 77

    def replay(self, graph, stream):
        self.said.append(f"replay {graph} on {stream}")

    def forget(self, graph):
        self.said.append(f"forget {graph}")


@pytest.fixture
def cuda(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(cuda_queue, "_cuda", recorder)
    return recorder


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def queue(cuda, library):
    """100 and 101 copy up and down; 102 is ordinary, 103 urgent."""
    found = CudaQueue(HERE, Copies(HERE), Pinned(library))
    assert library.said == ["route over 100 and 101"]
    library.said.clear()
    return found


def test_a_lane_has_its_streams_once(queue, cuda):
    for _ in range(40):
        with queue.running(StreamKind.URGENT):
            queue.upload({"x": torch.zeros(1)})
            queue.download([(torch.zeros(1), torch.zeros(1))])
    assert [stream.priority for stream in cuda.streams] == [0, 0, 0, -1]


@pytest.mark.parametrize(("kind", "lane"), [(StreamKind.ORDINARY, 102), (StreamKind.URGENT, 103)])
def test_kernels_are_launched_on_the_lanes_stream_between_its_copies(
    queue, cuda, library, kind, lane
):
    first, second = torch.zeros(3), torch.zeros(2)
    with queue.running(kind):
        assert cuda.current.cuda_stream == lane
        placed = queue.upload({"x": torch.ones(3), "none": torch.ones(0, 4), "y": torch.ones(2)})
        queue.download([(placed["x"] * 2, first), (placed["y"] * 3, second)])
    assert cuda.current.cuda_stream == 0
    assert (first.tolist(), second.tolist()) == ([2.0] * 3, [3.0] * 2)
    assert placed["none"].shape == (0, 4)
    assert library.said == [f"2 up for {lane}", f"2 down from {lane}"]


def test_the_stream_is_left_when_a_run_fails(queue, cuda):
    with pytest.raises(ValueError, match="broken"), queue.running():
        raise ValueError("broken")
    assert cuda.current.cuda_stream == 0


def test_what_a_run_uploads_later_waits_for_what_it_has_launched(queue, library):
    """It may go where kernels that have not run yet are about to read or write."""
    with queue.running():
        queue.upload({"x": torch.ones(3)})
        queue.upload({"y": torch.ones(3)})
    with queue.running():
        queue.fill([])
    assert library.said == ["1 up for 102", "1 up for 102 behind it", "0 up for 102"]


def test_tensors_with_gaps_are_copied_whole(queue):
    source, answer = torch.arange(6.0).view(2, 3).t(), torch.zeros(3, 2)
    with queue.running():
        placed = queue.upload({"x": source})["x"]
        assert torch.equal(placed, source)
        queue.download([(placed.t().contiguous().t(), answer)])
    assert torch.equal(answer, source)


def test_a_place_of_another_size_is_refused(queue, library):
    with queue.running(), pytest.raises(ValueError, match="12 bytes has a place of 16"):
        queue.download([(torch.ones(3), torch.ones(4))])
    assert library.said == []


def test_a_failed_run_is_waited_for(queue, library):
    with queue.running(StreamKind.URGENT):
        queue.finish()
    assert library.said == ["finish 103"]


def test_two_lanes_share_copy_streams_and_nothing_else(cuda, library):
    copies = Copies(HERE)
    for _ in range(2):
        CudaQueue(HERE, copies, Pinned(library))
    assert library.said == ["route over 100 and 101"] * 2
    assert len(cuda.streams) == 2 + 2 * 2


def test_rows_of_pinned_memory_are_gathered_by_the_device(queue, library):
    whole = torch.arange(60.0).view(20, 3)
    queue._pinned.register(whole.data_ptr(), whole.nbytes)
    table, ids = whole[5:], torch.tensor([4, 0, 14, 4])
    expected = HostQueue().gather(table, ids)
    with queue.running(StreamKind.URGENT):
        assert torch.equal(queue.gather(table, ids), expected)
    # On the lane's stream, behind the ids.
    assert library.said == ["1 up for 103", "gathers on 103"]
    slot_of = torch.full((len(table),), -1, dtype=torch.int32)
    slot_of[4] = 0
    hot = HotRows(slot_of, torch.full((1, 3), -1.0))
    with queue.running():
        found = queue.gather(table, ids, hot)
    assert torch.equal(found, HostQueue().gather(table, ids, hot))
    assert (found == -1).all(1).tolist() == [True, False, False, True]
    with queue.running():
        placed = queue.upload({"ids": ids})["ids"]
        library.said.clear()
        assert torch.equal(queue.gather(table, ids, placed=placed), expected)
    assert library.said == ["gathers on 102"]
    assert library.threads == GATHER_THREADS
    with queue.running():
        queue.gather(table, ids, threads=4096)
    assert library.threads == 4096
    queue._pinned.unregister(whole.data_ptr())
    library.said.clear()
    with queue.running():
        assert torch.equal(queue.gather(table, ids, hot), expected)
    assert library.said == ["1 up for 102"]


def test_memory_that_is_pinned_in_part_is_not_read_in_place(library):
    whole = torch.zeros(20, 3)
    pinned = Pinned(library)
    pinned.register(whole.data_ptr(), whole.nbytes - 4)
    assert pinned.seen(whole) is None
    assert pinned.seen(whole[1:19]) == whole.data_ptr() + 12 + Library.AWAY


def test_a_run_is_captured_on_the_lanes_stream_and_launched_behind_its_inputs(queue, library):
    place, answer = torch.zeros(3), torch.zeros(3)
    with queue.running(StreamKind.URGENT):
        run = queue.capture(lambda: (place * 2,))
    assert library.said == ["capture 103", "end_capture 103"]
    library.said.clear()
    with queue.running(StreamKind.URGENT):
        queue.fill([(torch.ones(3), place)])
        run.launch()
        queue.download([(run.outputs[0], answer)])
    run.forget()
    assert place.tolist() == [1.0, 1.0, 1.0]
    assert library.said == ["1 up for 103", "replay 77 on 103", "1 down from 103", "forget 77"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_capture_that_fails_is_ended(queue, library, ends):
    def work():
        raise RuntimeError("operation not permitted when stream is capturing")

    library.fails = "" if ends else "end_capture"
    with queue.running(), pytest.raises(RuntimeError, match="not permitted"):
        queue.capture(work)
    forgotten = ["forget 77"] if ends else []
    assert library.said == ["capture 102", "end_capture 102", *forgotten]
