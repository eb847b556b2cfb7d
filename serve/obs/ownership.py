"""The server whose database a file is, so that no second one mixes its rows into it."""

import fcntl
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from serve.errors import ConfigError
from serve.obs.read import reading


class DatabaseOwner:
    """Holds an advisory lock on a database until `close` or the end of the process.

    SQLite's own locks are others, so readers and `gnnserve db` go on working. Close it after the
    connections of this process: that takes away SQLite's locks.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock, and make the file where there is none.

        Raises ConfigError, which names the process that holds it. A file that cannot be opened is
        not locked; whoever opens the database tells why.
        """
        self._fd: int | None = None
        with suppress(OSError):
            flags = os.O_RDONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)
        if self._fd is None:
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ConfigError(
                f"{path}: {_holder(path)} writes its report there, and a database is one server's; "
                "stop that one, or name another file in report.database"
            ) from error
        except OSError:  # a file system without such locks
            self.close()

    def close(self) -> None:
        """Give the lock back. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _holder(path: Path) -> str:
    """Return what the newest run in the database calls its process."""
    with suppress(ConfigError, sqlite3.Error), reading(path) as db:
        found = db.execute("SELECT pid FROM server ORDER BY run_id DESC LIMIT 1").fetchone()
        if found:
            return f"process {found[0]}"
    return "another process"
