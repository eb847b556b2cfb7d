"""The one place where a lane reads clocks."""

import time
from pathlib import Path

import torch


def now_ns() -> int:
    """Return monotonic time, the clock of every process of this machine."""
    return time.monotonic_ns()


def work_ns() -> int:
    """Return a clock for timing a model's runs on this processor.

    With one thread it is the thread's processor time: the run's time on a core of its own.
    """
    return time.thread_time_ns() if torch.get_num_threads() == 1 else time.monotonic_ns()


def core_ns() -> tuple[int, int]:
    """Return for how long this thread has had a core, and has waited for one that others had.

    Both are 0 where the kernel does not tell.
    """
    try:
        had, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0, 0
    return int(had), int(waited)
