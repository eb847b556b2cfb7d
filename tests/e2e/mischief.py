"""A model that does what its input says, copied into repositories of tests as `model.py`.

The first feature of the first node is the word; anything else than a word of ``WORDS`` or a
number of seconds above ``SLEEP`` gives a linear layer's answer.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor

#: Run for this much less than the word, in seconds.
SLEEP = 1000.0
RAISE, EXIT, CRASH, DIE_ONCE = -1001.0, -1002.0, -1003.0, -1004.0

_HERE = Path(__file__).parent


class Mischief(torch.nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        word = float(x[0, 0]) if len(x) else 0.0
        if word > SLEEP:
            # Tells the test which process runs it, and that it does.
            (_HERE / f"running.{os.getpid()}").touch()
            time.sleep(word - SLEEP)
            (_HERE / f"running.{os.getpid()}").unlink()
        elif word == RAISE:
            raise ValueError(f"asked to fail at {len(x)} nodes")
        elif word == EXIT:
            os._exit(3)
        elif word == CRASH:
            os.kill(os.getpid(), signal.SIGSEGV)
        elif word == DIE_ONCE and not (_HERE / "died").exists():
            (_HERE / "died").touch()
            os._exit(4)
        out: Tensor = self.linear(x)
        return out


def build(in_channels: int = 4, out_channels: int = 2) -> Mischief:
    return Mischief(in_channels, out_channels)
