"""The one place the server reads clocks."""

import time

from serve.core.types import Nanos


def now_ns() -> Nanos:
    """Monotonic time; the scheduler's clock, shared by every process of this machine."""
    return Nanos(time.monotonic_ns())


def wall_ns() -> int:
    """Nanoseconds since the epoch, for records that people read."""
    return time.time_ns()
