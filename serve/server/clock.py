"""The one place the server reads clocks."""

import time

from serve.core.types import Nanos


def now_ns() -> Nanos:
    """Return the monotonic time: the scheduler's clock, shared by all processes of this machine."""
    return Nanos(time.monotonic_ns())


def wall_ns() -> int:
    """Return nanoseconds since the epoch, for records that people read."""
    return time.time_ns()


#: Difference from the wall clock from which on it has been set, not corrected.
_STEP_NS = 1_000_000_000
#: Wall clock − monotonic clock. It stays while the system's clock is corrected little by little, so
#: that records of one server keep their order, and follows when the clock is set.
_wall_offset_ns = time.time_ns() - time.monotonic_ns()


def wall_of(monotonic_ns: int) -> int:
    """Return the wall clock at a moment of the monotonic clock, ns since the epoch."""
    global _wall_offset_ns
    offset_ns = time.time_ns() - time.monotonic_ns()
    if abs(offset_ns - _wall_offset_ns) > _STEP_NS:
        _wall_offset_ns = offset_ns
    return monotonic_ns + _wall_offset_ns
