"""Torch's settings of a whole process; a model that changes them changes others' answers."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TorchState:
    """Settings that every run must find, whatever earlier runs have changed."""

    dtype: torch.dtype
    device: torch.device
    threads: int
    deterministic: bool
    grad: bool

    @classmethod
    def now(cls) -> "TorchState":
        """Return the current settings of this thread."""
        return cls(
            torch.get_default_dtype(),
            torch.empty(0).device,  # ten times as fast as asking for the default
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
        )

    def restore(self) -> str:
        """Restore the settings; returns the changes for the log, empty when there were none."""
        found = TorchState.now()
        if found == self:
            return ""
        pairs: list[tuple[str, Any, Any]] = [
            (name, getattr(self, name), getattr(found, name)) for name in self.__slots__
        ]
        if found.device != self.device:
            torch.set_default_device(self.device)
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.deterministic)
        torch.set_grad_enabled(self.grad)
        return ", ".join(f"{name} {now} was {was}" for name, was, now in pairs if was != now)


def without_onednn() -> None:
    """Have torch do without oneDNN, as all lanes do.

    It compiles a kernel for every new shape and keeps it. That memory is no request's, so a small
    request would pass its limit, and the library does not survive an allocation that fails.
    """
    mkldnn: Any = torch.backends.mkldnn
    mkldnn.set_flags(False)
