"""Settings of a process that its models share: whoever changes them changes others' answers.

What a model replaces in torch itself, such as a function, is not among them: looking for that costs
more than most runs. Models that are to be kept from that have lanes of their own.
"""

import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Setting:
    """One setting, how it is read, and how it is set to a value read before."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


#: Torch keeps a thread's default device here; asking for it takes thirty times as long.
_default: Any = torch._GLOBAL_DEVICE_CONTEXT


def _device() -> torch.device | None:
    context = getattr(_default, "device_context", None)
    return None if context is None else context.device


def _deterministic() -> tuple[bool, bool]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _function_modes() -> int:
    return int(torch._C._len_torch_function_stack())


def _leave_function_modes(count: int) -> None:
    while _function_modes() > count:
        torch._C._pop_torch_function_stack()


_onednn: Any = torch.backends.mkldnn

#: Settings of torch; those of a thread belong to the thread that runs models.
_TORCH = (
    _Setting("device", _device, torch.set_default_device),
    # After the device, whose default is such a mode.
    _Setting("function modes", _function_modes, _leave_function_modes),
    _Setting("dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("threads", torch.get_num_threads, torch.set_num_threads),
    _Setting("deterministic", _deterministic, _set_deterministic),
    _Setting("grad", torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting(
        "autocast",
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
    _Setting(
        "anomaly detection",
        torch.is_anomaly_enabled,
        lambda on: torch.autograd.set_detect_anomaly(on),
    ),
    _Setting(
        "matmul precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    _Setting("oneDNN", torch._C._get_mkldnn_enabled, lambda on: _onednn.set_flags(on)),
)


#: Its copy takes a hundredth of the time of the mapping's own.
_environment: dict[bytes, bytes] = os.environb._data  # type: ignore[attr-defined]


def _set_environment(value: dict[bytes, bytes]) -> None:
    os.environb.clear()
    os.environb.update(value)


def _set_garbage_collection(on: bool) -> None:
    (gc.enable if on else gc.disable)()


def _set_path(value: list[str]) -> None:
    sys.path[:] = value


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # it was deleted


def _set_folder(value: str) -> None:
    with suppress(OSError):
        os.chdir(value)


#: Settings of the process that a model's import may have good reason to change, and its runs not.
_PROCESS = (
    _Setting("garbage collection", gc.isenabled, _set_garbage_collection),
    _Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    _Setting("switch interval", sys.getswitchinterval, sys.setswitchinterval),
    _Setting("folder", _folder, _set_folder),
    _Setting("sys.path", lambda: list(sys.path), _set_path),
    _Setting("environment", lambda: _environment.copy(), _set_environment),
)


class SharedState:
    """The settings at one moment."""

    def __init__(self, settings: tuple[_Setting, ...]) -> None:
        self._settings = settings
        self._values = self._read()

    @classmethod
    def of_torch(cls) -> "SharedState":
        """Return torch's settings now."""
        return cls(_TORCH)

    @classmethod
    def of_all(cls) -> "SharedState":
        """Return the settings of torch and of the process now."""
        return cls((*_TORCH, *_PROCESS))

    def restore(self) -> str:
        """Restore the settings; returns the names of those that had changed, empty for none."""
        found = self._read()
        if found == self._values:
            return ""
        changed = []
        for setting, was, now in zip(self._settings, self._values, found, strict=True):
            if was != now:
                changed.append(setting.name)
                setting.write(was)
        return ", ".join(changed)

    def _read(self) -> list[Any]:
        return [setting.read() for setting in self._settings]


def without_onednn() -> None:
    """Have torch do without oneDNN, as all lanes do.

    It compiles a kernel for every new shape and keeps it. That memory is no request's, so a small
    request would pass its limit, and the library does not survive an allocation that fails.
    """
    _onednn.set_flags(False)
