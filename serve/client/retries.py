"""Time limits of calls, and when a call that failed is made again."""

import random
import time

from serve.client.errors import ClientError, Unavailable

#: Waits before a call is repeated that did not reach a server that takes it; then it fails.
_WAITS_S = (0.1, 0.4, 1.0)
#: A wait is longer by up to this share, so that clients refused together do not return together.
_JITTER = 0.25
#: Longest time limit, in seconds; gRPC adds it to the time of day, in 64 bits of nanoseconds.
_MOST_S = 1e9


class TimeLimit:
    """A time limit that began when this was made."""

    def __init__(self, limit_s: float | None) -> None:
        """Begin a limit of `limit_s` seconds; None for no limit, as is one of decades."""
        self._end_s = None
        if limit_s is not None and limit_s <= _MOST_S:
            self._end_s = time.monotonic() + limit_s

    @property
    def remaining_s(self) -> float | None:
        """Seconds left, at least 0; None for no limit."""
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def within(self, most_s: float | None) -> "TimeLimit":
        """Return a limit that begins now and ends with this one, after `most_s` at the latest."""
        left = [each for each in (self.remaining_s, most_s) if each is not None]
        return TimeLimit(min(left, default=None))


class Attempts:
    """Decides whether one call is made again."""

    def __init__(self, limit: TimeLimit, *, changes: bool = False, repeated: bool = True) -> None:
        """Begin with the first attempt.

        Args:
            limit: No attempt begins after it.
            changes: True for a call that changes the server, which is repeated only after a refusal
                that says when to try again. Without that, it may have been carried out.
            repeated: False to make the call once.
        """
        self._limit, self._changes, self._repeated = limit, changes, repeated
        self._unreachable = 0

    def wait_s(self, failure: ClientError) -> float | None:
        """Return how long to wait before the next attempt; None to give up."""
        if not self._repeated:
            return None
        if failure.retry_after_s is not None:
            wait_s = failure.retry_after_s
        elif (
            isinstance(failure, Unavailable)
            and not self._changes
            and self._unreachable < len(_WAITS_S)
        ):
            wait_s = _WAITS_S[self._unreachable]
            self._unreachable += 1
        else:
            return None
        wait_s *= random.uniform(1.0, 1.0 + _JITTER)
        remaining_s = self._limit.remaining_s
        return wait_s if remaining_s is None or wait_s < remaining_s else None
