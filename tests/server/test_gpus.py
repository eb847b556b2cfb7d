"""Whether there is CUDA: every answer a machine may give, and NVML that fails."""

import logging
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from serve.config import Config
from serve.config_device import DeviceConfig
from serve.core.types import LaneId
from serve.errors import ConfigError
from serve.server import device
from serve.server import gpus as probe
from serve.server.device import find_device
from serve.server.gpus import Gpu, NoCuda, find_gpus
from serve.server.scheduling import scheduler_params
from tests.builders import unions_saving

GPU = Gpu(0, "H", "u-1", 80 << 30, 81 << 30)
SAID = f'noise\nfound [[0, "H", "u-1", {80 << 30}, {81 << 30}, "", ""]]\n'

NO_KERNELS = "cuda: H, without kernels"


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


def test_this_build_of_torch_is_read_without_importing_it():
    import torch

    assert probe._cuda_of_torch() == torch.version.cuda


def test_a_torch_without_cuda_is_no_trouble():
    with pytest.raises(NoCuda, match="torch is built without it") as found:
        find_gpus(lambda: None)
    assert found.value.level == logging.INFO


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Traceback\nRuntimeError: no driver\n", "RuntimeError: no driver"),
        ("", "printed nothing"),
        ("found []", "there is no device"),
    ],
)
def test_why_cuda_fails_is_told(said, reason):
    with pytest.raises(NoCuda, match=reason) as found:
        find_gpus(lambda: "13.0", lambda: said)
    assert found.value.level == logging.WARNING


def test_a_cold_machine_has_three_minutes_and_the_log_says_what_it_took(monkeypatch, caplog):
    def never(*_, timeout, **__):
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess, "run", never)
    caplog.set_level(logging.INFO)
    with pytest.raises(NoCuda, match="did not answer within 180 s"):
        find_gpus(lambda: "13.0")
    assert "asking CUDA took" in caplog.text


def test_a_gpu_without_our_kernels_is_used_and_the_log_says_why(caplog):
    """Where nothing was built, where there is no code for it, and where the driver is too old."""
    old = '[1, "T", "u-2", 8, 9, "it cannot use capability 7.5: no kernel image", ""]'
    whole = SAID.strip().removesuffix("]")
    found = find_gpus(lambda: "13.0", lambda: f"{whole}, {old}]", Nvml(fails="nvmlInit"))
    assert found == (GPU, Gpu(1, "T", "u-2", 8, 9, has_kernels=False))
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "T is used without libgnnserve_cuda.so (it cannot use capability 7.5: no kernel image): "
        "models run on PyG's own code, and the host gathers features; see docs/cuda.md"
    ]


def test_a_gpu_that_torch_cannot_use_is_left_out(caplog):
    new = '[1, "B", "u-2", 8, 9, "it was not built", "no kernel image is available"]'
    whole = SAID.strip().removesuffix("]")
    assert find_gpus(lambda: "13.0", lambda: f"{whole}, {new}]", Nvml(fails="nvmlInit")) == (GPU,)
    reason = "B cannot be used: no kernel image is available"
    assert reason in caplog.text
    with pytest.raises(NoCuda, match=reason):
        find_gpus(lambda: "13.0", lambda: f"found [{new}]")


@pytest.mark.parametrize("built", [False, True])
def test_the_probe_tells_what_a_device_lacks(monkeypatch, tmp_path, built):
    """Its process runs here over a torch and libraries that are made up."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    (tmp_path / "ctypes.py").write_text(FAKE_CTYPES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(probe, "library_path", lambda name: name if built else None)
    monkeypatch.setattr(probe, "required_path", lambda name: name)
    found = find_gpus(lambda: "13.0", nvml=Nvml(fails="nvmlInit"))
    without = Gpu(0, "T", "u-0", 8, 9, has_kernels=False)
    assert found == (without, Gpu(1, "T", "u-1", 8, 9, has_kernels=built))
    said = probe._ask()
    reason = "it cannot use capability 7.5: 209" if built else "it was not built"
    assert f'[0, "T", "u-0", 8, 9, "{reason}", ""]' in said
    assert f'{"" if built else reason}", "no kernel image"]' in said


#: Three devices, of which torch cannot use the last.
FAKE_TORCH = """
from types import SimpleNamespace
class zeros:
    def __init__(self, number, device): pass
    def item(self):
        if cuda.now == 2: raise RuntimeError("no kernel image\\nmore about that")
