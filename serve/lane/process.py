"""The process that lanes live in: how it is set up, and how it ends."""

import ctypes
import logging
import mmap
import os
import resource
import signal
import sys
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any, NoReturn

import torch

from serve.ipc.orphans import adopt_orphans
from serve.ipc.setup import LaneSetup, PassedFile
from serve.ipc.shared_pool import map_pool
from serve.lane.confinement import confine
from serve.lane.shared_state import without_onednn
from serve.niceness import be_nice
from serve.scratch import own_folder

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ThisProcess:
    """This process, set up for lanes."""

    pool: mmap.mmap
    #: The pool's file.
    pool_fd: int
    #: Why it may do what lanes should not; empty when it may not.
    unconfined: str


def enter(setup: LaneSetup, pool_file: PassedFile) -> ThisProcess:
    """Set this process up for lanes.

    From then on the process ignores SIGINT and SIGTERM, and the kernel kills it with the server.
    """
    _die_with_parent()
    _release_fork_server()
    own_folder()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Does nothing where the log goes through a pipe.
    logging.basicConfig(level=setup.log_level, format="%(levelname)s %(message)s")
    # Processes that a model starts end with their group, and those of other groups as orphans.
    os.setpgid(0, 0)
    adopt_orphans()
    be_nice(setup.niceness)
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)
    torch.set_num_threads(setup.threads)
    without_onednn()
    pool_fd = pool_file.detach()
    pool = map_pool(pool_fd, setup.pool_capacity_bytes)
    unconfined = "" if setup.confinement is None else confine(setup.confinement)
    return ThisProcess(pool, pool_fd, unconfined)


def short_of_descriptors() -> bool:
    """Return True when models have left half of all descriptors open that this process may have."""
    try:
        # The kernel gives the lowest that is free.
        lowest = os.open("/", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return True
    os.close(lowest)
    return lowest > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def leave(code: int = 0) -> NoReturn:
    """End this process at once."""
    # Tensors over the pool may still exist; the kernel unmaps it, no destructor has to.
    sys.stderr.flush()
    os._exit(code)


def _die_with_parent() -> None:
    """Have the kernel kill this process with the fork server, which ends with the server."""
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _release_fork_server() -> None:
    """Close our copy of the pipe whose end tells the fork server that the server is gone.

    multiprocessing gives every child one, so that it could start others. A lane that is busy or
    stopped would keep the fork server waiting, and so itself alive.
    """
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
