"""The wall clock as records have it: in order while it is corrected, right after it was set."""

import time
from collections.abc import Callable

#: Difference from the wall clock from which on it has been set, not corrected.
_STEP_NS = 1_000_000_000


class WallClock:
    """Tells the wall clock at moments of the monotonic clock.

    Their difference stays while the system's clock is corrected little by little, so that records
    of one server keep their order, and follows when the clock is set.
    """

    def __init__(
        self,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        *,
        doubts_ns: int = 0,
    ) -> None:
        """Read both clocks.

        Args:
            wall_ns: Returns nanoseconds since the epoch.
            monotonic_ns: Returns the nanoseconds of a clock that nobody sets.
            doubts_ns: A clock that is set ahead is followed when it has stayed so for this long.
        """
        self._wall_ns, self._monotonic_ns = wall_ns, monotonic_ns
        self._doubts_ns = doubts_ns
        self._offset_ns = wall_ns() - monotonic_ns()
        #: Moment at which the clock was first seen ahead; None while it is not.
        self._ahead_since_ns: int | None = None

    def of(self, moment_ns: int) -> int:
        """Return the wall clock at a moment of the monotonic clock, ns since the epoch."""
        self.follow()
        return moment_ns + self._offset_ns

    def now_ns(self) -> int:
        """Return the wall clock now, ns since the epoch."""
        return self.of(self._monotonic_ns())

    def follow(self) -> int:
        """Return by how many ns the clock has been set since it was last followed; 0 for not."""
        now_ns = self._monotonic_ns()
        offset_ns = self._wall_ns() - now_ns
        step_ns = offset_ns - self._offset_ns
        if step_ns > _STEP_NS and self._doubts_ns:
            if self._ahead_since_ns is None:
                self._ahead_since_ns = now_ns
            if now_ns - self._ahead_since_ns < self._doubts_ns:
                return 0
        self._ahead_since_ns = None
        if abs(step_ns) <= _STEP_NS:
            return 0
        self._offset_ns = offset_ns
        return step_ns
