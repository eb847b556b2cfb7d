"""A model that does what its input says, copied into repositories of tests as `model.py`.

The first feature of the first node is the word, or the largest of them where graphs were merged;
any that means nothing gives a linear layer's answer at once.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor

#: Run for as many seconds as the word is above this,
SLEEP = 1000.0
#: or until there is a file `release` beside the model, or the longest hold has passed.
HOLD = 2000.0
LONGEST_HOLD_S = 600.0
RAISE, EXIT, CRASH, DIE_ONCE = -1001.0, -1002.0, -1003.0, -1004.0
#: As HOLD, and nothing that is raised meanwhile ends it.
DEAF = 3000.0

_HERE = Path(__file__).parent


class Mischief(torch.nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        # Of the graphs that were merged, whichever has a word.
        word = float(x[x[:, 0].abs().argmax(), 0]) if len(x) else 0.0
        if word > SLEEP:
            # Tells the test which process runs it, and that it does.
            running = _HERE / f"running.{os.getpid()}"
            running.touch()
            try:
                _run_for(LONGEST_HOLD_S if word >= HOLD else word - SLEEP, deaf=word == DEAF)
            finally:
                running.unlink()
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


def _run_for(seconds: float, *, deaf: bool) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not (_HERE / "release").exists():
        try:
            time.sleep(0.005)
        except BaseException:
            if not deaf:
                raise


def build(in_channels: int = 4, out_channels: int = 2) -> Mischief:
    return Mischief(in_channels, out_channels)
