"""Which files a process may use from now on, enforced by the kernel (Landlock).

Rules of Landlock allow; none forbids. So all that lies beside a hidden path is allowed by name,
from the root downwards, and what is made there later cannot be opened. Descriptors that are open
already stay of use. A process with such rules, and without capabilities, reads no memory and no
descriptors of any process but those it starts, and signals no others.
"""

import ctypes
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_libc = ctypes.CDLL(None, use_errno=True)

#: Rights of Landlock, see linux/landlock.h.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_DEVICE = 1 << 6 | 1 << 11
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
#: Rights that rules for something other than a folder may have.
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
#: The first version of Landlock that has the right; those below have all that came before.
_RIGHTS_SINCE = ((1, (1 << 13) - 1), (2, _REFER), (3, _TRUNCATE), (5, _IOCTL))
#: The versions from which a rule set has a second and a third number.
_NETWORK_SINCE, _SCOPES_SINCE = 4, 6
#: No abstract sockets and no signals of processes outside.
_SCOPES = 1 << 0 | 1 << 1

#: Of /dev, what programs need; the rest holds disks and memory, which root may open.
_DEVICES = ("null", "zero", "full", "random", "urandom")


def landlock_version() -> int:
    """Return the version of Landlock that the kernel has; less than 1 when it has none."""
    return int(_libc.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION_FLAG))


def limit_files(hidden: Iterable[str], writable: Iterable[str]) -> str:
    """Hide files and folders from this process, and let it write in `writable` ones alone.

    Everything else it may read as before; /dev has `_DEVICES` alone. For this thread and all
    processes and threads that it starts, for good; they need `no_new_privs`. Returns why the system
    cannot, "" if it can.
    """
    version = landlock_version()
    if version < 1:
        return "the kernel has no Landlock, which would keep models from files"
    handled = sum(rights for since, rights in _RIGHTS_SINCE if version >= since)
    attributes = [handled]
    if version >= _NETWORK_SINCE:
        attributes.append(0)
    if version >= _SCOPES_SINCE:
        attributes.append(_SCOPES)
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    rules_fd = _libc.syscall(_CREATE, packed, ctypes.c_size_t(len(packed)), 0)
    if rules_fd < 0:
        return f"the kernel makes no Landlock rules ({os.strerror(ctypes.get_errno())})"
    try:
        for entry in beside((*hidden, "/dev")):
            rights = _READ if entry.is_dir(follow_symlinks=False) else _READ & _OF_FILES
            _allow(rules_fd, entry.path, rights & handled)
        for name in _DEVICES:
            _allow(rules_fd, f"/dev/{name}", (_READ_FILE | _WRITE_FILE) & handled)
        for name in writable:
            rights = handled & ~_MAKE_DEVICE
            path = os.path.realpath(name)
            _allow(rules_fd, path, rights if os.path.isdir(path) else rights & _OF_FILES)
        if _libc.syscall(_RESTRICT, rules_fd, 0):
            return f"the kernel takes no Landlock rules ({os.strerror(ctypes.get_errno())})"
    finally:
        os.close(rules_fd)
    return ""


def beside(hidden: Iterable[str]) -> Iterator[os.DirEntry[str]]:
    """Yield files and folders that together hold all there is now but the hidden ones.

    Links are followed in `hidden`, and left out of what is found: it has their targets.
    """
    paths = {Path(one).resolve() for one in hidden}
    above = {parent for path in paths for parent in path.parents}
    left_out = {str(path) for path in paths | above}
    for folder in sorted(above - paths):
        if not paths.isdisjoint(folder.parents):
            continue  # in a hidden folder
        with suppress(OSError):  # it is gone, or not ours to list
            for entry in os.scandir(folder):
                if entry.path not in left_out and not entry.is_symlink():
                    yield entry


def _allow(rules_fd: int, path: str, rights: int) -> None:
    """Add a rule for a file or folder; does nothing for one that is gone."""
    with suppress(OSError):
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            packed = struct.pack("=Qi", rights, fd)
            _libc.syscall(_ADD_RULE, rules_fd, _PATH_BENEATH, packed, 0)
        finally:
            os.close(fd)
