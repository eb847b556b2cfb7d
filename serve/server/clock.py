"""The one place the server reads clocks."""

import time

from serve.core.types import Nanos


def now_ns() -> Nanos:
    """Return the monotonic time: the scheduler's clock, shared by all processes of this machine."""
    return Nanos(time.monotonic_ns())


def wall_ns() -> int:
    """Return nanoseconds since the epoch, for records that people read."""
    return time.time_ns()


#: Wall clock − monotonic clock at start. It stays fixed, so that records of one server keep their
#: order when the system's clock is corrected.
_WALL_OFFSET_NS = time.time_ns() - time.monotonic_ns()


def wall_of(monotonic_ns: int) -> int:
    """Return the wall clock at a moment of the monotonic clock, ns since the epoch."""
    return monotonic_ns + _WALL_OFFSET_NS
