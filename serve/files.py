"""Safe reading and removal of files that others wrote, and making of files that none may read.

Pipes, devices and huge files cannot hang the reader.
"""

import errno
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from serve.errors import ConfigError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading; never wait for a writer.

    Raises OSError, which names the kind of file when it is not a regular one.
    """
    # Check before opening, as opening a device may have effects, and again after: it may change.
    _refuse_other(path.stat().st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _refuse_other(os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def private(name: str, flags: int) -> int:
    """Open a file as ``open`` does, of which it is an `opener`; a new one is its owner's alone."""
    return os.open(name, flags, 0o600)


def read_text(path: Path, most_bytes: int) -> str:
    """Return the text of a regular file of at most `most_bytes`.

    Raises OSError as ``open_regular`` and for a longer file, UnicodeDecodeError for other bytes.
    """
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes")
    return data.decode("utf-8")


def read_named_text(path: Path, most_bytes: int) -> str:
    """Return the text of a file that a user named; raises ConfigError, which names it too."""
    try:
        return read_text(path, most_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: it is not UTF-8 text: {error}") from error


def new_private_file(path: Path) -> int:
    """Return a descriptor of a new file that this user alone may read and write, at `path`.

    A file that is there may be open to others: another one takes its name. Raises OSError.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return private(str(path), flags)


def replace_file(path: Path, data: bytes) -> None:
    """Have `data` in the file at `path`, so that no reader sees a part; raises OSError.

    A loss of power leaves the file as it was, or as it is to be.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as made:
        try:
            made.write(data)
            made.flush()
            os.fsync(made.fileno())
            os.replace(made.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(made.name)
            raise


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that it holds, as far as the system allows; never fails.

    Whoever wrote it, and no longer does, may have nested folders without end and made them
    unreadable. So folders in folders are moved up before theirs is removed: no path gets long and
    no call deep.
    """
    if folder.is_symlink():
        return
    with suppress(OSError):
        folder.chmod(0o700)
    changed = True
    while changed:
        changed = False
        for one in _entries(folder):
            changed |= _removed(one, folder)
    with suppress(OSError):
        folder.rmdir()


def _removed(one: "os.DirEntry[str]", above: Path) -> bool:
    """Remove what stands in `above`, its own folders moved there; returns True if that changed."""
    changed = False
    with suppress(OSError):
        if not one.is_dir(follow_symlinks=False):
            os.unlink(one.path)
            return True
        os.chmod(one.path, 0o700)
        for inside in _entries(one.path):
            if inside.is_dir(follow_symlinks=False):
                os.chmod(inside.path, 0o700)  # of its own, as its `..` changes
                os.rename(inside.path, above / secrets.token_hex(16))
            else:
                os.unlink(inside.path)
            changed = True
        os.rmdir(one.path)
        changed = True
    return changed


def _entries(folder: Path | str) -> list["os.DirEntry[str]"]:
    with suppress(OSError), os.scandir(folder) as found:
        return list(found)
    return []


def printable(text: str) -> str:
    """Return `text` with surrogates, as file names may hold, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _refuse_other(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
