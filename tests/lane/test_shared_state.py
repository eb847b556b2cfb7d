"""Settings that the models of a process share are as before when they are restored."""

import gc
import os
import sys

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

from serve.lane.shared_state import SharedState


def _leave_a_mode() -> None:
    BaseTorchFunctionMode().__enter__()


def _leave_a_device_below_a_mode() -> None:
    torch.set_default_device("meta")
    _leave_a_mode()


CHANGES = {
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "function modes": _leave_a_mode,
    "device, function modes": _leave_a_device_below_a_mode,
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "grad": lambda: torch._C._set_grad_enabled(False),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "oneDNN": lambda: torch.backends.mkldnn.set_flags(not torch.backends.mkldnn.enabled),
    "garbage collection": gc.disable,
    "recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "switch interval": lambda: sys.setswitchinterval(0.01),
    "folder": lambda: os.chdir("/"),
    "sys.path": lambda: sys.path.append("elsewhere"),
    "environment": lambda: os.environ.update(GNNSERVE_TEST="1"),
}


def facts():
    made = torch.ones(1)
    return (
        made.dtype, made.device, torch.get_num_threads(), torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"),
        torch.is_anomaly_enabled(), torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled, torch._C._len_torch_function_stack(), gc.isenabled(),
        sys.getrecursionlimit(), sys.getswitchinterval(), os.getcwd(), list(sys.path),
        dict(os.environ), os.environ.get("GNNSERVE_TEST"),
    )  # fmt: skip


@pytest.mark.parametrize("names", CHANGES)
def test_what_was_changed_is_restored_and_named(names):
    before, state = facts(), SharedState.of_all()
    try:
        CHANGES[names]()
        # A default device is a mode too, and torch notes that it is deterministic in a variable.
        assert set(names.split(", ")) <= set(state.restore().split(", "))
        assert facts() == before
        assert state.restore() == ""
    finally:
        state.restore()


def test_the_settings_of_torch_are_restored_apart_from_the_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    everything, torchs = SharedState.of_all(), SharedState.of_torch()
    CHANGES["dtype"]()
    os.chdir("/")
    assert torchs.restore() == "dtype"
    assert os.getcwd() == "/"
    assert everything.restore() == "folder"


def test_a_folder_that_is_gone_is_no_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    state = SharedState.of_all()
    os.chdir("gone")
    (tmp_path / "gone").rmdir()
    assert state.restore() == "folder"
    assert os.getcwd() == str(tmp_path)
