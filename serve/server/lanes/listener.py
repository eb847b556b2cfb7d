"""Listens to all lanes: what they say, which processes end, and which restarted.

A process that ends is restarted with back-off, see ``restarts``; without where a run had ended in
it before. One whose lane sends an invalid message, or whose task does not end when told to, is
killed.
"""

import contextlib
import logging
import os
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Protocol

from serve.core.types import LaneId
from serve.ipc import messages
from serve.ipc.messages import FromLane
from serve.server import clock
from serve.server.lanes.lane_handle import LaneHandle, LaneProcess
from serve.server.lanes.restarts import Restarts, Started, discard

_log = logging.getLogger(__name__)

#: Longest time that `poll` waits.
_WATCH_NS = 10_000_000_000
#: Packets read from one lane before it is the others' turn.
_PACKETS_AT_ONCE = 64
#: Messages of calibrators, and, for lanes in processes of their own, of those on a device.
_OF_OTHERS: dict[bool, tuple[type, ...]] = {
    False: (messages.ModelProbed, messages.Progress),
    True: (
        messages.ModelProbed,
        messages.Progress,
        messages.MemoryTaken,
        messages.TakesLess,
        messages.HotSetHeld,
    ),
}


@dataclass(frozen=True, slots=True)
class LaneUp:
    """A lane's process started and waits for its models."""


@dataclass(frozen=True, slots=True)
class LaneDown:
    """A process ended, and with it all its lanes; it is restarted by itself."""

    #: All lanes of the process; reported once, as said by the first of them.
    lane_ids: tuple[LaneId, ...]


@dataclass(frozen=True, slots=True)
class LaneGone:
    """Nothing is left of a lane that was removed."""


@dataclass(frozen=True, slots=True)
class SuccessorReady:
    """A process that holds all models waits to take the lane's place, see ``successors``."""


class PacketPort(Protocol):
    """Reads lanes' channels in the listener's place. For the thread that polls."""

    def watch_packets(self, fd: int) -> None:
        """Read the packets of `fd`, for `LaneListener.taken`."""
        ...

    def unwatch_packets(self, fd: int) -> None:
        """Leave `fd` alone."""
        ...


#: What a lane said, or what happened to it.
Said = FromLane | LaneUp | LaneDown | LaneGone | SuccessorReady
Reports = list[tuple[LaneId, Said]]


