# ruff: noqa: T201
"""A model that prints, copied into repositories of tests as `model.py`.

The first feature of the first node is `FIRST` plus the number of a deed in `DEEDS`; any other
prints nothing. All get a linear layer's answer.
"""

import ctypes
import logging
import os
import sys
import warnings

import torch
from torch import Tensor

FIRST = 1000
#: Lines of `print_many_lines` and of `print_some_lines`.
MANY, SOME = 1_000_000, 50
_libc = ctypes.CDLL(None)

print("imported")


def print_a_line() -> None:
    print("hello\tfrom Python")


def print_an_error() -> None:
    print("all is \x1b[31mlost", file=sys.stderr)


def print_progress() -> None:
    for percent in range(0, 101, 10):
        sys.stderr.write(f"\r{percent} %")
    sys.stderr.write("\n")


def warn() -> None:
    warnings.warn("this is old", DeprecationWarning, stacklevel=1)
    warnings.warn("this is odd", UserWarning, stacklevel=1)


def log() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("my.model").exception("it failed", extra={"node": 3})


def write_from_c() -> None:
    text = b"straight to a descriptor\n"
    _libc.write(2, text, len(text))
    _libc.puts(b"through the C library")
    _libc.fflush(None)


def print_many_lines() -> None:
    for number in range(MANY):
        print(number)


def print_some_lines() -> None:
    for number in range(SOME):
        print(number, "x" * number)


def print_a_long_line() -> None:
    print("x" * 1_000_000)
    print("after it")


def write_no_text() -> None:
    os.write(1, b"no \xff\xfe text\0\n")
    os.write(2, b'\x1e no record\n\x1e{"level":"x"}\n')


def abort_in_a_line() -> None:
    print("before the end")
    os.write(2, b"half a li")
    os.abort()


def abort_in_c() -> None:
    _libc.__assert_fail(b"1 == 2", b"kernel.cpp", 7, b"run")


DEEDS = [
    print_a_line, print_an_error, print_progress, warn, log, write_from_c, print_many_lines,
    print_a_long_line, write_no_text, abort_in_a_line, abort_in_c, print_some_lines,
]  # fmt: skip


class Printing(torch.nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        number = int(x[0, 0]) - FIRST if len(x) else -1
        if 0 <= number < len(DEEDS):
            DEEDS[number]()
        return self.linear(x)


def build(in_channels: int, out_channels: int) -> torch.nn.Module:
    return Printing(in_channels, out_channels)
