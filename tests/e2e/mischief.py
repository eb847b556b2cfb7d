"""A model that does what its input says, copied into repositories of tests as `model.py`.

The first feature of the first node is the word, or the largest of them where graphs were merged;
any that means nothing gives a linear layer's answer at once.
"""

import os
import signal
import stat
import time
from contextlib import suppress
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
#: Errors that are none of Python's usual ones, too long for a packet, or cannot be told.
SYS_EXIT, INTERRUPT, LONG, UNTELLABLE, NO_TEXT = -1005.0, -1006.0, -1007.0, -1008.0, -1009.0
#: Sleep for minutes without a look around, the first time.
DOZE_ONCE = -1010.0
#: End the process and leave a child behind; say nonsense to the server.
ORPHAN, GARBAGE = -1013.0, -1014.0
#: Change torch for everybody; say how torch is.
MEDDLE, TELL = -1015.0, -1016.0
#: An output of a row less, or more, than there are nodes.
ROW_LESS, ROW_MORE = -1011.0, -1012.0

_HERE = Path(__file__).parent


class Untellable(Exception):
    def __str__(self) -> str:
        raise SystemExit(5)


_ERRORS = {
    SYS_EXIT: lambda: SystemExit(3),
    INTERRUPT: KeyboardInterrupt,
    LONG: lambda: ValueError("long " * 2_000_000),
    UNTELLABLE: Untellable,
    NO_TEXT: lambda: ValueError("\ud800 \n"),
}


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
        elif word in _ERRORS:
            raise _ERRORS[word]()
        elif word == DOZE_ONCE and not (_HERE / "dozed").exists():
            (_HERE / "dozed").touch()
            time.sleep(600)
        elif word == MEDDLE:
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
            torch.set_num_threads(3)
            torch.use_deterministic_algorithms(True)
            torch._C._set_grad_enabled(True)
        elif word == TELL:
            made = torch.ones(1)
            threads = torch.get_num_threads()
            sure = torch.are_deterministic_algorithms_enabled()
            raise ValueError(f"{made.dtype} {made.device} {threads} {sure}")
        elif word == ORPHAN:
            _leave_a_child()
        elif word == GARBAGE:
            _write_to_all_sockets(b"\xc1 no packet")
        out: Tensor = self.linear(x)
        if word == ROW_LESS:
            return out[1:]
        return torch.cat([out, out[:1]]) if word == ROW_MORE else out


def _leave_a_child() -> None:
    child = os.fork()
    if child:
        (_HERE / f"child.{child}").touch()
        os._exit(7)
    time.sleep(600)
    os._exit(0)


def _write_to_all_sockets(data: bytes) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, data)


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
