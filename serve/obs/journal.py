"""Writes the journal of the scheduler to a file, on a thread of its own.

What the scheduler said is put on a queue in about a microsecond; encoding and writing happen
elsewhere. A journal with a hole cannot be replayed: when the disk does not keep up or fails, it
ends there, and the log says so; the server goes on. See ``serve.journal`` for the format.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from serve.core.commands import Command
from serve.core.events import Event
from serve.core.params import SchedulerParams
from serve.core.types import Estimate, Nanos, TaskId
from serve.errors import ConfigError
from serve.journal import encode_header, encode_left, encode_step

_log = logging.getLogger(__name__)

#: Calls held for a disk that does not keep up; with more, the journal ends.
MAX_WAITING = 100_000
#: What is written within this time goes to the file together.
_GATHER_S = 0.1

#: When, what the scheduler was told or whose answer left, and what the scheduler said.
_Row = tuple[int, Event | TaskId, Sequence[Command], Sequence[Estimate | None]]


class JournalWriter:
    """Takes one scheduler's calls from under its lock, in order."""

    def __init__(self, path: Path) -> None:
        """Make the file, or empty the one there is; raises ConfigError when that is impossible."""
        self.path = path
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
        self._ended = False
        #: Heard of unions since the last step.
        self._unions: list[Estimate | None] = []
        self._closing = threading.Event()
        self._queue: SimpleQueue[_Row | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def begin(self, params: SchedulerParams) -> SchedulerParams:
        """Write the header, before anything else; the parameters to give the scheduler.

        They are `params`, but what the scheduler hears of unions is written down too.
        """
        self._write(encode_header(params))
        told = params.unions
        if told is None:
            return params

        def heard(model: str, sizes: Sequence[tuple[int, int]]) -> Estimate | None:
            answer = told(model, sizes)
            self._unions.append(answer)
            return answer

        return replace(params, unions=heard)

    def step(self, at_ns: Nanos, event: Event, commands: Sequence[Command]) -> None:
        """The scheduler was told `event` and answered `commands`."""
        unions, self._unions = self._unions, []
        self._put((at_ns, event, commands, unions))

    def left(self, at_ns: int, task_id: TaskId) -> None:
        """The task's answer was handed to the transport. Any thread."""
        self._put((at_ns, task_id, (), ()))

    def close(self) -> None:
        """Write everything put before this call. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._queue.put(None)
        self._thread.join()

    def _put(self, row: _Row) -> None:
        if self._ended:
            return
        if self._queue.qsize() >= MAX_WAITING:
            self._ended = True
            _log.error("journal %s ends here: the disk does not keep up", self.path)
            return
        self._queue.put(row)

    def _run(self) -> None:
        closed = False
        with self._file:
            while not (closed or self._ended):
                first = self._queue.get()
                # Collect before writing: few wake-ups beside many requests.
                self._closing.wait(_GATHER_S)
                waiting = self._queue.qsize()
                rows = [first, *(self._queue.get() for _ in range(waiting))]
                closed = rows[-1] is None
                self._write(b"".join(_encode(row) for row in rows if row is not None))

    def _write(self, lines: bytes) -> None:
        if self._ended:
            return
        try:
            self._file.write(lines)
        except OSError as error:
            self._ended = True
            _log.error("journal %s ends here: %s", self.path, error.strerror)


def _encode(row: _Row) -> bytes:
    at_ns, what, commands, unions = row
    if isinstance(what, int):
        return encode_left(at_ns, what)
    return encode_step(at_ns, what, commands, unions)
