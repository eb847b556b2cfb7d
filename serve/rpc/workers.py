"""Thread pool whose threads are made on demand and end when they are idle for long."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from serve.threads import Thread

_log = logging.getLogger(__name__)

Work = Callable[[], object]

#: Time after which an idle thread ends.
IDLE_S = 60.0


class Workers:
    """Bounded thread pool with a bounded backlog.

    Work goes to the thread that became idle last, since its stack and data are the most likely to
    be in the caches (docs/performance.md).
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
        """Set the limits; no thread is made yet.

        Args:
            most: Most threads at once.
            name: Name of each thread.
            most_waiting: Largest backlog of work without a thread; None for no limit.
            kept: Number of threads that never end for being idle.
            idle_s: Time after which any other idle thread ends.
        """
        self._most = most
        self._most_waiting = most_waiting
        self._name = name
        self._kept = kept
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._threads = 0
        self._waiting: deque[Work] = deque()
        #: Inboxes of idle threads, in the order in which they became idle.
        self._idle: list[SimpleQueue[Work | None]] = []
        self._shut = False
        #: True while threads cannot be started, which is logged once.
        self._short = False

    def allow(self, most: int, most_waiting: int | None) -> None:
        """Set the limits anew; threads beyond them end when they are idle for long."""
        with self._lock:
            self._most, self._most_waiting = most, most_waiting

    def start_kept(self) -> None:
        """Start the kept threads now, so that they exist when the system can start no more."""
        while self._threads < self._kept:
            self._threads += 1
            self._start()

    def give(self, work: Work) -> bool:
        """Have a thread run `work`, at once or when one is free; never blocks and never raises.

        Returns False when `work` will not run: the backlog is full, the pool is shut down, or no
        thread exists and none can be started.
        """
        with self._lock:
            if self._shut:
                return False
            inbox = self._idle.pop() if self._idle else None
            if inbox is None:
                if self._threads >= self._most and self._backlog_full:
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
        except Exception as error:  # a system without resources raises various errors
            return self._do_without(work, error)
        self._short = False
        return True

    @property
    def _backlog_full(self) -> bool:
        return self._most_waiting is not None and len(self._waiting) >= self._most_waiting

    def shutdown(self) -> None:
        """End idle threads now and all others after their work; waits for none."""
        with self._lock:
            self._shut = True
            for inbox in self._idle:
                inbox.put(None)
            self._idle.clear()

    def _start(self) -> None:
        Thread(target=self._serve, name=self._name).start()

    def _do_without(self, work: Work, error: Exception) -> bool:
        """Leave `work` to the existing threads; returns False when there are none."""
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
            _log.error(
                "%s: cannot start a thread beside the %d running: %s", self._name, left, error
            )
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
            # Drop the finished work before waiting, as it may hold a large message.
            work = None
            work = self._next(inbox)

    def _next(self, inbox: "SimpleQueue[Work | None]") -> Work | None:
        """Return waiting work; returns None after marking the thread of `inbox` idle."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if self._shut:
                inbox.put(None)
            else:
                self._idle.append(inbox)
            return None

    def _may_end(self, inbox: "SimpleQueue[Work | None]") -> bool:
        """Return True when the idle thread of `inbox` may end, and stop counting it."""
        with self._lock:
            if inbox not in self._idle or self._threads <= self._kept:
                return False
            self._idle.remove(inbox)
            self._threads -= 1
            return True
