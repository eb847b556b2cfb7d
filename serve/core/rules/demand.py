"""Overload: was there more work than the lanes could do, or was the order bad?

Work is estimated solo time. Two questions are asked of a task that has ended:

- From its arrival to its end, was there more work of targets no longer than its own, itself
  included, than the lanes could do in that time? Then one of those as urgent had to be late. Work
  of longer targets does not count: it could have waited.
- While it was there, was there a moment when the last `RECENT` arrivals had brought more work than
  the lanes could do in the time they took to come? Then the load was more than the machine can
  carry, in whatever order.
"""

from collections import deque

from serve.core.types import Nanos

#: Arrivals over which the load is taken. Enough to mean something when run times differ widely:
#: at a load of 0.7 it looks like 1 once in a thousand times.
RECENT = 256

#: Targets of one octave fall into 2 ** this classes, so those of one class differ by 1/8 at most.
_FINE_BITS = 3
_CLASSES = 64 << _FINE_BITS
#: So many classes are summed faster one by one than by octaves.
_FEW = 64


def target_class(target_ns: Nanos) -> int:
    """Return the number of the target's class: at least 1, rising with the target."""
    octave = target_ns.bit_length() - 1 - _FINE_BITS
    if octave < 0:
        octave = 0
    at = (octave << _FINE_BITS) + (target_ns >> octave) + 1
    return at if at < _CLASSES else _CLASSES


class WorkByTarget:
    """Sums of work by target class, and by octave, so that a sum up to a class adds up few."""

    __slots__ = ("_classes", "_lowest", "_octaves")

    def __init__(self) -> None:
        self._classes = [0] * (_CLASSES + 1)
        self._octaves = [0] * ((_CLASSES >> _FINE_BITS) + 1)
        #: The first class with work.
        self._lowest = len(self._classes)

    def add(self, at: int, work_ns: int) -> None:
        """Count work of class `at`."""
        self._classes[at] += work_ns
        self._octaves[at >> _FINE_BITS] += work_ns
        if at < self._lowest:
            self._lowest = at

    def up_to(self, at: int) -> int:
        """All work counted so far of classes up to `at`."""
        lowest = self._lowest
        if at - lowest < _FEW:
            return sum(self._classes[lowest : at + 1])
        octave = at >> _FINE_BITS
        return sum(self._octaves[:octave]) + sum(self._classes[octave << _FINE_BITS : at + 1])


class Demand:
    """Work that came and work that left, by target and over the last arrivals."""

    __slots__ = ("_came", "_left", "_over_ns", "_recent", "_total_ns")

    def __init__(self) -> None:
        self._came, self._left = WorkByTarget(), WorkByTarget()
        self._total_ns = 0
        #: (when, all work that had come before) of the last arrivals.
        self._recent: deque[tuple[Nanos, int]] = deque(maxlen=RECENT)
        #: When the last arrivals last brought too much.
        self._over_ns = -1

    def asked(self, work_ns: Nanos, now_ns: Nanos, slots: int) -> bool:
        """Count an arrival, admitted or not; return True when the last ones brought too much."""
        recent = self._recent
        recent.append((now_ns, self._total_ns))
        self._total_ns += work_ns
        since_ns, before_ns = recent[0]
        over = len(recent) == RECENT and self._total_ns - before_ns > slots * (now_ns - since_ns)
        if over:
            self._over_ns = now_ns
        return over

    def came(self, at: int, work_ns: Nanos) -> int:
        """Count an admitted task of class `at`; return the work up to that class that has left."""
        self._came.add(at, work_ns)
        return self._left.up_to(at)

    def left(self, at: int, work_ns: Nanos) -> None:
        """Count the end of a task of class `at`, however it ended."""
        self._left.add(at, work_ns)

    def there_ns(self, at: int) -> int:
        """Return the work up to class `at` that came and has not left."""
        return self._came.up_to(at) - self._left.up_to(at)

    def exceeded(
        self, at: int, left_before_ns: int, arrived_ns: Nanos, now_ns: Nanos, slots: int
    ) -> bool:
        """Return True when the lanes had too much work for a task of class `at` that ends now.

        `left_before_ns`: what `came` said when it arrived.
        """
        if self._over_ns >= arrived_ns:
            return True
        return self._came.up_to(at) - left_before_ns > slots * (now_ns - arrived_ns)
