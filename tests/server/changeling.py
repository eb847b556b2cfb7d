"""A model that changes the inputs it is given, copied into a repository of tests as `model.py`.

Where there is a file `die`, `overrun` or `fail` beside it, the next run ends so after the change,
and the file is gone.
"""

import os
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.nn import GraphConv

_HERE = Path(__file__).parent
#: More than is reserved for any graph of the tests, less than their budget.
_TOO_MUCH = 25_000_000


class Changeling(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GraphConv(4, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x += 1
        out = self.conv(x, edge_index)
        edge_index.zero_()
        if _is_told("die"):
            os._exit(6)
        if _is_told("overrun"):
            torch.ones(_TOO_MUCH)
        if _is_told("fail"):
            raise ValueError("asked to fail once")
        return out


def _is_told(what: str) -> bool:
    try:
        (_HERE / what).unlink()
    except FileNotFoundError:
        return False
    return True


def build() -> Changeling:
    return Changeling()
