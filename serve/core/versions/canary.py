"""Canary: a version on trial, which loses its share when it clearly does worse than the others.

Two shares are watched: of answers that are late, and of requests that fail (or whose answers hold
values that are no finite numbers). Each is taken over the last `WINDOW` ends of the canary and the
last `WINDOW` ends of all others together. ``comparison`` tells when the canary is taken back.
"""

from collections import deque

import msgspec

from serve.core.versions.comparison import Ends, worse

#: Last ends that count, of the canary and of the others.
WINDOW = 500


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

    __slots__ = ("_kept", "total")

    def __init__(self) -> None:
        self._kept: deque[tuple[bool, bool]] = deque()
        self.total = Ends()

    def add(self, *, late: bool, failed: bool) -> None:
        self._kept.append((late, failed))
        was_late, was_failed = self._kept.popleft() if len(self._kept) > WINDOW else (False, False)
        self.total = Ends(
            len(self._kept),
            self.total.late + late - was_late,
            self.total.failed + failed - was_failed,
        )


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
        return worse(self._canary.total, self._others.total, "the other versions'")
