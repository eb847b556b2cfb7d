"""Background work that stands still while a lane executes on its core.

No scheduling class does that: beside a lane, which has niceness 19 and so weight 15, a process of
class SCHED_IDLE has weight 3, and takes a sixth of the core (17 % were measured).
"""

import os
import signal
from collections.abc import Callable
from threading import Lock


class Yielding:
    """A process group that is stopped and continued."""

    def __init__(self, pid: int, yields: Callable[[], bool]) -> None:
        """`pid` leads the group, now or soon; `yields` says whether it is to stand still now."""
        self._pid = pid
        self._yields = yields
        self._lock = Lock()
        self._stopped = False
        self._ended = False

    def look(self) -> None:
        """Stop the group or let it go on, as it is to be now. Any thread; never blocks for long."""
        with self._lock:
            self._have(stopped=not self._ended and self._yields())

    def end(self) -> None:
        """Let the group go on for good: its number may soon be another's."""
        with self._lock:
            self._ended = True
            self._have(stopped=False)

    def _have(self, *, stopped: bool) -> None:
        if stopped == self._stopped:
            return
        try:
            os.killpg(self._pid, signal.SIGSTOP if stopped else signal.SIGCONT)
        except ProcessLookupError:
            # It is gone, or does not lead the group yet: then the next look stops it.
            return
        self._stopped = stopped
