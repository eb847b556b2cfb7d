"""Messages to the service manager that started the server, by systemd's notification protocol.

The manager listens on the datagram socket in `NOTIFY_SOCKET` and learns when the server is ready,
what it does until then, that it is alive, and that it stops: see sd_notify(3).
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from serve.progress import Progress
from serve.threads import Thread

#: Wait for a manager that does not read, where it must not miss a message.
_PATIENCE_S = 1.0


class ServiceManager:
    """Tells a service manager how the server does; says nothing where none listens."""

    def __init__(
        self, environment: Mapping[str, str], live: Callable[[], bool] = lambda: True
    ) -> None:
        """Read where the manager listens, and how often it wants to hear.

        Args:
            environment: `NOTIFY_SOCKET`, a path or an abstract name after `@`; `WATCHDOG_USEC`, the
                longest silence in microseconds, which counts for the process `WATCHDOG_PID`.
            live: False when the server should be restarted: the watchdog then falls silent.
        """
        self._address = environment.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        self._live = live
        self._stopped = threading.Event()
        self._last_status = ""
        self._said_ready = False
        limit_us = environment.get("WATCHDOG_USEC", "")
        mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._period_s = int(limit_us) / 2e6 if limit_us.isdecimal() and mine else 0.0
        self._thread = Thread(target=self._watch, name="service manager")

    def watch(self, progress: Progress) -> Progress:
        """Return a progress that also tells the manager each step of the start."""

        def tell(step: str, fraction: float) -> None:
            self._say_status(step)
            progress(step, fraction)

        return tell

    def ready(self, status: str) -> None:
        """Say that the server serves; `status` is what the manager shows of it.

        From now on it also says that the server is alive, at half the time that the manager waits.
        """
        self._send(f"READY=1\nSTATUS={status}", _PATIENCE_S)
        self._said_ready = True
        if self._address and self._period_s:
            self._thread.start()

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Say that the configuration is being read again, and afterwards that it was."""
        if self._said_ready:
            now_us = time.monotonic_ns() // 1000
            self._send(f"RELOADING=1\nMONOTONIC_USEC={now_us}", _PATIENCE_S)
        try:
            yield
        finally:
            if self._said_ready:
                self._send("READY=1", _PATIENCE_S)

    def stopping(self, status: str) -> None:
        """Say that the server drains."""
        self._said_ready = False
        self._send(f"STOPPING=1\nSTATUS={status}", _PATIENCE_S)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _say_status(self, status: str) -> None:
        if status != self._last_status:
            self._last_status = status
            self._send(f"STATUS={status}")

    def _watch(self) -> None:
        while not self._stopped.wait(self._period_s):
            if self._live():
                self._send("WATCHDOG=1")

    def _send(self, message: str, patience_s: float = 0.0) -> None:
        """Send, unless the manager is gone or does not read for so long."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.settimeout(patience_s)
            out.connect(self._address)
            out.send(message.encode())
