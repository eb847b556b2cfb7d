"""Canary: a version on trial, which loses its share when it clearly does worse than the others.

Two shares are watched: of answers that are late, and of requests that fail (or whose answers hold
values that are no finite numbers). Each is taken over the last `WINDOW` ends of the canary and the
last `WINDOW` ends of all others together, once both have at least `LEAST`. The canary is taken back
when the lower bound of its interval lies above the upper bound of theirs: Wilson's intervals of
`Z` = 3 standard deviations, so wide that looking after every end makes few false alarms.
"""

from collections import deque

import msgspec

from serve.wilson import wilson_interval

#: Last ends that count, of the canary and of the others.
WINDOW = 500
#: Ends of each before anything is decided.
LEAST = 30
#: Half width of the intervals, in standard deviations.
Z = 3.0


class RequestEnd(msgspec.Struct, frozen=True):
    """How a request that a version took ended."""

    version: int
    #: It was answered after its target, or its time limit passed.
    late: bool
    #: It has no answer for a reason that lies in the model, or one that holds NaN or infinity.
    failed: bool


class CanaryTakenBack(msgspec.Struct, frozen=True):
    """A canary lost its share."""

    model: str
    version: int
    #: The numbers compared.
    reason: str


class _Ends:
    """The last ends of one side."""

    __slots__ = ("_kept", "failed", "late")

    def __init__(self) -> None:
        self._kept: deque[tuple[bool, bool]] = deque()
        self.late = self.failed = 0

    @property
    def count(self) -> int:
        return len(self._kept)

    def add(self, *, late: bool, failed: bool) -> None:
        self._kept.append((late, failed))
        self.late += late
        self.failed += failed
        if len(self._kept) > WINDOW:
            was_late, was_failed = self._kept.popleft()
            self.late -= was_late
            self.failed -= was_failed


class CanaryWatch:
    """Compares one canary with the other versions of its split; every step is O(1)."""

    __slots__ = ("_canary", "_others", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self._canary, self._others = _Ends(), _Ends()

    def ended(self, end: RequestEnd) -> str:
        """Count an end; return why the canary is to be taken back, empty when it is not."""
        side = self._canary if end.version == self.version else self._others
        side.add(late=end.late, failed=end.failed)
        if min(self._canary.count, self._others.count) < LEAST:
            return ""
        return self._worse("failed", self._canary.failed, self._others.failed) or self._worse(
            "were late", self._canary.late, self._others.late
        )

    def _worse(self, what: str, own: int, of_others: int) -> str:
        own_count, others_count = self._canary.count, self._others.count
        low, _ = wilson_interval(own, own_count, Z)
        _, high = wilson_interval(of_others, others_count, Z)
        if low <= high:
            return ""
        return (
            f"{own} of its last {own_count} requests {what} (at least {low:.1%}), "
            f"{of_others} of {others_count} of the other versions' (at most {high:.1%})"
        )
