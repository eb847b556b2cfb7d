"""The one place where a lane reads clocks."""

import time

import torch


def now_ns() -> int:
    """Return monotonic time, the clock of every process of this machine."""
    return time.monotonic_ns()


def work_ns() -> int:
    """Return a clock for timing a model's runs on this processor.

    With one thread it is the thread's processor time: the run's time on a core of its own.
    """
    return time.thread_time_ns() if torch.get_num_threads() == 1 else time.monotonic_ns()
