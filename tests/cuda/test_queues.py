"""The order a lane gives its work on a GPU, written down by streams and events that do nothing."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from serve.cuda import queues
from serve.cuda.queues import Copies, CudaQueue


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
    monkeypatch.setattr(queues, "_cuda", recorder)
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
        with queue.running(urgent=True):
            queue.upload({"x": torch.zeros(1)})
            queue.download(torch.zeros(1), torch.zeros(1))
    assert [stream.priority for stream in cuda.streams] == [0, 0, 0, -1]


@pytest.mark.parametrize(("urgent", "lane"), [(False, "s2"), (True, "s3")])
def test_work_waits_for_its_copies_and_the_host_for_the_answer_only(queue, cuda, urgent, lane):
    place = torch.zeros(3)
    with queue.running(urgent=urgent):
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
