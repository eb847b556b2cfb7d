"""What the server's processes print, read from pipes and written to the log line by line.

A process may print without end: a thread reads everything, at a bounded rate, and the log gets a
bounded number of lines of each process. The others are counted.
"""

import logging
import os
import re
import select
import threading
import time
from contextlib import suppress
from fcntl import fcntl

import msgspec

from serve.ipc.printed import MARK, Said
from serve.threads import Thread
from serve.undecodable import UNDECODABLE

_log = logging.getLogger(__name__)

#: Lines of one pipe that the log takes at once, and a second in the long run.
BURST_LINES, LINES_PER_S = 500, 100
#: Most bytes of a line.
MOST_LINE_BYTES = 8192
#: Longest line with a message of a process's own log.
_MOST_SAID_BYTES = 1 << 16
#: Bytes read in a round of all pipes, and the pause after it: 50 MB/s at most.
_ROUND_BYTES, _ROUND_S = 1 << 18, 0.005
_PIPE_BYTES = 1 << 18
#: Interval of telling how many lines were left out.
_TELL_S = 1.0
#: Bytes that are read of each pipe in the end.
_LAST_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031
#: How lines that name a model go on after the mark, and what such a line counts for.
_NAMING, _NAME_LINES = (b'{"model"', b"{}"), 0.02
_UNEVEN_MARK = re.compile(b"(?<=[^\n])" + MARK)
#: Streams by the order of a process's pipes, with the level of their lines.
_STREAMS = (("stdout", logging.INFO), ("stderr", logging.WARNING))


