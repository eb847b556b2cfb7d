"""A supervised command, seen from whoever wants it: started, or found running, renewed, ended."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from serve.cluster.supervisor import LEASE, LOCK, LOG, VERSION

_POLL_S = 0.05
#: Time for a supervisor to take its lock.
_START_S = 30.0
_MOST_LOG_BYTES = 4000


class Supervised:
    """A command that a supervisor keeps in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        """See what is kept in `folder`, which need not exist."""
        self._folder = folder

    @property
    def pid(self) -> int | None:
        """The supervisor's process id; None when there is none."""
        try:
            with (self._folder / LOCK).open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(lock.read() or 0) or None
        except FileNotFoundError:
            pass
        return None

    @property
    def version(self) -> str:
        """What was said of it when it was started last."""
        try:
            return (self._folder / VERSION).read_text()
        except FileNotFoundError:
            return ""

    def start(self, command: Sequence[str], version: str, lease_s: float) -> None:
        """Start it; raises TimeoutError when its supervisor does not come, OSError."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self._folder / VERSION).write_text(version)
        (self._folder / LOG).unlink(missing_ok=True)
        supervisor = (
            sys.executable,
            "-m",
            "serve.cluster.supervisor",
            str(self._folder),
            f"{lease_s}",
        )
        # Its parent ends at once, so that it is nobody's child: Ray kills those of its workers.
        subprocess.run(
            [sys.executable, "-c", _LAUNCH, *supervisor, "--", *command],
            check=True,
            timeout=_START_S,
        )
        give_up_s = time.monotonic() + _START_S
        while self.pid is None and not self.said():
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"no supervisor in {self._folder} after {_START_S:g} s")
            time.sleep(_POLL_S)

    def renew(self) -> None:
        """Want it for another lease."""
        with suppress(FileNotFoundError):
            os.utime(self._folder / LEASE)

    def end(self, limit_s: float) -> None:
        """End it in order; by force when that takes longer. Idempotent."""
        give_up_s = time.monotonic() + limit_s
        told: int | None = None
        while (pid := self.pid) is not None:
            late = time.monotonic() > give_up_s
            if late or pid != told:
                with suppress(ProcessLookupError):
                    # The kernel ends what it keeps with it.
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                told = pid
            time.sleep(_POLL_S)

    def said(self) -> str:
        """Return the end of what it wrote."""
        try:
            return (self._folder / LOG).read_bytes()[-_MOST_LOG_BYTES:].decode(errors="replace")
        except FileNotFoundError:
            return ""


#: Starts its arguments in a session of their own.
_LAUNCH = """\
import subprocess, sys
subprocess.Popen(sys.argv[1:], start_new_session=True, stdin=subprocess.DEVNULL,
                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=True)
"""