class cuda:
    init = staticmethod(lambda: None)
    device_count = staticmethod(lambda: 3)
    mem_get_info = staticmethod(lambda index: (8, 9))
    @staticmethod
    def set_device(index): cuda.now = index
    @staticmethod
    def get_device_properties(index):
        return SimpleNamespace(name="T", major=7, minor=5, uuid=f"u-{index}")
"""
#: Our kernels run on all devices but the first.
FAKE_CTYPES = """
from types import SimpleNamespace
c_char_p = None
class called(SimpleNamespace):
    def __call__(self, *arguments): return self.answer(*arguments)
def CDLL(path):
    assert path in ("libgnnserve_device.so", "libgnnserve_cuda.so")
    return SimpleNamespace(
        gnnserve_cuda_open=called(answer=lambda: None),
        gnnserve_cuda_error=called(answer=lambda code: str(code).encode()),
        gnnserve_cuda_usable=lambda index: 0 if index else 209,
    )
"""


def test_devices_without_kernels_neither_gather_nor_share_calibrations(monkeypatch):
    for gpu, name in ((GPU, "cuda: H"), (replace(GPU, has_kernels=False), NO_KERNELS)):
        monkeypatch.setattr(device, "find_gpus", lambda gpu=gpu: (gpu,))
        found = find_device(DeviceConfig(), spare_lanes=False)
        assert (found.name, found.gathers) == (name, gpu.has_kernels)
        assert found.places[0].for_calibration().has_kernels is gpu.has_kernels


def test_free_memory_is_the_drivers_number():
    nvml = Nvml(free_bytes=79 << 30)
    (gpu,) = find_gpus(lambda: "13.0", lambda: SAID, nvml)
    assert gpu.free_bytes == 79 << 30
    assert nvml.open == 0


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
    (place,) = found.places
    assert place.name == "cuda:0"
    assert place.calibration_bytes == 8 << 30
    assert found.budget_bytes < place.slab_bytes < GPU.free_bytes - place.calibration_bytes


def test_more_lanes_than_a_gpu_has_streams_are_refused(monkeypatch):
    monkeypatch.setattr(device, "find_gpus", lambda: (GPU,))
    assert len(find_device(DeviceConfig(lanes=28), spare_lanes=False).lane_cores) == 28
    with pytest.raises(ConfigError, match=r"device\.lanes: a GPU has at most 28, got 29"):
        find_device(DeviceConfig(lanes=29), spare_lanes=False)


@pytest.mark.parametrize("budget", [None, "2 GiB"])
def test_what_captured_runs_may_take_is_no_tasks(monkeypatch, budget):
    monkeypatch.setattr(device, "find_gpus", lambda: (GPU,))
    on, off = (
        find_device(
            DeviceConfig(lanes=3, memory_budget=budget, cuda_graphs=choice), spare_lanes=False
        )
        for choice in ("auto", "off")
    )
    assert off.places[0].replay_bytes == 0
    taken_bytes = 3 * on.places[0].replay_bytes
    assert 0 < taken_bytes == off.budget_bytes - on.budget_bytes
    assert taken_bytes <= on.places[0].slab_bytes / 16
    # The calibrator has it always, of a slab of its own: what it finds is kept for both.
    for place in (on.places[0], off.places[0]):
        calibrator = place.for_calibration()
        assert place.replay_bytes <= calibrator.replay_bytes
        assert 0 < calibrator.replay_bytes < calibrator.slab_bytes / 8


def test_reserved_multiprocessors_are_the_schedulers_to_use(monkeypatch):
    """A lane has one stream more then, on which libraries keep memory."""
    monkeypatch.setattr(device, "find_gpus", lambda: (GPU,))
    without, found = (
        find_device(DeviceConfig(lanes=3, reserved_sms=number), spare_lanes=False)
        for number in (0, 8)
    )
    assert found.places[0].reserved_sms == 8
    assert found.places[0].for_calibration().reserved_sms == 0
    assert 2 * found.places[0].static_bytes == 3 * without.places[0].static_bytes
    for each, has_part in ((without, False), (found, True)):
        made = scheduler_params(Config(), each, [(LaneId(0),)], unions_saving(0))
        assert made.device.has_reserved_part is has_part


def gpus(*names):
    return tuple(
        replace(GPU, index=index, name=name, free_bytes=GPU.free_bytes - (index << 30))
        for index, name in enumerate(names)
    )


def test_all_gpus_of_one_model_are_used_and_others_named(monkeypatch, caplog):
    monkeypatch.setattr(device, "find_gpus", lambda: gpus("H", "T", "H"))
    found = find_device(DeviceConfig(lanes=3), spare_lanes=False)
    assert [place.name for place in found.places] == ["cuda:0", "cuda:2"]
    assert (found.count, found.title, len(found.lane_cores)) == (2, "cuda: H × 2", 3)
    assert found.names == ("cuda: H #0", "cuda: H #1")
    # Each as much as the one with the least has.
    assert len({place.slab_bytes for place in found.places}) == 1
    assert found.places[0].slab_bytes < GPU.free_bytes - (2 << 30)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "1 (T)" in warning


@pytest.mark.parametrize(
    ("chosen", "names"), [((2,), ["cuda:2"]), ((2, 0), ["cuda:2", "cuda:0"]), ((1,), ["cuda:1"])]
)
def test_the_configuration_chooses_gpus(monkeypatch, chosen, names):
    monkeypatch.setattr(device, "find_gpus", lambda: gpus("H", "T", "H"))
    found = find_device(DeviceConfig(gpus=chosen), spare_lanes=False)
    assert [place.name for place in found.places] == names


@pytest.mark.parametrize(
    ("chosen", "rule"), [((0, 7), r"no GPU \[7\]"), ((0, 1), "0 is H, 1 is T"), ((0, 0), "twice")]
)
def test_a_choice_of_gpus_that_cannot_be_is_an_error(monkeypatch, chosen, rule):
    monkeypatch.setattr(device, "find_gpus", lambda: gpus("H", "T", "H"))
    with pytest.raises(ConfigError, match=rule):
        find_device(DeviceConfig(gpus=chosen), spare_lanes=False)


def test_a_budget_is_kept_to(monkeypatch):
    monkeypatch.setattr(device, "find_gpus", lambda: (GPU,))
    found = find_device(DeviceConfig(memory_budget="16 GiB"), spare_lanes=True)
    (place,) = found.places
    assert place.slab_bytes + place.calibration_bytes == 16 << 30
    with pytest.raises(ConfigError, match=r"device\.memory_budget"):
        find_device(DeviceConfig(memory_budget="1 MiB"), spare_lanes=True)


def test_a_gpu_without_room_for_lanes_is_left_to_others(monkeypatch, caplog):
    """A desktop's may be full; the server would not start there."""
    monkeypatch.setattr(device, "find_gpus", lambda: (replace(GPU, free_bytes=1200 << 20),))
    assert find_device(DeviceConfig(), spare_lanes=False).name.startswith("cpu")
    assert "H has 1258291200 bytes free, of which " in caplog.text
    for config in (DeviceConfig(kind="cuda"), DeviceConfig(lanes=2)):
        with pytest.raises(ConfigError, match="lanes need more for themselves"):
            find_device(config, spare_lanes=False)


def test_the_processor_is_not_asked_for_cuda(monkeypatch):
    monkeypatch.setattr(device, "find_gpus", lambda: pytest.fail("asked"))
    assert find_device(DeviceConfig(kind="cpu"), spare_lanes=False).places == ()
