"""The calibrating processes, which load and measure models beside the serving lanes."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess

import msgspec

from serve.errors import ModelError, NotReady
from serve.estimate.calibration import Calibration
from serve.ipc import messages, passing
from serve.ipc.messages import (
    MAX_PACKET_BYTES,
    FromLane,
    Message,
    ModelFailed,
    ModelProbed,
    ProbeModel,
    Progress,
)
from serve.ipc.setup import LaneSetup
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec
from serve.server.lanes import processes
from serve.server.lanes.restarts import Started

#: Time limit until a message sets its own.
_START_WAIT_S = 120.0


class Calibrator:
    """A process that loads and calibrates one model; its methods block."""

    def __init__(self, process: BaseProcess, channel: socket.socket) -> None:
        self._process = process
        self._channel = channel
        self._channel.settimeout(_START_WAIT_S)
        self._handed_over = False

    @property
    def pid(self) -> int | None:
        """Process id; None once it is reaped."""
        try:
            return self._process.pid
        except ValueError:
            return None

    def kill(self) -> None:
        """End the process and those it started; a waiting thread gets NotReady. Any thread."""
        if not self._handed_over:
            processes.kill(self._process)

    def signal(self, number: int) -> None:
        """Send the process, and those it started, a signal; nothing where they have ended."""
        with suppress(ProcessLookupError, ValueError):
            assert self._process.pid  # 0 would mean our own group
            os.killpg(self._process.pid, number)

    def hand_over(self) -> Started:
        """Return process and channel to the caller, who owns them from now on."""
        self._handed_over = True
        self._channel.settimeout(None)
        return self._process, [self._channel]

    def close(self) -> None:
        """End and reap the process, and close the channel, unless they were handed over."""
        if self._handed_over:
            return
        self.kill()
        self._channel.close()
        processes.reap(self._process)

    def probe(
        self, message: ProbeModel, timeout_s: float, progress: Callable[[str, float], None]
    ) -> tuple[Signature, Calibration]:
        """Calibrate a model; return signature and calibration.

        Raises ModelError when the model fails, NotReady when the process dies or takes too long.
        """
        said = self._probed(message, timeout_s, progress)
        return said.signature, msgspec.msgpack.decode(said.calibration, type=Calibration)

    def try_out(self, spec: ModelSpec, timeout_s: float) -> Signature:
        """Run the model on a few small graphs; return its signature. Raises as `probe`."""
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
        """Send a message; if the process died, `receive` raises."""
        with suppress(ConnectionError):
            passing.send(self._channel, message)

    def receive(self, timeout_s: float | None) -> FromLane:
        """Return the next message; raises NotReady when the process died or takes too long.

        With None it may take any time, as a process that stands still does.
        """
        self._channel.settimeout(timeout_s)
        try:
            packet = self._channel.recv(MAX_PACKET_BYTES)
        except TimeoutError as error:
            raise NotReady(
                f"the model did not load and calibrate within {timeout_s:g} s"
            ) from error
        except ConnectionError:
            packet = b""  # it died before it read the message
        if not packet:
            raise NotReady("the process that loaded the model died; see the log")
        return messages.decode_from_lane(packet)


class Calibrators:
    """All calibrating processes that run now."""

    def __init__(self) -> None:
        self._running: set[Calibrator] = set()
        #: Those that stand still while a lane executes on their core, and whether they do.
        self._yielding: set[Calibrator] = set()
        self._standing = False
        self._yields_lock = threading.Lock()
        #: Upper bound of their niceness: 0 while the server starts and no request waits for a core.
        self.niceness = 0
        #: True once the server stops: no model is measured any more.
        self.interrupted = False

    @contextmanager
    def start(
        self, setup: LaneSetup, pool_fd: int, *, yields: bool = False
    ) -> Iterator[Calibrator]:
        """Start a calibrator for the `with` block; raises NotReady while the server stops.

        One that `yields` stands still when `keep_off` says so: where it and the lanes are in the
        kernel's idle class, a lane would wait for up to a tick of the kernel, again and again.
        """
        if self.interrupted:
            raise NotReady("no model is measured while the server stops")
        process, (channel,) = processes.start(setup, 1, pool_fd)
        calibrator = Calibrator(process, channel)
        self._running.add(calibrator)
        if self.interrupted:  # just now
            calibrator.kill()
        if yields:
            with self._yields_lock:
                self._yielding.add(calibrator)
                if self._standing:
                    calibrator.signal(signal.SIGSTOP)
        try:
            yield calibrator
        finally:
            with self._yields_lock:
                self._yielding.discard(calibrator)
                self._standing = self._standing and bool(self._yielding)
            self._running.discard(calibrator)
            calibrator.close()

    @property
    def yielding(self) -> bool:
        """True while there is a calibrator that yields."""
        return bool(self._yielding)

    def keep_off(self, lane_executes: bool) -> None:
        """Have calibrators that yield stand still while a lane executes on their core."""
        if lane_executes is self._standing:
            return
        with self._yields_lock:
            self._standing = lane_executes
            for calibrator in self._yielding:
                calibrator.signal(signal.SIGSTOP if lane_executes else signal.SIGCONT)

    def interrupt(self) -> None:
        """End all calibrators for good; their users get NotReady. Any thread; never blocks."""
        self.interrupted = True
        for calibrator in self._running.copy():
            calibrator.kill()