class PrintedLines:
    """Reads the pipes of any number of processes on one thread."""

    def __init__(self) -> None:
        """Start the thread."""
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._pipes: dict[int, _Pipe] = {}
        self._left_out = 0
        self._closing = threading.Event()
        self._thread = Thread(target=self._run, name="printed-lines")
        self._thread.start()

    @property
    def left_out(self) -> int:
        """Lines that the log did not get so far."""
        return self._left_out + sum(pipe.left_out for pipe in list(self._pipes.values()))

    def open(self, process: str) -> tuple[int, int]:
        """Make pipes for what a process prints; return their ends for its outputs 1 and 2.

        `process` is its name in the log. The caller closes the ends. Raises OSError.
        """
        ends: list[int] = []
        try:
            for stream, level in _STREAMS:
                ours, theirs = os.pipe()
                ends.append(theirs)
                with suppress(OSError):  # beyond what one user may have
                    fcntl(theirs, _F_SETPIPE_SZ, _PIPE_BYTES)
                os.set_blocking(ours, False)
                self._pipes[ours] = _Pipe(ours, process, stream, level)
                self._epoll.register(ours, select.EPOLLIN)
        except OSError:
            for end in ends:
                os.close(end)
            raise
        return ends[0], ends[1]

    def close(self) -> None:
        """Log what was printed before this call, and read no more. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
            self._epoll.close()
            os.close(self._wake_fd)

    def _run(self) -> None:
        while not self._closing.is_set():
            told = any(pipe.untold for pipe in list(self._pipes.values()))
            ready = self._epoll.poll(_TELL_S if told else None)
            pipes = [self._pipes[fd] for fd, _ in ready if fd != self._wake_fd]
            for pipe in pipes:
                self._read(pipe, max(4096, _ROUND_BYTES // len(pipes)))
            for pipe in list(self._pipes.values()):
                pipe.tell_left_out()
            self._closing.wait(_ROUND_S)
        for pipe in list(self._pipes.values()):
            left = _LAST_BYTES
            while left > 0 and (count := self._read(pipe, _ROUND_BYTES)):
                left -= count
            if pipe.fd in self._pipes:
                self._end(pipe)

    def _read(self, pipe: "_Pipe", most_bytes: int) -> int:
        """Log what a pipe holds; return the number of bytes."""
        try:
            data = os.read(pipe.fd, most_bytes)
        except BlockingIOError:
            return 0
        try:
            pipe.take(data)
        except Exception:
            _log.exception("what %s printed was not understood", pipe.process)
        if not data:
            self._end(pipe)
        return len(data)

    def _end(self, pipe: "_Pipe") -> None:
        pipe.end()
        self._epoll.unregister(pipe.fd)
        self._left_out += pipe.left_out
        del self._pipes[pipe.fd]
        os.close(pipe.fd)


class _Pipe:
    """One stream of one process."""

    def __init__(self, fd: int, process: str, stream: str, level: int) -> None:
        self.fd, self.process = fd, process
        self._stream, self._level = stream, level
        self._model = ""
        #: The line that has no end yet; what follows of a line that was too long.
        self._partial = b""
        self._skips = False
        self._lines = float(BURST_LINES)
        self._counted_s = self._told_s = time.monotonic()
        self.left_out = 0
        #: Lines left out since the log was told.
        self.untold = 0

    def take(self, data: bytes) -> None:
        """Log the lines that end in `data`."""
        now_s = time.monotonic()
        self._lines = min(BURST_LINES, self._lines + LINES_PER_S * (now_s - self._counted_s))
        self._counted_s = now_s
        if MARK in data:
            # A message of the log begins a line, whatever was printed before.
            data = _UNEVEN_MARK.sub(b"\n" + MARK, data)
        data = self._partial + data
        self._partial = b""
        start = 0
        if self._skips:
            start = data.find(b"\n") + 1
            self._skips = not start
            if self._skips:
                return
        while (end := data.find(b"\n", start)) >= 0:
            if self._lines < 1:
                start = self._leave_out(data, start)
                break
            self._log_line(data[start:end])
            start = end + 1
        rest = data[start:]
        most_bytes = _MOST_SAID_BYTES if rest.startswith(MARK) else MOST_LINE_BYTES
        if len(rest) > most_bytes:
            self._log_line(rest)
            self._skips = True
        else:
            self._partial = rest

    def end(self) -> None:
        """Log what has no end of line."""
        if self._partial:
            self.take(b"\n")
        self.tell_left_out(at_once=True)

    def tell_left_out(self, *, at_once: bool = False) -> None:
        """Log how many lines were left out, once a second."""
        now_s = time.monotonic()
        if self.untold and (at_once or now_s - self._told_s >= _TELL_S):
            count, self.untold, self._told_s = self.untold, 0, now_s
            text = f"{count} lines were left out, as it prints more than {LINES_PER_S} a second"
            self._emit(__name__, logging.WARNING, text, "", "")

    def _leave_out(self, data: bytes, start: int) -> int:
        """Count the lines from `start` on, which the log does not get; return the last one's end.

        Of those that name a model the last one counts.
        """
        end = data.rfind(b"\n") + 1
        count = data.count(b"\n", start, end)
        if (at := data.rfind(MARK, start, end)) >= 0:
            count -= sum(data.count(MARK + name, start, end) for name in _NAMING)
            said = _said(data[at : data.find(b"\n", at)])
            if said is not None and not said.level:
                self._model = said.model
        self.left_out += count
        self.untold += count
        return end

    def _log_line(self, line: bytes) -> None:
        said = _said(line) if line.startswith(MARK) else None
        if said is not None and not said.level:
            self._model = said.model
            self._lines -= _NAME_LINES
            return
        self._lines -= 1
        if said is not None:
            model = said.model or self._model
            self._emit(said.logger, said.level, said.message, said.exception, model)
            return
        # Progress bars write the same line again and again.
        line = line.strip(b"\r\0").rpartition(b"\r")[2]
        if line:
            text = line[:MOST_LINE_BYTES].decode("utf-8", "backslashreplace")
            text += "…" if len(line) > MOST_LINE_BYTES else ""
            self._emit("output", self._level, text, "", self._model)

    def _emit(self, logger: str, level: int, text: str, trace: str, model: str) -> None:
        """Log a line under a name that need not be a logger's, of which there may be any number."""
        root = logging.getLogger()
        if not root.isEnabledFor(level):
            return
        record = logging.LogRecord(logger, level, "", 0, text, None, None)
        record.exc_text = trace or None
        record.source = self.process
        record.stream = self._stream
        if model:
            record.model = model
        root.handle(record)


def _said(line: bytes) -> Said | None:
    """Return what follows the mark; None when that is not what processes of the server write."""
    try:
        return msgspec.json.decode(line[1:], type=Said)
    except UNDECODABLE:
        return None
