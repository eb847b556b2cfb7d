"""The limits of this process's control groups, of any depth and of both cgroup versions.

A limit applies to everything below its group. So the smallest limit counts, of all groups from the
process's own up to the root, as far as they are visible from here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

#: Files with a group's limit.
_MEMORY_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")
_QUOTA_FILE_V2 = "cpu.max"
_QUOTA_FILE_V1, _PERIOD_FILE_V1 = "cpu.cfs_quota_us", "cpu.cfs_period_us"


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds; None for no limit."""

    #: CPU time per second, in cores: 1.5 is one core and half of another.
    cores: float | None
    memory_bytes: int | None


def find_limits(root: Path = Path("/")) -> Limits:
    """Return the limits of this process; `/proc` and the control groups are read below `root`."""
    cores = [quota for folder in _folders(root, "cpu") if (quota := _quota(folder)) is not None]
    sizes_bytes = [
        int(text)
        for folder in _folders(root, "memory")
        for name in _MEMORY_FILES
        if (text := _read(folder / name)).isdecimal()
    ]
    return Limits(min(cores, default=None), min(sizes_bytes, default=None))


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's groups and their ancestors, for one controller."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 2 or controller in controllers.split(","):
            for mount_point, mount_root in _mounts(root, version, controller):
                yield from _up(mount_point, mount_root, path)


def _mounts(root: Path, version: int, controller: str) -> Iterator[tuple[Path, PurePosixPath]]:
    """Yield the mount points of such groups, and the group that is the root of each mount."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mount_root, mount_point = map(_unescaped, before.split()[3:5])
        kind, _, options = after.split()[:3]
        is_v1 = kind == "cgroup" and controller in options.split(",")
        if (version == 2 and kind == "cgroup2") or (version == 1 and is_v1):
            yield root / mount_point.lstrip("/"), PurePosixPath(mount_root)


def _up(mount_point: Path, mount_root: PurePosixPath, group: str) -> Iterator[Path]:
    """Yield the folders from a group up to the highest visible one."""
    path = PurePosixPath(group)
    below = path.relative_to(mount_root) if path.is_relative_to(mount_root) else PurePosixPath()
    # A path with `..` is outside the mount: only the mount's root is visible then.
    parts = () if ".." in below.parts else below.parts
    for depth in range(len(parts), -1, -1):
        yield mount_point.joinpath(*parts[:depth])


def _quota(folder: Path) -> float | None:
    """Return the CPU quota of the group in `folder`, in cores; None for no limit."""
    quota, _, period = _read(folder / _QUOTA_FILE_V2).partition(" ")
    if not quota:
        quota, period = _read(folder / _QUOTA_FILE_V1), _read(folder / _PERIOD_FILE_V1)
    if quota.isdecimal() and period.isdecimal() and int(period) > 0:
        return int(quota) / int(period)
    return None  # "max", "-1", or no such file


def _read(path: Path) -> str:
    """Return the file's text; empty when it cannot be read."""
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""


def _unescaped(path: str) -> str:
    """Return a path of `mountinfo` with its octal escapes (for blanks) decoded."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)
