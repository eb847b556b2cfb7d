"""What a machine does to a server under chaos: stops, runs out of something, has its clock set."""

import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.chaos.outside import Outside
from bench.chaos.stepped_clock import SteppedClock
from bench.chaos.world import STEP_S
from bench.kit.processes import descendants

#: Control group of a server that may start no more threads.
PIDS = Path(f"/sys/fs/cgroup/pids/gnnserve-chaos-{os.getpid()}")


class Violated(Exception):
    """A fault saw the server do what it must not do."""


class Disk:
    """A file system in memory of its own, for the report's database, which can be made full."""

    def __init__(self, folder: Path) -> None:
        """Mount it; raises OSError where that is not permitted."""
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._size("4g", "gnnserve-chaos")

    def _size(self, size: str, *more: str) -> None:
        options = f"size={size}" if more else f"remount,size={size}"
        command = ["mount", "-t", "tmpfs", "-o", options, *(more or ["tmpfs"]), str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr.strip() or "mount failed")

    @contextmanager
    def full(self) -> Iterator[None]:
        """Have no more room than what is used already."""
        used = os.statvfs(self.folder)
        self._size(str((used.f_blocks - used.f_bfree) * used.f_frsize))
        try:
            yield
        finally:
            self._size("4g")

    def close(self) -> None:
        """Unmount it, with what it holds."""
        subprocess.run(["umount", "-l", str(self.folder)], capture_output=True)


def signalled(pids: Iterable[int], number: signal.Signals, resume_s: float = 0.0) -> None:
    """Send a signal to processes, and where `resume_s` is not 0, SIGCONT after that time."""
    found = list(pids)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    if resume_s:
        time.sleep(resume_s)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def kill_a_lane(outside: Outside, dice: random.Random) -> str:
    """Kill one of the lanes; returns which."""
    lanes = outside.lanes()
    if not lanes:
        return "no lane now"
    pid = dice.choice(lanes)
    signalled([pid], signal.SIGKILL)
    return f"lane {pid}"


def freeze(outside: Outside) -> str:
    """Stop all of the server's processes for a while, as a machine that is moved."""
    pid = outside.server.pid
    signalled([pid, *descendants(pid)], signal.SIGSTOP, resume_s=2.0)
    return ""


def step_clock(clock: SteppedClock | None, forwards: bool) -> str:
    """Set the wall clock by a day, and back after a while."""
    if clock is None:
        return "skipped: the clock cannot be replaced"
    try:
        clock.step(STEP_S if forwards else -STEP_S)
        time.sleep(3.0)
    finally:
        clock.step(0)
    return ""


@contextmanager
def _limited(pid: int, what: int, most: int) -> Iterator[None]:
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (most, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, what, before)


def fill_disk(disk: Disk | None) -> str:
    """Leave the report's database no room."""
    if disk is None:
        return "skipped: no file system can be mounted"
    with disk.full():
        time.sleep(10.0)
    return ""


def limit_files(outside: Outside) -> str:
    """Let no file of the main process grow, the report's database among them."""
    with _limited(outside.server.pid, resource.RLIMIT_FSIZE, 4096):
        time.sleep(3.0)
    return ""


@contextmanager
def no_descriptors(outside: Outside) -> Iterator[None]:
    """Let the main process open no file and no connection."""
    pid = outside.server.pid
    open_now = max(map(int, os.listdir(f"/proc/{pid}/fd")), default=0) + 1
    with _limited(pid, resource.RLIMIT_NOFILE, open_now):
        yield


def no_threads(outside: Outside, dice: random.Random) -> str:
    """Let no thread and no process be started, while a lane ends."""
    group = PIDS
    pid = outside.server.pid
    try:
        group.mkdir(exist_ok=True)
        parent = outside.fork_server()
        for one in (pid, *outside.lanes(), *([parent] if parent else [])):
            (group / "cgroup.procs").write_text(str(one))
        (group / "pids.max").write_text((group / "pids.current").read_text())
    except OSError as error:
        return f"skipped: {error}"
    try:
        said = kill_a_lane(outside, dice)
        (group / "pids.max").write_text("1")
        time.sleep(5.0)
    finally:
        (group / "pids.max").write_text("max")
    return said
