"""A model whose memory depends on what its input says, copied into a repository as `model.py`.

The first feature of the first node, from 16 on, is how many MiB to take besides; no calibration
with random features sees any of it.
"""

import torch
from torch import Tensor

LEAST_MIB = 16.0
_FLOATS_PER_MIB = 1 << 18


class Liar(torch.nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        mib = float(x[0, 0]) if len(x) else 0.0
        if mib >= LEAST_MIB:
            # MiB by MiB and kept: the limit stops it on the way, not at the first step.
            taken = [torch.ones(_FLOATS_PER_MIB) for _ in range(int(mib))]
            out = out + 0.0 * taken[-1][0]
        return out


def build(in_channels: int = 4, out_channels: int = 2) -> Liar:
    return Liar(in_channels, out_channels)
