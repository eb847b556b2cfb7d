"""Writer of the scheduler's journal, on a thread of its own.

Putting a step on the queue takes about a microsecond; the thread encodes and writes it. A journal
with a gap cannot be replayed, and neither can one without its beginning. When it is full, or the
disk fails or falls behind, the journal therefore ends, the log says so, and the server goes on. See
``serve.journal`` for the format.
"""

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from serve.core.commands import Command
from serve.core.events import Event
from serve.core.params import SchedulerParams
from serve.core.types import Nanos, TaskEstimate, TaskId
from serve.errors import ConfigError
from serve.files import private
from serve.journal import encode_header, encode_left, encode_step
from serve.threads import Thread

_log = logging.getLogger(__name__)

#: Most steps that wait for the disk; beyond them the journal ends.
MAX_WAITING = 100_000
#: Steps within this time are written together.
_GATHER_S = 0.1

#: Time, event or id of the task whose answer left, commands, and estimates of unions asked for.
_Row = tuple[int, Event | TaskId, Sequence[Command], Sequence[TaskEstimate | None]]


class JournalWriter:
    """Records the calls of one scheduler, in order; the caller holds the scheduler's lock."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        """Create or empty the file; it ends before `most_bytes`. Raises ConfigError on failure."""
        self.path = path
        self._left_bytes = most_bytes
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file = os.fdopen(private(str(path), flags), "wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
        self._ended = self._full = False
        #: Estimates of unions that the scheduler asked for since the last step.
        self._unions: list[TaskEstimate | None] = []
        self._closing = threading.Event()
        self._queue: SimpleQueue[_Row | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="journal")
        self._thread.start()

    def begin(self, params: SchedulerParams) -> SchedulerParams:
        """Write the header and return the parameters to give to the scheduler.

        They equal `params`, except that estimates of unions are recorded when the scheduler asks.
        """
        self._write(encode_header(params))
        told = params.unions
        if told is None:
            return params

        def heard(model: str, sizes: Sequence[tuple[int, ...]]) -> TaskEstimate | None:
            answer = told(model, sizes)
            self._unions.append(answer)
            return answer

        return replace(params, unions=heard)

    def step(self, at_ns: Nanos, event: Event, commands: Sequence[Command]) -> None:
        """Record that the scheduler handled `event` and returned `commands`."""
        unions, self._unions = self._unions, []
        self._put((at_ns, event, commands, unions))

    def left(self, at_ns: int, task_id: TaskId) -> None:
        """Record that a task's answer was handed to the transport. Thread-safe."""
        self._put((at_ns, task_id, (), ()))

    def close(self) -> None:
        """Write everything recorded before this call, then close the file. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._queue.put(None)
        self._thread.join()

    def _put(self, row: _Row) -> None:
        if self._ended:
            return
        if self._queue.qsize() >= MAX_WAITING:
            self._end("the disk does not keep up")
            return
        self._queue.put(row)

    def _run(self) -> None:
        closed = False
        with self._file:
            while not (closed or self._ended):
                first = self._queue.get()
                # Collect before writing, so that many requests cause few wake-ups.
                self._closing.wait(_GATHER_S)
                waiting = self._queue.qsize()
                rows = [first, *(self._queue.get() for _ in range(waiting))]
                closed = rows[-1] is None
                self._write(b"".join(self._fitting(row for row in rows if row is not None)))

    def _fitting(self, rows: Iterable[_Row]) -> Iterator[bytes]:
        """Yield the lines of rows, up to the first that the file has no room for."""
        for row in rows:
            line = _encode(row)
            if self._left_bytes is not None:
                self._left_bytes -= len(line)
                if self._left_bytes < 0:
                    self._full = True
                    return
            yield line

    def _write(self, lines: bytes) -> None:
        if self._ended:
            return
        try:
            self._file.write(lines)
        except OSError as error:
            self._end(error.strerror or str(error))
        if self._full:
            self._end("it has reached report.journal_size")

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            _log.error("journal %s ends here: %s", self.path, why)


def _encode(row: _Row) -> bytes:
    at_ns, what, commands, unions = row
    if isinstance(what, int):
        return encode_left(at_ns, what)
    return encode_step(at_ns, what, commands, unions)
