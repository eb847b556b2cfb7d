"""Whether there is CUDA: every answer a machine may give, and NVML that fails."""

import logging
from types import SimpleNamespace

import pytest

from serve.config import DeviceConfig
from serve.cuda import probe
from serve.cuda.probe import Gpu, NoCuda, find_gpus
from serve.errors import ConfigError
from serve.runtime import device
from serve.runtime.device import find_device

GPU = Gpu(0, "H", "u-1", 80 << 30, 81 << 30)
SAID = f'noise\nfound [[0, "H", "u-1", {80 << 30}, {81 << 30}]]\n'


class Nvml:
    """A driver's library that knows one device, or fails at some call."""

    def __init__(self, free_bytes: int = 0, fails: str = "") -> None:
        self.free_bytes, self.fails, self.open = free_bytes, fails, 0

    def __getattr__(self, name: str):
        def call(*arguments):
            if name == self.fails:
                raise OSError(f"{name} is not supported")
            self.open += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
            if name == "nvmlDeviceGetHandleByUUID":
                assert arguments == ("GPU-u-1",)
            return SimpleNamespace(free=self.free_bytes)

        return call


@pytest.fixture
def _built(monkeypatch):
    monkeypatch.setattr(probe, "library_path", lambda _: "/there")


def test_this_build_of_torch_is_read_without_importing_it():
    import torch

    assert probe._cuda_of_torch() == torch.version.cuda


def test_a_torch_without_cuda_is_no_trouble():
    with pytest.raises(NoCuda, match="torch is built without it") as found:
        find_gpus(lambda: None)
    assert found.value.level == logging.INFO


def test_a_library_that_was_not_built_is_named(monkeypatch):
    monkeypatch.setattr(probe, "library_path", lambda _: None)
    with pytest.raises(NoCuda, match=r"libgnnserve_cuda\.so was not built"):
        find_gpus(lambda: "13.0")


@pytest.mark.usefixtures("_built")
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Traceback\nRuntimeError: no driver\n", "RuntimeError: no driver"),
        ("", "said nothing"),
        ("found []", "there is no device"),
    ],
)
def test_why_cuda_fails_is_told(said, reason):
    with pytest.raises(NoCuda, match=reason) as found:
        find_gpus(lambda: "13.0", lambda: said)
    assert found.value.level == logging.WARNING


@pytest.mark.usefixtures("_built")
def test_free_memory_is_the_drivers_number():
    nvml = Nvml(free_bytes=79 << 30)
    (gpu,) = find_gpus(lambda: "13.0", lambda: SAID, nvml)
    assert gpu.free_bytes == 79 << 30
    assert nvml.open == 0


@pytest.mark.usefixtures("_built")
@pytest.mark.parametrize(
    "fails", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo"]
)
def test_nvml_may_fail_at_any_call(fails):
    nvml = Nvml(fails=fails)
    assert find_gpus(lambda: "13.0", lambda: SAID, nvml) == (GPU,)
    assert nvml.open == 0


def _refuse():
    raise NoCuda("no driver")


def test_auto_falls_back_with_one_line(monkeypatch, caplog):
    monkeypatch.setattr(device, "find_gpus", _refuse)
    found = find_device(DeviceConfig(), spare_lanes=False)
    assert found.name.startswith("cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "no CUDA (no driver): serving on the processor"
    ]


def test_cuda_that_is_asked_for_and_missing_is_an_error(monkeypatch):
    monkeypatch.setattr(device, "find_gpus", _refuse)
    with pytest.raises(ConfigError, match=r"device\.kind: 'cuda': no driver"):
        find_device(DeviceConfig(kind="cuda"), spare_lanes=False)


@pytest.mark.parametrize("kind", ["auto", "cuda"])
def test_a_gpu_is_facts(monkeypatch, kind):
    monkeypatch.setattr(device, "find_gpus", lambda: (GPU,))
    found = find_device(DeviceConfig(kind=kind, lanes=3), spare_lanes=True)
    assert found.name == "cuda: H"
    assert (len(found.lane_cores), found.parallelism, found.can_suspend) == (3, 3, False)
    place = found.place
    assert place is not None
    assert place.name == "cuda:0"
    assert place.calibration_bytes == 8 << 30
    assert found.budget_bytes < place.slab_bytes < GPU.free_bytes - place.calibration_bytes


def test_a_budget_is_kept_to(monkeypatch):
    monkeypatch.setattr(device, "find_gpus", lambda: (GPU,))
    found = find_device(DeviceConfig(memory_budget="16 GiB"), spare_lanes=True)
    place = found.place
    assert place is not None
    assert place.slab_bytes + place.calibration_bytes == 16 << 30
    with pytest.raises(ConfigError, match=r"device\.memory_budget"):
        find_device(DeviceConfig(memory_budget="1 MiB"), spare_lanes=True)


def test_the_processor_is_not_asked_for_cuda(monkeypatch):
    monkeypatch.setattr(device, "find_gpus", lambda: pytest.fail("asked"))
    assert find_device(DeviceConfig(kind="cpu"), spare_lanes=False).place is None
