"""Restarts of processes that ended, with exponential back-off, each in a thread of its own.

Reaping and starting may take seconds: the fork server itself may have to be restarted, under a lock
that every start and reaping needs. No thread that serves requests may wait for that.
"""

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from serve.server import clock
from serve.server.lanes import processes

_log = logging.getLogger(__name__)

_BACK_OFF_FIRST_NS = 50_000_000
_BACK_OFF_MOST_NS = 10_000_000_000
#: Lifetime after which a process has its back-off reset.
_HEALTHY_AFTER_NS = 30_000_000_000
#: Time that `end` waits for a start that is under way.
_END_WAIT_S = 10.0

#: Identifies the successive processes of one purpose.
RoleT = TypeVar("RoleT")
#: A process, and our ends of its channels.
Started = tuple[BaseProcess, list[socket.socket]]


@dataclass(slots=True)
class _Record:
    """Restart record of one role."""

    name: str
    started_ns: int
    failures: int = 0


class Restarts(Generic[RoleT]):
    """Restarts the process of each role when told that it ended."""

    def __init__(self, start: Callable[[RoleT], Started], wake: Callable[[], None]) -> None:
        """`start` may raise OSError or EOFError; `wake` is called when `taken` has something."""
        self._start, self._wake = start, wake
        self._records: dict[int, _Record] = {}
        self._started: SimpleQueue[tuple[RoleT, Started]] = SimpleQueue()
        self._threads: dict[int, threading.Thread] = {}
        self._ending = threading.Event()
        #: Restarts so far, failed ones included.
        self.count = 0

    def began(self, role: RoleT, name: str) -> None:
        """Take note that a process of the role has started."""
        record = self._records.setdefault(id(role), _Record(name, 0))
        record.started_ns = clock.now_ns()

    def forgive(self, role: RoleT) -> None:
        """Restart the role without back-off next time: its process ends by no fault of its own."""
        self._records[id(role)].failures = 0

    def restart(self, role: RoleT, process: BaseProcess) -> None:
        """Reap the role's process, which has ended or is ending, and start anew. Never waits."""
        record = self._records[id(role)]
        if clock.now_ns() - record.started_ns > _HEALTHY_AFTER_NS:
            record.failures = 0
        wait_ns = min(_BACK_OFF_MOST_NS, _BACK_OFF_FIRST_NS << min(record.failures, 20))
        record.failures += 1
        thread = threading.Thread(
            target=self._replace,
            args=(role, record.name, process, wait_ns),
            name=f"restart {record.name}",
            daemon=True,
        )
        self._threads[id(role)] = thread
        thread.start()

    def taken(self) -> list[tuple[RoleT, Started]]:
        """Return the processes started since the last call; the caller owns them."""
        found = []
        while True:
            try:
                found.append(self._started.get_nowait())
            except Empty:
                return found

    def end(self) -> None:
        """Start nothing any more, and end processes that were started and not taken."""
        self._ending.set()
        for thread in self._threads.values():
            thread.join(_END_WAIT_S)
        for _, started in self.taken():
            _discard(started)

    def _replace(self, role: RoleT, name: str, process: BaseProcess, wait_ns: int) -> None:
        reason = processes.reap(process)
        if self._ending.is_set():
            return
        _log.warning("%s: lost (%s); restart in %.2f s", name, reason, wait_ns / 1e9)
        while not self._ending.wait(wait_ns / 1e9):
            self.count += 1
            try:
                started = self._start(role)
            except (OSError, EOFError) as error:  # EOFError: the fork server died meanwhile
                _log.error("%s: cannot be started: %r", name, error)
                wait_ns = _BACK_OFF_MOST_NS
                continue
            if self._ending.is_set():
                _discard(started)
            else:
                self._started.put((role, started))
                self._wake()
            return


def _discard(started: Started) -> None:
    process, channels = started
    for channel in channels:
        channel.close()
    processes.kill(process)
    processes.reap(process)
