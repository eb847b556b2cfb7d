"""Which runs stay off the part of a device that is reserved for short ones.

A kernel cannot be interrupted, so a short run may wait for the kernels of a long one. A device can
keep a part of itself free of long runs. That costs them the part's share of the speed, so they stay
off it only while short runs are in sight: while one was launched in the last seconds.
"""

from serve.core.types import Nanos

#: A run is long when it takes at least so many times as long as the shortest in sight.
LONG_FACTOR = 8
#: A launched run is in sight for one to two of these.
PERIOD_NS = Nanos(1_000_000_000)
_NONE_NS = 1 << 62


class ReservedPart:
    """Decides for each launch; `is_there` says whether the device has such a part."""

    __slots__ = ("_before_ns", "_began_ns", "_is_there", "_now_ns")

    def __init__(self, *, is_there: bool) -> None:
        self._is_there = is_there
        #: The shortest run launched in this period and in the one before it.
        self._now_ns = self._before_ns = _NONE_NS
        self._began_ns = 0

    def keeps_off(self, run_ns: Nanos, now_ns: Nanos) -> bool:
        """Note the launch of a run; return True when it is to stay off the reserved part."""
        if not self._is_there:
            return False
        passed_ns = now_ns - self._began_ns
        if passed_ns >= PERIOD_NS:
            self._before_ns = self._now_ns if passed_ns < 2 * PERIOD_NS else _NONE_NS
            self._now_ns, self._began_ns = _NONE_NS, now_ns
        self._now_ns = min(self._now_ns, run_ns)
        return run_ns >= LONG_FACTOR * min(self._now_ns, self._before_ns)
