"""A model that divides by its first feature, copied into a repository of tests as `model.py`."""

import torch
from torch import Tensor


class Divide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.linear(x) / x[:, :1]


class Halves(Divide):
    """Two outputs, one of them in half precision."""

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        out = super().forward(x, edge_index)
        return out, out[:, 0].half()


def build() -> torch.nn.Module:
    return Divide()


def build_halves() -> torch.nn.Module:
    return Halves()
