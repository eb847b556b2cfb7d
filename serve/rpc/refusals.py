"""Counts of calls that the transport refused before they became requests, by reason."""

import threading
from collections import Counter
from collections.abc import Mapping

#: Reasons; each is a label of the metric from the start, with count 0.
NO_THREAD = "no_thread"
NO_MESSAGE = "no_message"
MESSAGE_SIZE = "message_size"
MALFORMED = "malformed"
OPEN_CALLS = "open_calls"
IDLE_STREAM = "idle_stream"
#: It ended before its message was there or was looked at: the client cancelled or gave up.
UNREAD = "unread"
#: See ``serve.access.rules``.
UNAUTHENTICATED, FORBIDDEN = "unauthenticated", "forbidden"
REASONS = (
    NO_THREAD,
    NO_MESSAGE,
    MESSAGE_SIZE,
    MALFORMED,
    OPEN_CALLS,
    IDLE_STREAM,
    UNAUTHENTICATED,
    FORBIDDEN,
    UNREAD,
)
#: Status text of NO_THREAD.
NO_THREAD_TEXT = "no thread is available for this call; try again later"
#: Reasons of the native front besides, by their names there.
FRONT_REASONS = (
    NO_MESSAGE,
    MESSAGE_SIZE,
    MALFORMED,
    "header_size",
    "receiving_bytes",
    "connections",
    "peer_connections",
    "media_type",
    "resets",
    "control_frames",
    "slow_reader",
    "handshake",
    IDLE_STREAM,
    UNREAD,
)


class Refusals:
    """Counts refused calls; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter(dict.fromkeys(REASONS, 0))

    def count(self, reason: str, calls: int = 1) -> None:
        """Add the refusals of so many calls for `reason`."""
        with self._lock:
            self._counts[reason] += calls

    def counts(self) -> Mapping[str, int]:
        """Return the counts so far, by reason."""
        with self._lock:
            return dict(self._counts)
