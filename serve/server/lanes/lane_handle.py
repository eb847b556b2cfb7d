"""Handles of a lane and of the process that runs it: channel, signals and state of both."""

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from serve.core.types import LaneId
from serve.ipc.messages import MAX_PACKET_BYTES
from serve.ipc.setup import DevicePlace
from serve.server import clock
from serve.server.lanes import processes

#: Time after which a killed process is taken for gone even if the system does not end it: it
#: executes no instruction of its own any more.
_GONE_AFTER_NS = 5_000_000_000


@dataclass(slots=True)
class LaneProcess:
    """A process and the lanes in it."""

    #: For the log.
    name: str
    #: The device that its lanes share; None for a process of one lane.
    place: DevicePlace | None
    lanes: list["LaneHandle"]
    #: Trust domain of the models that it runs, empty for that of all others.
    domain: str = ""
    #: None while it is being restarted.
    child: BaseProcess | None = None
    #: Readable once the process has ended. None where the system has no pidfd: there a process has
    #: ended when its lanes' channels are closed.
    pidfd: int | None = None
    #: True once a run of the present process has ended without ending it.
    has_worked: bool = False
    #: Set when it was killed or closed a channel: time at which it is taken for gone.
    gone_at_ns: int | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None while it is being restarted."""
        return None if self.child is None else self.child.pid

    def kill(self) -> None:
        """End the process, if there is one, and all processes it started."""
        if self.child is not None:
            processes.kill(self.child)
            if self.gone_at_ns is None:
                self.gone_at_ns = clock.now_ns() + _GONE_AFTER_NS

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; does nothing when the process is gone."""
        child = self.child
        # ValueError: it was closed just now.
        with contextlib.suppress(ProcessLookupError, ValueError):
            if child is not None and child.pid is not None:
                os.kill(child.pid, number)


@dataclass(slots=True)
class LaneHandle:
    """A lane, up or not."""

    lane_id: LaneId
    #: Cores it may be pinned to; empty when the kernel chooses.
    cores: tuple[int, ...]
    process: LaneProcess
    #: Number of its process's words in shared memory, see ``shared_pool``.
    words: int
    channel: socket.socket | None = None
    #: True once its process has said that it is up.
    up: bool = False
    #: Time by which the task that was told to stop must have ended.
    kill_at_ns: int | None = None
    told_to_stop: bool = False
    #: Core that its process is pinned to, -1 for none.
    core: int = -1
    #: True while it executes on that core.
    executes: bool = False
    suspended: bool = False
    #: True once it sent an invalid message: nothing it says counts any more.
    ignored: bool = False

    def connect(self, channel: socket.socket) -> None:
        """Start over with the channel of a new process."""
        self.channel = channel
        self.up = False
        # An earlier stop was meant for the process before.
        self.kill_at_ns = None
        self.ignored = False
        self.core = self.cores[0] if self.cores else -1

    def disconnect(self) -> None:
        """Close the channel of a process that is gone."""
        assert self.channel is not None
        self.channel.close()
        self.channel = None
        self.kill_at_ns = None
        self.executes = self.suspended = False

    def receive(self) -> bytes | None:
        """Return a packet of the lane, None when there is none, b"" when its end is closed."""
        if self.channel is None:
            return None
        try:
            return self.channel.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def suspend(self) -> None:
        """Stop its process where it is."""
        self.suspended, self.executes = True, False
        self.process.signal(signal.SIGSTOP)

    def ended(self) -> None:
        """Take note that its task ended; its process goes on, if it is suspended."""
        self.kill_at_ns = None
        self.executes = False
        self.process.has_worked = True
        self.resume()

    def resume(self) -> None:
        """Let its process go on, if it is suspended."""
        if self.suspended:
            self.suspended = False
            self.process.signal(signal.SIGCONT)
