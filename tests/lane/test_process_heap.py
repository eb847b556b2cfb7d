"""What lanes keep of freed memory."""

import os
import subprocess
import sys

import pytest

from serve.server.lanes.processes import LANE_ENVIRONMENT

#: 100 MiB in small blocks, freed: what of it is still resident, in MiB, after both heaps tidied up.
FREE = """
from serve.ipc.private_memory import private_bytes
from serve.lane.process_heap import ProcessHeap
small, large = ProcessHeap(16 << 20), ProcessHeap(256 << 20)
for heap in (small, large):
    heap.settle()
before = private_bytes()
blocks = [bytearray(b"x" * (1 << 18)) for _ in range(400)]
top = bytearray(b"x" * (1 << 18))  # what is freed lies below it
del blocks
kept = []
for heap in (large, small):
    heap.give_back()
    kept.append((private_bytes() - before) >> 20)
print(*kept)
"""

#: By how many MiB a block of 64 MiB lets private memory grow.
GROW = """
from serve.ipc.private_memory import private_bytes
before = private_bytes()
block = bytearray(b"x" * (64 << 20))
print((private_bytes() - before) >> 20)
"""


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="not glibc")
def test_freed_pages_are_handed_back_only_beyond_what_may_be_kept():
    environment = {**os.environ, **LANE_ENVIRONMENT}
    told = subprocess.run(
        [sys.executable, "-c", FREE], capture_output=True, text=True, check=True, env=environment
    )
    with_room, without = map(int, told.stdout.split())
    assert with_room > 90
    assert without <= 17


def test_private_memory_grows_by_what_is_written_to():
    """In a process of its own: one that ran other tests may have had the memory before."""
    told = subprocess.run([sys.executable, "-c", GROW], capture_output=True, text=True, check=True)
    assert 60 < int(told.stdout) < 80
