"""Two models for chaos runs, copied into their repository as `model.py`.

``InPlace`` changes what it is given, so a run that is made again must start from fresh inputs.
``Misbehaving`` does what the first feature of the first node says; other values give an answer.
"""

import os
import signal
import sys
import time

import torch
from torch import Tensor

RAISE, EXIT, CRASH, STOP, SYS_EXIT, HANG = -1001.0, -1002.0, -1003.0, -1004.0, -1005.0, -1006.0
FEATURES, CLASSES = 32, 5


class InPlace(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x += 1
        sent: Tensor = self.linear(x)
        out = sent.index_add(0, edge_index[1], sent[edge_index[0]])
        edge_index.zero_()
        x.zero_()
        return out


class Misbehaving(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        # Where graphs were merged, whichever has a word.
        word = float(x[:, 0].min()) if len(x) else 0.0
        if word == RAISE:
            raise ValueError("told to")
        if word == EXIT:
            os._exit(3)
        if word == CRASH:
            os.kill(os.getpid(), signal.SIGSEGV)
        while word == STOP:  # whoever has it go on
            os.kill(os.getpid(), signal.SIGSTOP)
        if word == SYS_EXIT:
            sys.exit(4)
        while word == HANG:
            time.sleep(0.001)
        out: Tensor = self.linear(x)
        return out


def in_place() -> InPlace:
    return InPlace()


def misbehaving() -> Misbehaving:
    return Misbehaving()
