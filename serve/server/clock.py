"""The one place the server reads clocks."""

import time

from serve.core.types import Nanos
from serve.obs.wall_clock import WallClock

_wall = WallClock()


def now_ns() -> Nanos:
    """Return the monotonic time: the scheduler's clock, shared by all processes of this machine."""
    return Nanos(time.monotonic_ns())


def wall_ns() -> int:
    """Return nanoseconds since the epoch, for records that people read."""
    return time.time_ns()


def wall_of(monotonic_ns: int) -> int:
    """Return the wall clock at a moment of the monotonic clock, ns since the epoch."""
    return _wall.of(monotonic_ns)
