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
from serve.threads import Thread

_log = logging.getLogger(__name__)

_BACK_OFF_FIRST_NS = 50_000_000
_BACK_OFF_MOST_NS = 10_000_000_000
#: Time after which a start that failed for want of threads, descriptors or memory is tried again,
#: and first of those after which one is whose fork server died meanwhile.
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
    #: A process that has ended, None for none, and the time in ns until the next start, None for no
    #: start; None in place of both: the end.
    ended: SimpleQueue[tuple[BaseProcess | None, int | None] | None] = field(
        default_factory=SimpleQueue
    )
    #: Guards that nothing is started and kept once `is_over` is set: no process is wanted any more.
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: threading.Event = field(default_factory=threading.Event)


class Restarts(Generic[RoleT]):
    """Restarts the process of each role when told that it ended."""

    def __init__(self, start: Callable[[RoleT], Started], wake: Callable[[], None]) -> None:
        """`start` may raise; `wake` is called when `taken` has something."""
        self._start, self._wake = start, wake
        self._records: dict[int, _Record] = {}
        self._started: SimpleQueue[tuple[RoleT, Started]] = SimpleQueue()
        self._threads: list[Thread] = []
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
            thread = Thread(target=self._keep, args=(role, record), name=f"restart {name}")
            try:
                thread.start()
            except RuntimeError:
                del self._records[id(role)]
                raise
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        record.started_ns = clock.now_ns()

    def begin(self, role: RoleT, name: str) -> None:
        """Start the first process of the role, which `taken` returns. Never waits.

        Raises RuntimeError when its thread cannot be started.
        """
        if not self._ending.is_set():
            self.began(role, name)
            self._records[id(role)].ended.put((None, 0))

    def end_role(self, role: RoleT) -> None:
        """Have `taken` return no process of the role from the next call on. Never waits."""
        if (record := self._records.get(id(role))) is not None:
            with record.lock:
                record.is_over.set()

    def forget(self, role: RoleT) -> None:
        """End the role's thread once it has reaped the processes that were dismissed."""
        if (record := self._records.pop(id(role), None)) is not None:
            record.ended.put(None)

    def forgive(self, role: RoleT) -> None:
        """Restart the role without back-off next time: its process is not at fault, or was well."""
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
        for record in tuple(self._records.values()):
            record.is_over.set()
            record.ended.put(None)
        for thread in tuple(self._threads):
            thread.join(_END_WAIT_S)
        for _, started in self.taken():
            discard(started)

    def _keep(self, role: RoleT, record: _Record) -> None:
        """Replace the role's processes, one after the other."""
        while (ended := record.ended.get()) is not None:
            process, wait_ns = ended
            reason = "" if process is None else _reaped(process)
            if wait_ns is None or record.is_over.is_set():
                continue
            if process is not None:
                message = "%s: lost (%s); restart in %.2f s"
                _log.warning(message, record.name, reason, wait_ns / 1e9)
            self._start_anew(role, record, wait_ns, is_restart=process is not None)

    def _start_anew(self, role: RoleT, record: _Record, wait_ns: int, *, is_restart: bool) -> None:
        dead_ns = _SHORTAGE_NS
        while not record.is_over.wait(wait_ns / 1e9):
            self.count += is_restart
            try:
                started = self._start(role)
            except Exception as error:  # a system without resources raises various errors
                _log.error("%s: cannot be started: %r", record.name, error)
                wait_ns = _SHORTAGE_NS
                if isinstance(error, EOFError):
                    # The fork server died meanwhile. One that always does costs seconds each time.
                    wait_ns, dead_ns = dead_ns, min(2 * dead_ns, _BACK_OFF_MOST_NS)
                continue
            with record.lock:
                kept = not record.is_over.is_set()
                if kept:
                    self._started.put((role, started))
            if kept:
                self._wake()
            else:
                discard(started)
            return


def _reaped(process: BaseProcess) -> str:
    """Reap the process. Whatever fails in that, its role is started anew."""
    try:
        return processes.reap(process)
    except Exception as error:  # a system without memory raises various errors
        _log.error("a process that ended cannot be reaped: %r", error)
        return "not reaped"


def discard(started: Started) -> None:
    """End a process that nobody needs, and close its channels."""
    process, channels = started
    for channel in channels:
        channel.close()
    processes.kill(process)
    processes.reap(process)
