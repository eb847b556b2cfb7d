"""Calls that were refused before they were requests, counted by reason."""

import threading
from collections import Counter
from collections.abc import Mapping

#: Why; each is a label of the metric from the start, at 0.
NO_THREAD = "no_thread"
NO_MESSAGE = "no_message"
MESSAGE_SIZE = "message_size"
MALFORMED = "malformed"
OPEN_CALLS = "open_calls"
REASONS = NO_THREAD, NO_MESSAGE, MESSAGE_SIZE, MALFORMED, OPEN_CALLS


class Refusals:
    """Counts, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter(dict.fromkeys(REASONS, 0))

    def count(self, reason: str) -> None:
        """One more for `reason`."""
        with self._lock:
            self._counts[reason] += 1

    def counts(self) -> Mapping[str, int]:
        """How many so far, by reason."""
        with self._lock:
            return dict(self._counts)
