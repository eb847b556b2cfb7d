"""What a GPU's process asks of CUDA, and in which thread: over a library that writes it down."""

import mmap
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from serve.ipc.messages import HotSetRef, TableRef
from serve.ipc.setup import DevicePlace, LaneSetup
from serve.lane.cuda import cuda_queue
from serve.lane.cuda import device as device_module
from serve.lane.cuda.device import CudaDevice
from serve.lane.executors import kernels
from tests.processes import wait_for

POOL_BYTES = 1 << 16


class Cuda:
    """Stands in for CUDA as far as a process needs it to start."""

    def __init__(self, monkeypatch):
        self.connections = ""
        #: Whether our kernels were asked for.
        self.kernels = None
        #: Size and device of what was pinned.
        self.pinned = []
        #: For each thread the device it uses.
        self.device_of = {}
        arena = SimpleNamespace(install=lambda: None)
        monkeypatch.setattr(device_module, "CudaLibrary", self._opened)
        monkeypatch.setattr(device_module.DeviceArena, "open", lambda base, size: arena)
        monkeypatch.setattr(kernels, "UNAVAILABLE", "there is no CUDA here")
        monkeypatch.setattr(torch.cuda, "set_device", self._use)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H")
        stream = SimpleNamespace(cuda_stream=1)
        streams = SimpleNamespace(Stream=lambda device, priority=0: stream)
        monkeypatch.setattr(cuda_queue, "_cuda", streams)

    def _opened(self, *, kernels):
        self.kernels = kernels
        return self

    def _use(self, device):
        self.device_of[threading.current_thread().name] = device

    def slab(self, device, size_bytes):
        self.connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
        return 1 << 30

    def register(self, address, size_bytes, device):
        self.pinned.append((size_bytes, device))
        return address

    def route(self, device, up, down):
        assert device == 1
        return 7


@pytest.fixture
def cuda(monkeypatch):
    # Set first, so that it is as before afterwards.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    return Cuda(monkeypatch)


PLACE = DevicePlace("cuda:1", slab_bytes=1 << 30, calibration_bytes=1 << 20)


def opened(place=PLACE):
    """The second GPU's device."""
    setup = LaneSetup("lanes", (), 1, POOL_BYTES, 0, 30, 0, place=place)
    return CudaDevice.open(setup, mmap.mmap(-1, POOL_BYTES))


def test_streams_have_hardware_queues_of_their_own(cuda, monkeypatch):
    opened()
    assert cuda.connections == "32"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "12")
    opened()
    assert cuda.connections == "12"


def test_every_thread_that_asks_cuda_uses_its_process_own_device(cuda):
    """Another one would get a context, of half a gigabyte."""
    device = opened()
    assert cuda.pinned == [(POOL_BYTES, 1)]
    lane = threading.Thread(target=device.open_queue, name="a lane")
    lane.start()
    lane.join()
    # The thread that copies hot rows finds no such table, having opened its queue.
    hot = HotSetRef(1, "/nowhere", 1, 1 << 10)
    device.hot.offer(TableRef("g", 1, "/nowhere", "float32", (1, 1)), hot, lambda said: None)
    wait_for(lambda: "hot rows" in cuda.device_of, "the other thread to use the device")
    second = torch.device("cuda:1")
    assert cuda.device_of == {
        threading.current_thread().name: second, "a lane": second, "hot rows": second,
    }  # fmt: skip


def test_who_calibrates_does_not_pin_what_it_does_not_read(cuda):
    """Pinning takes a second for a gigabyte, for each model anew."""
    opened(PLACE.for_calibration())
    assert cuda.pinned == []


def test_without_kernels_of_ours_torch_is_not_told_of_any(cuda, monkeypatch):
    told = []
    monkeypatch.setattr(kernels, "UNAVAILABLE", "")
    monkeypatch.setattr(device_module, "use_graph_kernels", lambda: told.append("kernels"))
    opened()
    assert (cuda.kernels, told) == (True, ["kernels"])
    opened(replace(PLACE, has_kernels=False))
    assert (cuda.kernels, told) == (False, ["kernels"])
