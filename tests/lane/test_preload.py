"""The fork server imports what lanes need, and leaves alone what would harm them."""

import subprocess
import sys

COUNT_ASKS = """
import os
import torch

told, parent = os.pipe(), os.getpid()
show = torch._C._show_config

def counted():
    os.write(told[1], b"parent " if os.getpid() == parent else b"child ")
    return show()

torch._C._show_config = counted
import serve.lane.preload
import torch_geometric.typing

assert torch_geometric.typing.NO_MKL == ("USE_MKL=OFF" in show())
print(os.read(told[0], 100).decode())
"""


def test_only_a_child_asks_how_torch_was_built():
    """To answer, torch starts CUDA, which processes that are forked afterwards cannot use."""
    said = subprocess.run(
        [sys.executable, "-c", COUNT_ASKS], check=True, capture_output=True, text=True, timeout=120
    )
    assert set(said.stdout.split()) == {"child"}
