"""Restarts of processes that ended, with exponential back-off, in a thread for each of them.

Reaping and starting may take seconds: the fork server itself may have to be restarted, under a lock
that every start and reaping needs. No thread that serves requests may wait for that. The threads
exist from the first start on, as the system may be out of them when a process ends.
"""

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from serve.server import clock
from serve.server.lanes import processes

_log = logging.getLogger(__name__)

_BACK_OFF_FIRST_NS = 50_000_000
_BACK_OFF_MOST_NS = 10_000_000_000
#: Time after which a start that failed for want of threads, descriptors or memory is tried again.
_SHORTAGE_NS = 500_000_000
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
    #: A process that has ended, and the time in ns until the next start, None for no start; None in
    #: place of both: the end.
    ended: SimpleQueue[tuple[BaseProcess, int | None] | None] = field(default_factory=SimpleQueue)


class Restarts(Generic[RoleT]):
    """Restarts the process of each role when told that it ended."""

    def __init__(self, start: Callable[[RoleT], Started], wake: Callable[[], None]) -> None:
        """`start` may raise; `wake` is called when `taken` has something."""
        self._start, self._wake = start, wake
        self._records: dict[int, _Record] = {}
        self._started: SimpleQueue[tuple[RoleT, Started]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ending = threading.Event()
        #: Restarts so far, failed ones included.
        self.count = 0

    def began(self, role: RoleT, name: str) -> None:
        """Take note that a process of the role has started.

        Raises RuntimeError when it is the first and its thread cannot be started.
        """
        record = self._records.get(id(role))
        if record is None:
            record = self._records[id(role)] = _Record(name, 0)
            thread = threading.Thread(
                target=self._keep, args=(role, record), name=f"restart {name}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
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
        record.ended.put((process, wait_ns))

    def dismiss(self, role: RoleT, process: BaseProcess) -> None:
        """End and reap a process of the role that nobody needs any more. Never waits."""
        processes.kill(process)
        self._records[id(role)].ended.put((process, None))

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
        for record in self._records.values():
            record.ended.put(None)
        for thread in self._threads:
            thread.join(_END_WAIT_S)
        for _, started in self.taken():
            _discard(started)

    def _keep(self, role: RoleT, record: _Record) -> None:
        """Replace the role's processes, one after the other."""
        while (ended := record.ended.get()) is not None:
            process, wait_ns = ended
            if wait_ns is None:
                processes.reap(process)
            else:
                self._replace(role, record.name, process, wait_ns)

    def _replace(self, role: RoleT, name: str, process: BaseProcess, wait_ns: int) -> None:
        reason = processes.reap(process)
        if self._ending.is_set():
            return
        _log.warning("%s: lost (%s); restart in %.2f s", name, reason, wait_ns / 1e9)
        while not self._ending.wait(wait_ns / 1e9):
            self.count += 1
            try:
                started = self._start(role)
            except Exception as error:  # a system without resources raises various errors
                _log.error("%s: cannot be started: %r", name, error)
                # EOFError: the fork server died meanwhile, which takes seconds to make up for.
                is_dead = isinstance(error, EOFError)
                wait_ns = _BACK_OFF_MOST_NS if is_dead else _SHORTAGE_NS
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
