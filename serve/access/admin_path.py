"""Where the admin sockets of this host's servers are."""

import os
import stat
from pathlib import Path

from serve.errors import ConfigError

#: Folder of the admin sockets of servers that a service manager runs.
_SYSTEM_FOLDER = Path("/run/gnnserve")
#: A socket's path has at most 107 bytes.
_LONGEST_PATH = 107


def socket_name(port: int) -> str:
    """Return the file name of the admin socket of the server with that gRPC port."""
    return f"admin-{port}.sock"


def make_socket_folder() -> Path:
    """Return the folder for this user's admin sockets, made if need be.

    It is the service manager's, the session's, or one in `/tmp`. Raises ConfigError when others
    could write to it.
    """
    folder = _own_folders()[0]
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        held = folder.lstat()
    except OSError as error:
        raise ConfigError(f"server.admin_socket: {folder}: {error.strerror}; set a path") from error
    writable = held.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(held.st_mode) or held.st_uid != os.geteuid() or writable:
        raise ConfigError(
            f"server.admin_socket: {folder} is not a folder that only this user may write to; "
            "set a path"
        )
    return folder


def find_socket(port: int) -> Path | None:
    """Return the admin socket of the server with that gRPC port; None when there is none."""
    for folder in (*_own_folders(), _SYSTEM_FOLDER):
        path = folder / socket_name(port)
        try:
            held = path.stat()
        except OSError:
            continue
        if stat.S_ISSOCK(held.st_mode) and (held.st_uid == os.geteuid() or os.geteuid() == 0):
            return path
    return None


def require_short(path: Path) -> None:
    """Raise ConfigError when the path is too long for a socket."""
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(
            f"server.admin_socket: {path} is longer than {_LONGEST_PATH} bytes, the most that a "
            "socket's path has"
        )


def _own_folders() -> list[Path]:
    found = []
    # Set by systemd for a unit with RuntimeDirectory=.
    if runtime := os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]:
        found.append(Path(runtime))
    session = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if session.is_absolute() and os.access(session, os.W_OK):
        found.append(session / "gnnserve")
    found.append(Path(f"/tmp/gnnserve-admin-{os.geteuid()}"))
    return found
