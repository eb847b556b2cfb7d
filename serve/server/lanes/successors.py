"""Processes that ended are freed and replaced, each in a thread of its own.

Both may take seconds: the fork server itself may have to be started anew, and whoever waits for it
holds what all others need that start or free a process. Nobody who serves requests may wait for it.
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
#: A process that lived this long starts its back-off anew.
_HEALTHY_AFTER_NS = 30_000_000_000
#: A stop waits so long for a process that is just being started.
_END_WAIT_S = 10.0

#: What a process is for.
RoleT = TypeVar("RoleT")
Started = tuple[BaseProcess, list[socket.socket]]


@dataclass(slots=True)
class _Past:
    """What became of a role's processes so far."""

    name: str
    started_ns: int
    failures: int = 0


class Successors(Generic[RoleT]):
    """For each role whose process ended, the next one, later each time it fails soon."""

    def __init__(self, start: Callable[[RoleT], Started], wake: Callable[[], None]) -> None:
        """`start` raises OSError or EOFError; `wake` is called when `taken` has something."""
        self._start, self._wake = start, wake
        self._past: dict[int, _Past] = {}
        self._started: SimpleQueue[tuple[RoleT, Started]] = SimpleQueue()
        self._threads: dict[int, threading.Thread] = {}
        self._ending = threading.Event()
        #: How often processes were started again.
        self.count = 0

    def began(self, role: RoleT, name: str) -> None:
        """A process of the role is at work."""
        past = self._past.setdefault(id(role), _Past(name, 0))
        past.started_ns = clock.now_ns()

    def forgive(self, role: RoleT) -> None:
        """The role's process ends by no fault of its own: the next starts without back-off."""
        self._past[id(role)].failures = 0

    def follow(self, role: RoleT, process: BaseProcess) -> None:
        """The role's process has ended, or is about to: free it, and start the next. No waiting."""
        past = self._past[id(role)]
        if clock.now_ns() - past.started_ns > _HEALTHY_AFTER_NS:
            past.failures = 0
        wait_ns = min(_BACK_OFF_MOST_NS, _BACK_OFF_FIRST_NS << min(past.failures, 20))
        past.failures += 1
        thread = threading.Thread(
            target=self._replace,
            args=(role, past.name, process, wait_ns),
            name=f"restart {past.name}",
            daemon=True,
        )
        self._threads[id(role)] = thread
        thread.start()

    def taken(self) -> list[tuple[RoleT, Started]]:
        """Those started since; whoever calls owns them."""
        found = []
        while True:
            try:
                found.append(self._started.get_nowait())
            except Empty:
                return found

    def end(self) -> None:
        """Start nothing any more, and free what was started and not taken."""
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
            except (OSError, EOFError) as error:  # EOFError: the fork server died just then
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