class LaneListener:
    """Waits for the lanes of some processes. Only one thread may poll."""

    def __init__(
        self,
        lane_processes: Sequence[LaneProcess],
        start: Callable[[LaneProcess], Started],
    ) -> None:
        """`start` starts a process anew, or raises."""
        self._processes = lane_processes
        self._epoll = select.epoll()
        self._lane_by_fd: dict[int, LaneHandle] = {}
        self._process_by_fd: dict[int, LaneProcess] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        #: Reads the channels; None: the listener does.
        self._port: PacketPort | None = None
        self._successors_ready: SimpleQueue[LaneId] = SimpleQueue()
        #: Processes that are to end for good.
        self._to_remove: SimpleQueue[LaneProcess] = SimpleQueue()
        #: Why models may do what they should not, as lanes have said; empty when none did.
        self.unconfined = ""
        self.restarts = Restarts(start, self.wake)

    def wake(self) -> None:
        """Make a waiting `poll` return. Any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def successor_is_ready(self, lane_id: LaneId) -> None:
        """Have `poll` report ``SuccessorReady`` for the lane. Any thread."""
        self._successors_ready.put(lane_id)
        self.wake()

    def remove(self, process: LaneProcess) -> None:
        """End the process of one lane for good, and have `poll` report ``LaneGone``. Any thread."""
        self._to_remove.put(process)
        self.wake()

    def kill(self, lane: LaneHandle, why: str) -> None:
        """Kill the lane's process and ignore what the lane says; `poll` reports its end."""
        _log.error("lane %d: %s; killing its process", lane.lane_id, why)
        lane.ignored = True
        lane.process.kill()
        self.wake()

    def poll(self, until_ns: int | None) -> Reports:
        """Wait for lanes, for `wake` or until `until_ns`; return what lanes said, in order."""
        now_ns = clock.now_ns()
        reports = self._enforce_deadlines(now_ns)
        timeout_s = 0.0 if reports else max(0.0, (self.due_ns(until_ns) - now_ns) / 1e9)
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
                self._attach_restarted(reports)
                while not self._successors_ready.empty():
                    reports.append((self._successors_ready.get(), SuccessorReady()))
                while not self._to_remove.empty():
                    self._remove(self._to_remove.get(), reports)
            elif fd in self._process_by_fd:
                self._lose(self._process_by_fd[fd], reports)
            elif fd in self._lane_by_fd:  # else it was closed with another of its process
                self._read(self._lane_by_fd[fd], reports)
        return reports

    def lend_channels(self, port: PacketPort | None) -> None:
        """Have `port` read the lanes' channels from now on; None: the listener again."""
        fds = tuple(self._lane_by_fd)
        for fd in fds:
            self._unwatch(fd)
        self._port = port
        for fd in fds:
            self._watch(fd)

    def taken(self, packets: Sequence[tuple[int, bytes]]) -> Reports:
        """Return what lanes said in packets that a port has read, by descriptor."""
        reports: Reports = []
        for fd, packet in packets:
            lane = self._lane_by_fd[fd]
            if packet:
                self._take(lane, packet, reports)
            else:
                self._hung_up(lane, reports)
        return reports

    def due_ns(self, until_ns: int | None) -> int:
        """Return when to poll though no lane says anything, at `until_ns` at the latest."""
        due_ns = clock.now_ns() + _WATCH_NS
        if until_ns is not None and until_ns < due_ns:
            due_ns = until_ns
        for process in self._processes:
            if process.gone_at_ns is not None and process.gone_at_ns < due_ns:
                due_ns = process.gone_at_ns
            for lane in process.lanes:
                if lane.kill_at_ns is not None and lane.kill_at_ns < due_ns:
                    due_ns = lane.kill_at_ns
        return due_ns

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` would report something."""
        return self._epoll.fileno()

    def attach(
        self, process: LaneProcess, child: BaseProcess, channels: list[socket.socket]
    ) -> None:
        """Listen to a process that was started, through the channels of its lanes.

        Ends it, and raises RuntimeError, when the thread that would restart it cannot be started.
        """
        try:
            self.restarts.began(process, process.name)
        except RuntimeError:
            discard((child, channels))
            raise
        process.child, process.has_worked = child, False
        for lane, channel in zip(process.lanes, channels, strict=True):
            lane.connect(channel)
            self._lane_by_fd[channel.fileno()] = lane
            self._watch(channel.fileno())
        assert child.pid is not None
        try:
            process.pidfd = os.pidfd_open(child.pid)
        except OSError as error:
            # It is gone already, as its channels will tell, or the system has no pidfd.
            _log.debug("%s: no descriptor of its process: %s", process.name, error)
            return
        self._process_by_fd[process.pidfd] = process
        self._epoll.register(process.pidfd, select.EPOLLIN)

    def detach(self, process: LaneProcess) -> BaseProcess:
        """Close all descriptors of a process; return it for the caller to reap."""
        assert process.child is not None
        # Forget it before the system does, so that nobody signals a process id that is used again.
        child, process.child = process.child, None
        for lane in process.lanes:
            assert lane.channel is not None
            self._unwatch(lane.channel.fileno())
            del self._lane_by_fd[lane.channel.fileno()]
            lane.disconnect()
        if process.pidfd is not None:
            self._epoll.unregister(process.pidfd)
            del self._process_by_fd[process.pidfd]
            os.close(process.pidfd)
        process.pidfd = process.gone_at_ns = None
        return child

    def close(self) -> None:
        """Restart nothing any more and close all descriptors."""
        self.restarts.end()
        self._epoll.close()
        os.close(self._wake_fd)

    def _watch(self, fd: int) -> None:
        if self._port is None:
            self._epoll.register(fd, select.EPOLLIN)
        else:
            self._port.watch_packets(fd)

    def _unwatch(self, fd: int) -> None:
        """Stop watching a lane's channel; does nothing when it is not watched."""
        if self._port is None:
            with contextlib.suppress(FileNotFoundError):
                self._epoll.unregister(fd)
        else:
            self._port.unwatch_packets(fd)

    def _read(self, lane: LaneHandle, reports: Reports) -> None:
        """Report what the lane says now, up to the end of its run."""
        for _ in range(_PACKETS_AT_ONCE):
            packet = lane.receive()
            if packet is None:
                return
            if not packet:
                self._hung_up(lane, reports)
                return
            if self._take(lane, packet, reports):
                return

    def _take(self, lane: LaneHandle, packet: bytes, reports: Reports) -> bool:
        """Report what a packet says; return True at the end of a run."""
        message = self._decode(lane, packet)
        if message is not None:
            reports.append((lane.lane_id, message))
        return isinstance(message, messages.TaskDone | messages.TaskError)

    def _decode(self, lane: LaneHandle, packet: bytes) -> FromLane | LaneUp | None:
        """Return the message of a packet; for an invalid one, kill the lane and return None."""
        if lane.ignored:
            return None
        try:
            message = messages.decode_from_lane(packet)
        except Exception as error:
            # A model may write to any file of its process, this channel included.
            self.kill(lane, f"sent an invalid message: {error!r}")
            return None
        starts = isinstance(message, messages.LaneStarted)
        if starts is lane.up or isinstance(message, _OF_OTHERS[lane.process.place is None]):
            self.kill(lane, f"sent {type(message).__name__}, for which it has no reason")
            return None
        if not isinstance(message, messages.LaneStarted):
            return message
        lane.up = True
        _log.info("lane %d: process %d up, cores %s", lane.lane_id, message.pid, lane.cores)
        if message.unconfined and not self.unconfined:
            self.unconfined = message.unconfined
            _log.warning("models may do more than they should: %s", message.unconfined)
        return LaneUp()

    def _hung_up(self, lane: LaneHandle, reports: Reports) -> None:
        """Kill a process that closed a channel, if it has not ended already."""
        process = lane.process
        process.kill()
        if process.pidfd is None:
            self._lose(process, reports)
            return
        assert lane.channel is not None
        # It would be reported again and again until the process is gone.
        self._unwatch(lane.channel.fileno())

    def _lose(self, process: LaneProcess, reports: Reports) -> None:
        """Report the last messages of a process that is gone and its end; restart it."""
        # Processes that it started may still write to its inputs.
        process.kill()
        for lane in process.lanes:
            for _ in range(_PACKETS_AT_ONCE):
                if not (packet := lane.receive()):
                    break
                self._take(lane, packet, reports)
        if process.has_worked:
            # It starts well, so what ended it is what it ran, for which there is quarantine, or
            # the system. All other models wait for it.
            self.restarts.forgive(process)
        self.restarts.restart(process, self.detach(process))
        lane_ids = tuple(lane.lane_id for lane in process.lanes)
        reports.append((lane_ids[0], LaneDown(lane_ids)))

    def _remove(self, process: LaneProcess, reports: Reports) -> None:
        """End the process, which is up, restarting, or was never started."""
        self.restarts.end_role(process)
        self._attach_restarted(reports)  # it may have started just before
        if process.child is not None:
            self.restarts.dismiss(process, self.detach(process))
        self.restarts.forget(process)
        reports.append((process.lanes[0].lane_id, LaneGone()))

    def _enforce_deadlines(self, now_ns: int) -> Reports:
        """Kill processes whose task does not end; report those that do not even die as lost."""
        reports: Reports = []
        for process in self._processes:
            for lane in process.lanes:
                if lane.kill_at_ns is not None and now_ns >= lane.kill_at_ns:
                    lane.kill_at_ns = None
                    self.kill(lane, "the task does not end")
            if process.gone_at_ns is not None and now_ns >= process.gone_at_ns:
                _log.error("%s: killed, and does not end", process.name)
                self._lose(process, reports)
        return reports

    def _attach_restarted(self, reports: Reports) -> None:
        for process, (child, channels) in self.restarts.taken():
            self.attach(process, child, channels)
            for lane in process.lanes:
                self._read(lane, reports)
