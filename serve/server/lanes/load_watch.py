"""Watch over lanes that load models when they start: one that hangs or was stopped is ended.

Such a lane takes no requests, so no run of it tells.
"""

import threading
from collections.abc import Callable

from serve.core.types import LaneId
from serve.server import clock
from serve.threads import Thread

_EVERY_S = 1.0


class LoadWatch:
    """Ends lanes that say nothing for long; looks once a second. Any thread."""

    def __init__(self, end: Callable[[LaneId, str], None], limit_s: float) -> None:
        """`end` ends a lane, and is told why; `limit_s` is the time for one model."""
        self._end, self._limit_s = end, limit_s
        self._lock = threading.Lock()
        #: When each lane that loads said its last word.
        self._heard_ns: dict[LaneId, int] = {}
        self._stopping = threading.Event()
        self._thread = Thread(target=self._run, name="lane loads")

    def start(self) -> None:
        """Start the thread; raises RuntimeError when the system has none."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def heard(self, lane_id: LaneId, has_all: bool, *, begins: bool = False) -> bool:
        """Take note of a word of a lane, and return `has_all`: then it is watched no more.

        One that `begins` to load is watched from now on.
        """
        with self._lock:
            if has_all:
                self._heard_ns.pop(lane_id, None)
            elif begins or lane_id in self._heard_ns:
                self._heard_ns[lane_id] = clock.now_ns()
        return has_all

    def look(self) -> None:
        """End the lanes whose last word was too long ago."""
        latest_ns = clock.now_ns() - int(self._limit_s * 1e9)
        with self._lock:
            silent = [lane_id for lane_id, at_ns in self._heard_ns.items() if at_ns < latest_ns]
            for lane_id in silent:
                del self._heard_ns[lane_id]
        for lane_id in silent:
            why = f"a model did not load within server.start_timeout_s = {self._limit_s:g} seconds"
            self._end(lane_id, why)

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self.look()
