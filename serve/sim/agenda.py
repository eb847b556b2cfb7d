"""What will happen at which time, on a virtual clock."""

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """Things to happen, each at its time; those of one time in the order in which they were put."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._sequence = 0
        #: (time, sequence, what happens, to what).
        self._due: list[tuple[int, int, Callable[[Any], None], Any]] = []

    def put(self, at_ns: int, what: Callable[[Any], None], to: object) -> None:
        """Have `what` happen to `to`."""
        self._sequence += 1
        heapq.heappush(self._due, (at_ns, self._sequence, what, to))

    def happen(self) -> None:
        """Let the next thing happen, which there must be."""
        at_ns, _, what, to = heapq.heappop(self._due)
        self.now_ns = max(self.now_ns, at_ns)
        what(to)

    def advance(self, until_ns: int) -> None:
        """Let everything happen that is due before `until_ns`, which is now then."""
        due = self._due
        while due and due[0][0] < until_ns:
            self.happen()
        self.now_ns = max(self.now_ns, until_ns)
