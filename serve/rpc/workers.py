"""Threads that run what they are given: made on demand, ended when idle for long."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

_log = logging.getLogger(__name__)

Work = Callable[[], object]

#: How long a thread may have nothing to do before it ends.
IDLE_S = 60.0


class Workers:
    """At most so many threads; work beyond that waits for one of them, if not too much does.

    The thread that has been idle for the shortest time is the first to get work, as what it needs
    is the likeliest to be in the caches (docs/performance.md).
    """

    def __init__(
        self,
        most: int,
        name: str,
        *,
        most_waiting: int | None = None,
        kept: int = 0,
        idle_s: float = IDLE_S,
    ) -> None:
        """Make no thread yet.

        Args:
            most: Threads at once.
            name: What they are called.
            most_waiting: Work that may wait for a thread; None: any amount.
            kept: Threads that stay when they are idle.
            idle_s: How long all others stay.
        """
        self._most = most
        self._most_waiting = most_waiting
        self._name = name
        self._kept = kept
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._threads = 0
        self._waiting: deque[Work] = deque()
        #: Inboxes of idle threads; the last became idle last.
        self._idle: list[SimpleQueue[Work | None]] = []
        self._shut = False
        #: The last attempt to start a thread failed, which was told.
        self._short = False

    def start_kept(self) -> None:
        """Make the threads that are kept, so that they are there when no more can be made."""
        while self._threads < self._kept:
            self._threads += 1
            self._start()

    def give(self, work: Work) -> bool:
        """Have a thread run `work`, at once or when one is free.

        False: `work` is not run, as too much waits already, or as no thread can be started and
        there is none to wait for. Never blocks and never raises.
        """
        with self._lock:
            if self._shut:
                return False
            inbox = self._idle.pop() if self._idle else None
            if inbox is None:
                if self._threads >= self._most and len(self._waiting) == self._most_waiting:
                    return False
                self._waiting.append(work)
                if self._threads >= self._most:
                    return True
                self._threads += 1
        if inbox is not None:
            inbox.put(work)
            return True
        try:
            self._start()
        except Exception as error:  # whatever a system that is short of something says
            return self._do_without(work, error)
        self._short = False
        return True

    def shutdown(self) -> None:
        """Idle threads end now, others when their work is done; none is waited for."""
        with self._lock:
            self._shut = True
            for inbox in self._idle:
                inbox.put(None)
            self._idle.clear()

    def _start(self) -> None:
        threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _do_without(self, work: Work, error: Exception) -> bool:
        """Leave `work` to the threads there are; False: there are none."""
        with self._lock:
            self._threads -= 1
            left = self._threads
            if not left and work in self._waiting:
                self._waiting.remove(work)
                served = False
            else:
                served = True
        if not self._short:
            self._short = True
            _log.error("%s: no thread beside the %d there are: %s", self._name, left, error)
        return served

    def _serve(self) -> None:
        inbox: SimpleQueue[Work | None] = SimpleQueue()
        work = self._next(inbox)
        while True:
            if work is None:
                try:
                    work = inbox.get(timeout=self._idle_s)
                except Empty:
                    if self._may_end(inbox):
                        return
                    continue
                if work is None:
                    return
            try:
                work()
            except BaseException:
                _log.exception("a call ended unexpectedly")
            # What was done is let go of before this waits: it may hold a large message.
            work = None
            work = self._next(inbox)

    def _next(self, inbox: "SimpleQueue[Work | None]") -> Work | None:
        """Work that waits for a thread, or None: this one is idle now."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if self._shut:
                inbox.put(None)
            else:
                self._idle.append(inbox)
            return None

    def _may_end(self, inbox: "SimpleQueue[Work | None]") -> bool:
        """Whether the idle thread of `inbox` is not needed any more; then it counts no longer."""
        with self._lock:
            if inbox not in self._idle or self._threads <= self._kept:
                return False
            self._idle.remove(inbox)
            self._threads -= 1
            return True
