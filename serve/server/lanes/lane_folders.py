"""Watch over the temporary files of lanes: one that takes too much disk is ended.

The kernel limits each file (RLIMIT_FSIZE), and nobody but root may limit a folder. So a thread adds
up what a lane's folder holds, and files that are open and have no name any more. The folder goes
when another lane starts.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path

from serve.core.types import LaneId
from serve.scratch import folder_of
from serve.threads import Thread

_EVERY_S = 1.0
#: Unit of `st_blocks`.
_BLOCK_BYTES = 512
#: An empty file takes no block, but time to count: with the others' limit, theirs have one, too.
LEAST_BYTES = 16 << 10


class LaneFolders:
    """Adds up the temporary files of all lanes once a second."""

    def __init__(
        self,
        pids: Callable[[], Mapping[LaneId, int]],
        end: Callable[[LaneId, str], None],
        most_bytes: int,
    ) -> None:
        """`pids` returns the process of each lane; `end` ends a lane, and is told why."""
        self._pids, self._end, self._most_bytes = pids, end, most_bytes
        self._stopping = threading.Event()
        self._thread = Thread(target=self._run, name="lane folders")

    def start(self) -> None:
        """Start the thread; raises RuntimeError when the system has none."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            for lane_id, pid in self._pids().items():
                taken_bytes = temporary_bytes(pid, self._most_bytes)
                if taken_bytes > self._most_bytes:
                    self._end(
                        lane_id,
                        f"its temporary files take {taken_bytes} bytes, of {self._most_bytes}"
                        " (device.max_lane_files)",
                    )


def temporary_bytes(pid: int, most_bytes: int) -> int:
    """Return the disk that the temporary files of a lane's process take; 0 outside of a server."""
    folder = folder_of(pid)
    return 0 if folder is None else disk_bytes(pid, (folder,), most_bytes)


def disk_bytes(pid: int, folders: Iterable[Path], most_bytes: int) -> int:
    """Return the disk that a process takes in folders, with files there that have no name any more.

    Each file counts at least `LEAST_BYTES`. Stops to count beyond `most_bytes`.
    """
    # By device and number: a file may be there by several names.
    found: dict[tuple[int, int], int] = {}
    taken_bytes = 0
    for folder in folders:
        with suppress(OSError):
            device = folder.stat().st_dev
            for status in chain(_in(folder), _open_without_name(pid, device)):
                size_bytes = max(status.st_blocks * _BLOCK_BYTES, LEAST_BYTES)
                number = status.st_dev, status.st_ino
                taken_bytes += size_bytes - found.get(number, 0)
                found[number] = size_bytes
                if taken_bytes > most_bytes:
                    return taken_bytes
    return taken_bytes


def _in(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of all that is in the folder and below, however deep."""
    left: list[str | Path] = [folder]
    while left:
        with suppress(OSError), os.scandir(left.pop()) as inside:
            for one in inside:
                with suppress(OSError):
                    yield one.stat(follow_symlinks=False)
                    if one.is_dir(follow_symlinks=False):
                        left.append(one.path)


def _open_without_name(pid: int, device: int) -> Iterator[os.stat_result]:
    """Yield the status of the files of that device that a process holds and that have no name."""
    fds = f"/proc/{pid}/fd"
    with suppress(OSError):
        for fd in os.listdir(fds):
            with suppress(OSError):
                status = os.stat(f"{fds}/{fd}")
                if status.st_dev == device and not status.st_nlink:
                    yield status
