"""The signals of a server: some stop it, some it ignores; a stop that takes too long is forced.

A thread of its own reads them from a pipe that Python's signal handler writes to. So they are
noticed even while the main thread loads a model or waits for a lock.
"""

import logging
import os
import select
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from threading import Event
from typing import NoReturn

from serve.ipc.signals import DRAINING, HANGUP, IGNORED, LEFT_TO_MAIN
from serve.server.clock import now_ns
from serve.threads import Thread

_log = logging.getLogger(__name__)

#: Byte in the pipe for a server that stops without a signal.
_NO_SIGNAL = 0
#: Longest wait for one line of the log.
_LOG_WAIT_S = 1.0


class StopSignals:
    """Tells the main thread when to stop, and ends the process by force when it takes too long."""

    def __init__(
        self,
        on_stop: Callable[[], None],
        limit_s: float,
        unfinished: Callable[[], str],
        before_exit: Callable[[], None],
        reload: Callable[[], None],
    ) -> None:
        """Make the pipe and the thread; `listen` starts it.

        Args:
            on_stop: Called at the first signal to stop; must not block.
            limit_s: Time from the first signal, or from `stop_by_itself`, until the process ends
                by force with exit code 1.
            unfinished: Says what is not done when time is up, for the log.
            before_exit: Called before an end by force, when no other clean-up runs.
            reload: Called at SIGHUP, unless the process has a terminal, which has closed then.
        """
        self._on_stop = on_stop
        #: See above; may change until the stop.
        self.limit_s = limit_s
        self._unfinished = unfinished
        self._before_exit = before_exit
        self._reload = reload
        self._on_terminal = False
        self._stop = Event()
        self._end_ns: int | None = None
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._thread = Thread(target=self._read_signals, name="signals")

    def listen(self) -> None:
        """Handle signals from now on, for the rest of the process. Call it in the main thread."""
        self._on_terminal = _has_terminal()
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in LEFT_TO_MAIN:
            # Under `nohup`, a closed terminal must be ignored.
            if number != HANGUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _do_nothing)
        self._thread.start()

    @property
    def stop_requested(self) -> bool:
        """True once a signal asked for the end."""
        return self._stop.is_set()

    def wait(self) -> None:
        """Wait until a signal asks for the end."""
        self._stop.wait()

    def stop_by_itself(self) -> None:
        """Start the time limit, unless a signal has started it: the server stops by itself."""
        # A full pipe holds signals, the first of which starts the limit as well.
        with suppress(BlockingIOError):
            os.write(self._write_fd, bytes((_NO_SIGNAL,)))

    def _read_signals(self) -> None:
        while (number := self._next()) is not None:
            if number in IGNORED:
                _warn(lambda: f"{signal.Signals(number).name} is ignored")
                continue
            if number == HANGUP and not self._on_terminal:
                _warn(lambda: "SIGHUP: reading configuration, tokens and certificates again")
                self._try(self._reload)
                continue
            if self._end_ns is None:
                self._end_ns = now_ns() + int(self.limit_s * 1e9)
            if number in (*DRAINING, HANGUP):
                self._stop_by(signal.Signals(number))
        self._end_by_force()

    def _next(self) -> int | None:
        """Return the next signal; None when time is up."""
        wait_s = None if self._end_ns is None else max(0.0, (self._end_ns - now_ns()) / 1e9)
        if not select.select([self._read_fd], [], [], wait_s)[0]:
            return None
        return os.read(self._read_fd, 1)[0]

    def _stop_by(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            self._exit(128 + number)
        self._stop.set()
        self._try(self._on_stop)
        _warn(lambda: f"{number.name}: stopping")

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            # A bug must not end this thread, which ends the process when all else fails.
            trace = traceback.format_exc()
            _warn(lambda: trace)

    def _end_by_force(self) -> None:
        limit = f"not stopped within {self.limit_s:g} s, ending by force"
        try:
            _warn(lambda: f"{limit}; {self._unfinished()}")
        finally:
            self._exit(1)

    def _exit(self, code: int) -> NoReturn:
        try:
            self._before_exit()
        finally:
            os._exit(code)


def _has_terminal() -> bool:
    """Return True when the process has a terminal that may close."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _warn(message: Callable[[], str]) -> None:
    """Log a warning within a time limit: the reader of the log may have stopped reading."""
    writer = Thread(target=lambda: _log.warning("%s", message()), name="signal log")
    with suppress(RuntimeError):  # there may be no threads left
        writer.start()
        writer.join(_LOG_WAIT_S)


def _do_nothing(_number: int, _frame: object) -> None:
    """Replace a signal's default effect; the thread reads the signal from the pipe."""
