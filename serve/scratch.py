"""A temporary folder for one server process and the processes it starts.

Libraries leave files in the system's temporary folder and never remove them: PyG some 40 for each
start of a server. So a server gets a folder of its own there, which is removed when it ends or, if
it was killed, when the next server starts. Each of its lanes has a folder in it, which is removed
when another lane starts after its end.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path

from serve.files import remove_tree

_PREFIX = "gnnserve-"
#: Begins the name of a process's folder; its id follows.
_OF_PROCESS = "process-"
#: File that marks a folder as ours, locked as long as the folder is in use.
_LOCK = ".in-use"
#: A socket's path has at most 107 bytes, and multiprocessing adds some 35 to this folder's.
_LONGEST_PATH = 70
#: multiprocessing removes its own folder with priority -100; a lower one runs later.
_AFTER_MULTIPROCESSING = -200


@contextmanager
def temporary_folder() -> Iterator[None]:
    """Direct temporary files of this process and its children to a new folder meanwhile.

    Changes nothing when no folder can be made.
    """
    made = _make()
    if made is None:
        yield
        return
    folder, lock_fd = made
    environment, default = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = default
        if environment is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = environment
        if any(folder.glob("pymp-*")):
            # multiprocessing removes this folder of its own when the process exits, and early
            # versions of Python 3.11 print a traceback when it is gone. So ours goes later.
            Finalize(None, _remove, (folder, lock_fd), exitpriority=_AFTER_MULTIPROCESSING)
        else:
            _remove(folder, lock_fd)


def servers_folder() -> Path | None:
    """Return the temporary folder of the server, in its own processes; None outside of a server."""
    folder = Path(tempfile.gettempdir())
    return folder if (folder / _LOCK).exists() else None


def folder_of(pid: int) -> Path | None:
    """Return the folder that a process of the server has or would have; None outside of one."""
    servers = servers_folder()
    return None if servers is None else servers / f"{_OF_PROCESS}{pid}"


def own_folder() -> None:
    """Direct temporary files of this process to a folder of its own within the server's.

    Removes the folders of processes that have ended. Changes nothing outside of a server.
    """
    servers = servers_folder()
    if servers is None:
        return
    for folder in servers.glob(f"{_OF_PROCESS}*"):
        if not Path("/proc", folder.name.removeprefix(_OF_PROCESS)).exists():
            remove_tree(folder)
    with suppress(OSError):
        own = servers / f"{_OF_PROCESS}{os.getpid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(own)


def _remove(folder: Path, lock_fd: int) -> None:
    remove_tree(folder)
    os.close(lock_fd)


def _make() -> tuple[Path, int] | None:
    """Make a folder and lock it; return None when neither the usual place nor `/tmp` allows it."""
    with suppress(OSError):
        for parent in (Path(tempfile.gettempdir()), Path("/tmp")):
            if len(os.fsencode(parent / f"{_PREFIX}12345678")) <= _LONGEST_PATH:
                _remove_left_behind(parent)
                return _locked(parent)
    return None


def _locked(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock_fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock_fd
        # Another process took it for abandoned before it was locked.
        os.close(lock_fd)


def _remove_left_behind(parent: Path) -> None:
    """Remove this user's scratch folders that no process uses."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            lock_fd = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(lock_fd).st_uid == os.getuid():
                    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_tree(folder)
            finally:
                os.close(lock_fd)
