"""Threads whose start ends, also where the system has no memory for them."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

#: A thread that has not begun after this time never does; a machine may stand still for a while.
_LIMIT_S = 60.0


class Thread(threading.Thread):
    """A daemon thread. Its `start` raises RuntimeError when the thread cannot begin.

    A new thread needs memory before the first line that it runs. Where there is none it ends, and
    `start` of Python's own class waits for it without end.
    """

    def __init__(self, target: Callable[..., object], name: str, args: Iterable[Any] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        # What `start` waits for and the new thread sets, in all versions of Python.
        self._started = _Begun()

    def run(self) -> None:
        """Run the target, unless `start` has given up before."""
        if not self._started.is_missed:
            super().run()

    def miss(self) -> None:
        """Have `start` give up now; for who hears that the new thread has ended. Idempotent."""
        self._started.miss()


class _Begun(threading.Event):
    """That a thread has begun; else whoever waits for it gives up."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self.is_missed = False

    def set(self) -> None:
        with self._lock:
            super().set()

    def miss(self) -> None:
        with self._lock:
            self.is_missed = not self.is_set()
            super().set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the thread has begun; raises RuntimeError when it does not."""
        if not super().wait(_LIMIT_S if timeout is None else timeout):
            self.miss()
        if self.is_missed:
            self.clear()  # as it was before the start
            raise RuntimeError("can't start new thread: it has not begun, for want of memory")
        return True
