"""Starting and ending of lane processes, and the environment they start in.

A process is forked from a fork server that has torch imported, with a channel for each of its
lanes. ``listener`` and ``calibrators`` read the channels, ``restarts`` starts processes anew.
"""

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from types import ModuleType
from typing import Any

from serve import native
from serve.ipc.messages import MAX_PACKET_BYTES
from serve.ipc.orphans import kill_children
from serve.ipc.setup import LaneSetup, PassedFile
from serve.ipc.signals import left_to_main_blocked
from serve.lane.start import run_lanes
from serve.server.printed_lines import PrintedLines
from serve.threads import Thread

_log = logging.getLogger(__name__)

_PRELOAD_MODULE = "serve.lane.preload"
_END_WAIT_S = 2.0
#: Most file descriptors that a start opens in this process.
_DESCRIPTORS = 16
#: Time for starting the fork server, which imports torch, and a process; after it both are stuck.
_FORK_WAIT_S = 300.0

#: glibc keeps freed tensor memory instead of returning pages after every layer and faulting them in
#: again (bench/models/allocators.py). Between runs lanes return what exceeds their limit.
LANE_ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    # Takes effect for large runs only, for which lanes allow mmap.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "OMP_NUM_THREADS": "1",
    # numpy's BLAS must start no threads in the fork server: a fork copies one thread only.
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

#: Reads what processes print; None: they print where this process does.
_printed: PrintedLines | None = None
#: Serializes starts and reaping, which run in several threads: neither the environment nor
#: multiprocessing, which polls all children at every start, is thread-safe.
_one_at_a_time = threading.Lock()
#: Processes that were started and not reaped: the fork server's own children. Under the lock.
_started: set[int] = set()


def log_printed(lines: PrintedLines | None) -> None:
    """Have `lines` read what processes print that are started from now on; None: nobody."""
    global _printed
    _printed = lines


@contextmanager
def fork_server() -> Iterator[None]:
    """Start the fork server before it is needed; at the end, end it and all that it started.

    What it prints itself goes to standard error as it is: nothing reads it for the log yet.
    """
    # Ctrl-C at the start is told when signals are unblocked: by then there is a process to end.
    try:
        # Where the system has no room for it now, `start` tries again.
        with (
            suppress(OSError),
            _one_at_a_time,
            stdout_as_stderr(),
            lane_environment(PYTHONSAFEPATH="1"),
        ):
            _ensure_fork_server()
        yield
    finally:
        kill_all()


@contextmanager
def stdout_as_stderr() -> Iterator[None]:
    """Have processes that start meanwhile print to standard error alone."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def start(setup: LaneSetup, lanes: int, pool_fd: int) -> tuple[BaseProcess, list[socket.socket]]:
    """Start a process with `lanes` lanes; return it with our ends of their channels.

    Raises OSError, or EOFError when the fork server died meanwhile.
    """
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(lanes)]
    for side in (side for pair in pairs for side in pair):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
    ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    context = multiprocessing.get_context("forkserver")
    outputs: tuple[int, ...] = ()
    try:
        if _printed is not None:
            outputs = _printed.open(setup.name)
        files = tuple(map(_File, outputs)) or None
        process = context.Process(
            target=run_lanes,
            args=(setup, theirs, _File(pool_fd), files),
            name=setup.name,
            daemon=True,
        )
        with _one_at_a_time:
            # Without a safe path a `serve.py` in the current folder would shadow the package.
            with lane_environment(PYTHONSAFEPATH="1"):
                _ensure_fork_server()
            _require_descriptors(pool_fd)
            with _no_main_module(), _unstuck():
                process.start()
            assert process.pid
            _started.add(process.pid)
    except BaseException as error:
        for side in ours:
            side.close()
        if isinstance(error, ConnectionRefusedError):
            # The fork server is ending, which may take it seconds; the next start makes a new one.
            kill_all()
        raise
    finally:
        for side in theirs:
            side.close()
        for fd in outputs:
            os.close(fd)
    return process, ours


def kill(process: BaseProcess) -> None:
    """Kill a process and its process group, which holds the processes it started. Any thread."""
    # It is gone, or does not lead its group yet.
    with suppress(ProcessLookupError, ValueError):
        assert process.pid  # 0 would mean our own group
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(ValueError):
        process.kill()


def reap(process: BaseProcess) -> str:
    """Wait for a process that is ending, close it and return how it ended, for the log.

    Processes that it started, and that left its group, end too.
    """
    with _one_at_a_time:
        pid = process.pid
        process.join(_END_WAIT_S)
        if process.exitcode is None:
            process.kill()
            process.join(_END_WAIT_S)
        code = process.exitcode
        if code is not None:
            process.close()
            _started.discard(pid or 0)
            _end_orphans()
    if code is None:
        return "does not end"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _end_orphans() -> None:
    """End all children of the fork server that it did not start for us. Under the lock."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        kill_children(server._forkserver_pid, but=_started)


