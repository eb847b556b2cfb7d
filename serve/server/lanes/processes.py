"""How a process for lanes is started and ended, and the environment it starts in.

It comes from a fork server that has torch imported, with a channel for each of its lanes. What is
said over channels, and when a process is started again, is ``pool``'s.
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
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from types import ModuleType
from typing import Any

import msgspec

from serve import native
from serve.errors import ModelError, NotReady
from serve.estimate.calibration import Calibration
from serve.ipc import messages
from serve.ipc.messages import (
    MAX_PACKET_BYTES,
    FromLane,
    Message,
    ModelFailed,
    ModelProbed,
    ProbeModel,
    Progress,
)
from serve.ipc.setup import LaneSetup, PassedFile
from serve.lane.start import run_lanes
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec

_log = logging.getLogger(__name__)

_PRELOAD_MODULE = "serve.lane.preload"
_END_WAIT_S = 2.0
_START_WAIT_S = 120.0
#: To start the fork server, which imports torch, and a process from it; more and it is stuck.
_FORK_WAIT_S = 300.0

#: glibc keeps freed tensor memory instead of returning pages after every layer and faulting them in
#: again (bench/models/allocators.py). Between runs lanes return what exceeds their limit.
LANE_ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    # Only for large runs, for which lanes allow it.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "OMP_NUM_THREADS": "1",
    # numpy's BLAS must start no threads in the fork server: only one thread survives a fork.
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

#: Lanes start in threads of their own. Neither the environment nor multiprocessing, which looks
#: after every child whenever one is started, is made for that.
_one_at_a_time = threading.Lock()


def start(setup: LaneSetup, lanes: int, pool_fd: int) -> tuple[BaseProcess, list[socket.socket]]:
    """A process with so many lanes, and our ends of their channels.

    Raises OSError, or EOFError when the fork server died just then.
    """
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(lanes)]
    for side in (side for pair in pairs for side in pair):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
    ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD_MODULE])
    process = context.Process(
        target=run_lanes, args=(setup, theirs, _PoolFile(pool_fd)), name=setup.name, daemon=True
    )
    try:
        with _one_at_a_time:
            # Without a safe path a `serve.py` in the current folder would shadow the package.
            with lane_environment(PYTHONSAFEPATH="1"):
                forkserver.ensure_running()
            with _no_main_module(), _unstuck():
                process.start()
    except BaseException:
        for side in ours:
            side.close()
        raise
    finally:
        for side in theirs:
            side.close()
    return process, ours


def kill(process: BaseProcess) -> None:
    """End a process and those it started, as far as they are of its group. Any thread."""
    # Gone already, or not yet the first of its group.
    with suppress(ProcessLookupError, ValueError):
        assert process.pid  # 0 would mean our own group
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(ValueError):
        process.kill()


def reap(process: BaseProcess) -> str:
    """Wait for a process that is ending, free it and say how it ended."""
    with _one_at_a_time:
        process.join(_END_WAIT_S)
        if process.exitcode is None:
            process.kill()
            process.join(_END_WAIT_S)
        code = process.exitcode
        if code is not None:
            process.close()
    if code is None:
        return "does not end"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def kill_all() -> None:
    """Kill the fork server, and so, by the kernel, all it started; for an end by force."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)


class Calibrator:
    """Blocking talk with a process that loads and calibrates one model."""

    def __init__(self, process: BaseProcess, channel: socket.socket) -> None:
        self._process = process
        self._channel = channel
        self._channel.settimeout(_START_WAIT_S)

    def kill(self) -> None:
        """End the process and those it started; whoever waits for it gets NotReady. Any thread."""
        kill(self._process)

    def close(self) -> None:
        """Kill, and free what it took here."""
        self.kill()
        self._channel.close()
        reap(self._process)

    def probe(
        self, message: ProbeModel, timeout_s: float, progress: Callable[[str, float], None]
    ) -> tuple[Signature, Calibration]:
        """Signature and calibration of the model; raises ModelError, or NotReady as `receive`."""
        said = self._probed(message, timeout_s, progress)
        return said.signature, msgspec.msgpack.decode(said.calibration, type=Calibration)

    def try_out(self, spec: ModelSpec, timeout_s: float) -> Signature:
        """The same without a calibration: the model is built and runs on a few small graphs."""
        message = ProbeModel(spec, budget_s=0.0, max_bytes=0, tries_only=True)
        return self._probed(message, timeout_s, lambda step, fraction: None).signature

    def _probed(
        self, message: ProbeModel, timeout_s: float, progress: Callable[[str, float], None]
    ) -> ModelProbed:
        self.send(message)
        while True:
            said = self.receive(timeout_s)
            if isinstance(said, Progress):
                progress(said.step, said.fraction)
            elif isinstance(said, ModelFailed):
                prefix = f"model {message.spec.key}: "
                raise ModelError(prefix + said.message.removeprefix(prefix))
            elif isinstance(said, ModelProbed):
                return said

    def send(self, message: Message) -> None:
        """Send one packet; of a process that died `receive` tells."""
        with suppress(ConnectionError):
            self._channel.send(messages.encode(message))

    def receive(self, timeout_s: float) -> FromLane:
        """The next packet; raises NotReady when the process died or takes too long."""
        self._channel.settimeout(timeout_s)
        try:
            packet = self._channel.recv(MAX_PACKET_BYTES)
        except TimeoutError as error:
            raise NotReady(
                f"the model did not load and calibrate within {timeout_s:g} s"
            ) from error
        except ConnectionError:
            packet = b""  # It died before it read what it was told.
        if not packet:
            raise NotReady("the process that loaded the model died; see the log")
        return messages.decode_from_lane(packet)


class _PoolFile:
    """The pool's file, pickled as a descriptor duplicated into the process being started."""

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


@contextmanager
def _unstuck() -> Iterator[None]:
    """End a fork server that does not answer within a generous time; a new one takes its place."""
    server: Any = forkserver._forkserver

    def end() -> None:
        _log.error("the fork server does not answer; ending it and with it all lanes")
        os.kill(server._forkserver_pid, signal.SIGKILL)

    watch = threading.Timer(_FORK_WAIT_S, end)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
        watch.join()


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing our main module in the process it starts.

    A lane needs nothing of it, and the command line's takes longer to import than a lane to fork.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def allocator_facts(keep_bytes: int) -> tuple[str, ...]:
    """What times and peaks of lanes depend on besides model and machine, for a cache's key.

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
