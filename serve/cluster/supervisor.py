"""A process that keeps a server or a front for as long as somebody wants it.

    python -m serve.cluster.supervisor FOLDER LEASE_S -- COMMAND...

It starts the command again when it is killed or crashes, and ends it in order when it is told to,
by SIGTERM, or when nobody has renewed the lease for so long. It belongs to no other process: what
it keeps goes on when all of Ray ends. While it runs it holds the lock of its folder, in which are

    lock        its process id, locked
    version     what was started, in the words of whoever started it
    lease       whose time of change is when the lease was renewed
    log, log.1  what the command writes, and what it wrote before it was started last
"""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

LOCK, LEASE, LOG, VERSION = "lock", "lease", "log", "version"
_LOOK_S = 0.1
#: A command that ends sooner did not start; after so many in a row it is not started again.
_STARTED_S, _MOST_FAILURES = 10.0, 3
#: Waits before it is started again, in turn.
_WAITS_S = (0.0, 1.0, 5.0)
#: Exit code of a command that can never start: its configuration is wrong.
_HOPELESS = 2
#: Exit code when another supervisor is there.
_KEPT_BY_ANOTHER = 3
_LOCK_TRIES = 30
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Keep the command in argv; returns the exit code of its last run."""
    folder, lease_s, command = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[4:]
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _locked(lock):
        return _KEPT_BY_ANOTHER
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    (folder / LEASE).touch()
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: over.set())
    failures, lease = 0, Lease(folder / LEASE)
    while True:
        began_s = time.monotonic()
        code = _run(command, folder, lease, lease_s, over)
        failures = failures + 1 if time.monotonic() - began_s < _STARTED_S else 0
        if over.is_set() or code in (0, _HOPELESS) or failures == _MOST_FAILURES:
            return code if code >= 0 else 128 - code
        over.wait(_WAITS_S[min(failures, len(_WAITS_S) - 1)])


def _locked(file: int) -> bool:
    """Lock a file, which readers hold for a moment; returns False when somebody else keeps it."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_S)
        else:
            return True
    return False


def _run(
    command: list[str], folder: Path, lease: "Lease", lease_s: float, over: threading.Event
) -> int:
    """Run the command until it ends, or has been ended; returns its exit code."""
    log = folder / LOG
    if log.exists():
        log.replace(log.with_suffix(".1"))
    with log.open("wb") as file:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, preexec_fn=_die_with_us
        )
    while child.poll() is None:
        if over.wait(_LOOK_S) or lease.unwanted_s() > lease_s:
            over.set()
            # It ends within the limits of its own configuration.
            child.terminate()
            return child.wait()
    return child.returncode


class Lease:
    """The lease, by the time since its file was last seen changed: clocks may be set."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen_ns: int | None = None
        self._renewed_s = time.monotonic()

    def unwanted_s(self) -> float:
        """Return how long nobody has renewed it.

        A file that was deleted is written anew, where its folder is still there.
        """
        try:
            changed_ns = self._file.stat().st_mtime_ns
        except OSError:
            with suppress(OSError):
                self._file.touch()
        else:
            if changed_ns != self._seen_ns:
                self._seen_ns, self._renewed_s = changed_ns, time.monotonic()
        return time.monotonic() - self._renewed_s


def _die_with_us() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main())