def _ensure_fork_server() -> None:
    """Start the fork server where none runs, and remove the socket of the one before."""
    server: Any = forkserver._forkserver
    before = server._forkserver_address
    forkserver.set_forkserver_preload([_PRELOAD_MODULE])
    resource_tracker.ensure_running()  # which unblocks signals when it starts
    with left_to_main_blocked():
        forkserver.ensure_running()
    if before is not None and before != server._forkserver_address:
        with suppress(OSError, ValueError):  # an abstract one has no file
            os.unlink(before)


def kill_all() -> None:
    """Kill the fork server; the kernel then kills all processes it started."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)


class _File:
    """Pickles a file's descriptor as one that is duplicated into the started process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Callable[[PassedFile], PassedFile], tuple[PassedFile]]:
        return _as_passed, (DupFd(self._fd),)


def _as_passed(file: PassedFile) -> PassedFile:
    return file


@contextmanager
def lane_environment(**more: str) -> Iterator[None]:
    """Set the variables that lanes start with, and `more`; restore the old values at the end."""
    wanted = LANE_ENVIRONMENT | more
    meter = native.meter_library_path()
    if meter is None:
        _log.warning("lanes run without the memory meter: peaks are not measured")
    else:
        before = os.environ.get("LD_PRELOAD", "")
        wanted["LD_PRELOAD"] = f"{meter}:{before}" if before else str(meter)
    saved = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _require_descriptors(fd: int) -> None:
    """Raise OSError when there are too few descriptors for a start.

    A start that runs out of them leaves the fork server a half of what it reads, and it ends.
    """
    held: list[int] = []
    try:
        while len(held) < _DESCRIPTORS:
            held.append(os.dup(fd))
    finally:
        for one in held:
            os.close(one)


@contextmanager
def _unstuck() -> Iterator[None]:
    """Kill a fork server that does not answer in time; the next start makes a new one."""
    server: Any = forkserver._forkserver

    answered = threading.Event()

    def watch() -> None:
        if not answered.wait(_FORK_WAIT_S):
            _log.error("the fork server does not answer; ending it and with it all lanes")
            os.kill(server._forkserver_pid, signal.SIGKILL)

    watching = Thread(target=watch, name="fork server")
    watching.start()
    try:
        yield
    finally:
        answered.set()
        watching.join()


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing our main module in the process it starts.

    A lane needs nothing of it, and importing the command line takes longer than forking a lane.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def allocator_facts(keep_bytes: int) -> tuple[str, ...]:
    """Return the settings that times and peaks of lanes depend on, for a cache's key.

    What lanes keep counts by its order only: where the budget is what the machine has free, it is
    a little different at every start.
    """
    environment = {**os.environ, **LANE_ENVIRONMENT}
    told = [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD")
    ]
    metered = "metered" if native.meter_library_path() is not None else "without meter"
    return (*told, metered, f"lanes keep 2^{keep_bytes.bit_length()} bytes")
