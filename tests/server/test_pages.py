"""Huge pages: which memory is asked for, and that it is had."""

import subprocess
import sys

import pytest

from serve.server.pages import heap_parts

MIB = 1 << 20
SCRIPT = """
from pathlib import Path
from serve.server.pages import use_huge_pages
keep = [bytes([i % 256]) * 1000 for i in range(30_000)]
huge_bytes = use_huge_pages()
assert all(one == bytes([i % 256]) * 1000 for i, one in enumerate(keep))
words = Path("/proc/self/smaps_rollup").read_text().split()
print(huge_bytes, int(words[words.index("AnonHugePages:") + 1]) * 1024)
"""


def line(start_mib, end_mib, permissions, name=""):
    start, end = (int(place * MIB) for place in (start_mib, end_mib))
    return f"{start:x}-{end:x} {permissions} 00000000 00:00 0 {name}".rstrip() + "\n"


def test_the_heap_is_what_is_private_nameless_and_no_stack():
    page = 4096 / MIB
    maps = [
        line(1, 9, "r-xp", "/usr/lib/libpython3.11.so.1.0"),
        line(11, 17, "rw-p", "[heap]"),  # 12 to 16
        line(20, 28, "rw-s", "/memfd:pool (deleted)"),
        line(28, 32, "rw-p"),  # all
        line(33, 34.5, "rw-p"),  # no whole huge page
        line(40 - page, 40, "---p"),
        line(40, 48, "rw-p"),  # a stack behind its guard
        line(64, 66, "rw-p"),  # what an allocator has taken of its place
        line(66, 128, "---p"),
        line(128, 130, "rw-p"),  # the next such place
    ]
    assert [(start / MIB, end / MIB) for start, end in heap_parts(maps)] == [
        (12, 16),
        (28, 32),
        (64, 66),
        (128, 130),
    ]


def test_what_is_asked_for_is_had_and_unchanged():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    huge_bytes, held_bytes = map(int, run.stdout.split())
    if not huge_bytes:
        pytest.skip("this system collapses no pages")
    assert held_bytes >= huge_bytes >= 16 * MIB
