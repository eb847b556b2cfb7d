"""The lane processes: started from a fork server, pinned, watched, restarted with back-off.

A process holds one lane, which can then be suspended, or all lanes of one device as threads.
Does not decide what runs: the driver polls for what lanes said and is told when one is lost.
Only the driver's own thread calls `poll`; `send` may be called from any thread.
"""

import atexit
import contextlib
import logging
import os
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess

import msgspec

from serve.core.types import LaneId, LaneLook, LaneState, Nanos, TaskId
from serve.ipc import messages
from serve.ipc.messages import MAX_PACKET_BYTES, FromLane, Message, RunTask, Stop
from serve.ipc.private_memory import private_bytes_of
from serve.ipc.setup import DevicePlace, LaneSetup
from serve.ipc.shared_pool import SharedPool
from serve.ipc.stop_word import SIGNAL as STOP_SIGNAL
from serve.server import clock
from serve.server.lanes import processes
from serve.server.lanes.calibrators import Calibrators
from serve.server.lanes.looks import look
from serve.server.lanes.successors import Successors

_log = logging.getLogger(__name__)

_STOP_WAIT_S = 2.0
#: `poll` returns this often at least.
_WATCH_NS = 10_000_000_000
#: A run told to stop that goes on for so long is ended with its process.
_STOP_GRACE_NS = 2_000_000_000
#: A killed process that the system does not end for so long is taken for gone: it comes back to no
#: instruction of its own.
_GONE_AFTER_NS = 5_000_000_000
#: Of one lane, before the others' turn.
_PACKETS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class LaneUp:
    """A lane's process started and waits for its models."""


@dataclass(frozen=True, slots=True)
class LaneDown:
    """A process ended, and with it all its lanes; a new one follows by itself."""

    #: Of the process; said once, under the first one's id.
    lane_ids: tuple[LaneId, ...]


#: What a lane says, and what is told of it.
Said = FromLane | LaneUp | LaneDown


@dataclass(slots=True)
class _Host:
    """A process and the lanes in it."""

    name: str
    #: On a device they share; None: the process is the one lane's own.
    place: DevicePlace | None
    lanes: list["_Lane"]
    process: BaseProcess | None = None
    #: Readable when the process has ended, whatever else has its files open; None where the system
    #: has no such thing: then it has ended when nobody else holds its lanes' channels.
    pidfd: int | None = None
    #: It was killed or closed a channel: when it is taken for gone at the latest.
    gone_at_ns: int | None = None

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid


@dataclass(slots=True)
class _Lane:
    lane_id: LaneId
    cores: tuple[int, ...]
    host: _Host
    channel: socket.socket | None = None
    #: When the task that it was told to stop must have ended.
    kill_at_ns: int | None = None
    told_to_stop: bool = False
    #: Core its process is pinned to, and whether it executes there now.
    core: int = -1
    executes: bool = False
    stopped: bool = False
    #: What its process says is ignored: it has said nonsense.
    ignored: bool = False


class LanePool:
    """All lanes of one device, or of several equal ones."""

    def __init__(
        self,
        lane_cores: tuple[tuple[int, ...], ...],
        shared: SharedPool,
        keep_bytes: int,
        threads: int = 1,
        places: Sequence[DevicePlace] = (),
        niceness: int = 0,
    ) -> None:
        """Make one lane for each of `lane_cores`, in a process of its own.

        With `places`, make that many on each place, as threads of one process; the lanes of the
        first place come first. `niceness` is that of lanes that compute on this machine's cores.
        """
        #: Lanes compute for milliseconds, the server's threads for microseconds. A server thread
        #: that shares a core with a lane of its own niceness waits for a tick of the kernel, 4 ms
        #: (bench/host/wakeups.py). Lanes of a GPU launch for microseconds too: nice ones would
        #: leave the device without work beside any busy process.
        self._niceness = niceness if all(place.on_processor for place in places) else 0
        self._shared = shared
        self._keep_bytes = keep_bytes
        self._threads = threads
        self._lanes: dict[LaneId, _Lane] = {}
        self._hosts = [_Host(f"device {place.name}", place, []) for place in places]
        if not places:
            self._hosts = [_Host(f"lane {index}", None, []) for index in range(len(lane_cores))]
        for number, host in enumerate(self._hosts):
            for cores in lane_cores if places else lane_cores[number : number + 1]:
                lane = _Lane(LaneId(len(self._lanes)), cores, host)
                host.lanes.append(lane)
                self._lanes[lane.lane_id] = lane
        self._cores = sorted({core for cores in lane_cores for core in cores})
        self._epoll = select.epoll()
        self._lane_by_fd: dict[int, _Lane] = {}
        self._host_by_fd: dict[int, _Host] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._successors = Successors(self._start, self.wake)
        self.calibrators = Calibrators()

    @property
    def lane_ids(self) -> tuple[LaneId, ...]:
        """All lanes, up or not."""
        return tuple(self._lanes)

    @property
    def lane_ids_by_device(self) -> tuple[tuple[LaneId, ...], ...]:
        """The same for each device."""
        if self._hosts[0].place is None:
            return (self.lane_ids,)
        return tuple(tuple(lane.lane_id for lane in host.lanes) for host in self._hosts)

    @property
    def restarts(self) -> int:
        """How often processes of lanes were started again."""
        return self._successors.count

    def pids(self) -> dict[LaneId, int]:
        """Process id of each lane that has a process."""
        return {
            lane.lane_id: lane.host.pid
            for lane in self._lanes.values()
            if lane.host.pid is not None
        }

    def start(self) -> None:
        """Start every lane's process; `poll` tells when each is up."""
        atexit.register(self._kill)
        for host in self._hosts:
            self._adopt(host, *self._start(host))

    def send(self, lane_id: LaneId, message: Message) -> None:
        """Send to a lane; one that cannot take it is lost, as `poll` will tell.

        Nothing is raised, and no message is left out between others: a lane that is gone, or
        has hundreds of messages to read already, gets none after this one either.
        """
        lane = self._lanes[lane_id]
        channel = lane.channel
        if channel is None:
            return
        try:
            channel.send(messages.encode(message), socket.MSG_DONTWAIT)
        except OSError as error:
            self.kill(lane_id, f"cannot be reached: {error}")

    def kill(self, lane_id: LaneId, why: str) -> None:
        """End the lane's process, with all that it started; `poll` tells when it is gone."""
        lane = self._lanes[lane_id]
        _log.error("lane %d: %s; killing its process", lane_id, why)
        lane.ignored = True
        _kill(lane.host)
        self.wake()

    def launch(self, lane_id: LaneId, task: RunTask) -> None:
        """Have an idle lane run a task on a core of its own."""
        lane = self._lanes[lane_id]
        self._take_core(lane)
        if lane.told_to_stop:
            # Perhaps at this very task, which was in a union then.
            lane.told_to_stop = False
            self._shared.write_stop(lane_id, 0)
        self.send(lane_id, task)

    def look(self, lane_id: LaneId, task_id: TaskId) -> LaneLook | None:
        """What the lane, which the task was launched on, does; None: its process is gone."""
        host = self._lanes[lane_id].host
        pid = host.pid
        seen = None if pid is None else look(pid)
        if seen is None or seen.state is LaneState.STOPPED:
            return seen
        if host.place is not None:
            # What a device does for the lane, its process's threads do not show.
            return msgspec.structs.replace(seen, state=LaneState.BUSY, cpu_ns=Nanos(clock.now_ns()))
        if seen.state is LaneState.ASLEEP and self._shared.runs(lane_id) != task_id:
            return msgspec.structs.replace(seen, state=LaneState.IDLE)
        return seen

    def suspend(self, lane_id: LaneId) -> None:
        """Stop the lane's process, which is its own, where it is; its core is free."""
        lane = self._lanes[lane_id]
        lane.stopped, lane.executes = True, False
        _signal(lane, signal.SIGSTOP)

    def resume(self, lane_id: LaneId) -> None:
        """Let the lane's process go on, on a core of its own."""
        lane = self._lanes[lane_id]
        self._take_core(lane)
        self._continue(lane)

    def stop_run(self, lane_id: LaneId, task_id: TaskId) -> None:
        """End the run of that task, if it still runs there; a suspended lane goes on for it.

        The lane says how it ended, as ever, or is lost: no run outlives this for long.
        """
        lane = self._lanes[lane_id]
        self._shared.write_stop(lane_id, task_id)
        lane.told_to_stop = True
        if lane.host.place is not None:
            # It ends at its next allocation; others run in its process.
            return
        lane.kill_at_ns = clock.now_ns() + _STOP_GRACE_NS
        _signal(lane, STOP_SIGNAL)
        self._continue(lane)
        self.wake()

    def recycle(self, lane_id: LaneId) -> None:
        """End an idle lane's process; another follows at once."""
        host = self._lanes[lane_id].host
        self._successors.forgive(host)
        _kill(host)

    def memory_bytes(self) -> dict[LaneId, int]:
        """Private memory of each process of lanes, by its first lane."""
        found = {}
        for host in self._hosts:
            pid = host.pid
            size_bytes = None if pid is None else private_bytes_of(pid)
            if size_bytes is not None:
                found[host.lanes[0].lane_id] = size_bytes
        return found

    def ended(self, lane_id: LaneId) -> None:
        """The lane's task ended; the lane is idle, and runs if it was stopped just then."""
        lane = self._lanes[lane_id]
        lane.kill_at_ns = None
        lane.executes = False
        self._continue(lane)

    def _continue(self, lane: _Lane) -> None:
        if lane.stopped:
            lane.stopped = False
            _signal(lane, signal.SIGCONT)

    def _take_core(self, lane: _Lane) -> None:
        """Pin the lane to a core on which no other lane executes: its own, if that is one.

        There are more lanes than cores when tasks are suspended, so lanes cannot own cores.
        """
        taken = {other.core for other in self._lanes.values() if other.executes}
        lane.executes = True
        if lane.core not in taken:
            return
        free = next((core for core in self._cores if core not in taken), None)
        if free is None or lane.host.pid is None:
            return
        lane.core = free
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(lane.host.pid, (free,))

    def wake(self) -> None:
        """Make a waiting `poll` return. Any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def poll(self, until_ns: int | None) -> list[tuple[LaneId, Said]]:
        """Wait for lanes, for `wake` or until `until_ns`; what lanes said, in order."""
        now = clock.now_ns()
        said = self._attend(now)
        dues = [now + _WATCH_NS]
        if until_ns is not None:
            dues.append(until_ns)
        dues += [host.gone_at_ns for host in self._hosts if host.gone_at_ns is not None]
        dues += [lane.kill_at_ns for lane in self._lanes.values() if lane.kill_at_ns is not None]
        timeout_s = 0.0 if said else max(0.0, (min(dues) - now) / 1e9)
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
                self._adopt_started(said)
            elif fd in self._host_by_fd:
                said += self._lose(self._host_by_fd[fd])
            elif fd in self._lane_by_fd:  # else it was closed with another of its process
                self._read(self._lane_by_fd[fd], said)
        return said

    def _read(self, lane: _Lane, said: list[tuple[LaneId, Said]]) -> None:
        for _ in range(_PACKETS_AT_ONCE):
            packet = _receive(lane)
            if packet is None:
                return
            if not packet:
                said += self._hung_up(lane)
                return
            message = self._understood(lane, packet)
            if message is not None:
                said.append((lane.lane_id, message))
            if isinstance(message, messages.TaskDone | messages.TaskError):
                return

    def _understood(self, lane: _Lane, packet: bytes) -> FromLane | LaneUp | None:
        """What the packet says; None, and the lane is lost, where that is nothing."""
        if lane.ignored:
            return None
        try:
            message = messages.decode_from_lane(packet)
        except Exception as error:
            # A model may write into any file of its process, also into this channel.
            self.kill(lane.lane_id, f"said what no lane says: {error!r}")
            return None
        if not isinstance(message, messages.LaneStarted):
            return message
        _log.info("lane %d: process %d up, cores %s", lane.lane_id, message.pid, lane.cores)
        return LaneUp()

    def _hung_up(self, lane: _Lane) -> list[tuple[LaneId, Said]]:
        """The lane's end of the channel is closed: its process has ended, or has to."""
        host = lane.host
        _kill(host)
        if host.pidfd is None:
            return self._lose(host)
        assert lane.channel is not None
        # It would be told again and again until the process is gone.
        self._epoll.unregister(lane.channel)
        return []

    def _lose(self, host: _Host) -> list[tuple[LaneId, Said]]:
        """A process is gone: the last that its lanes said, and then that they are down."""
        # What it started may still write where its inputs lie.
        _kill(host)
        said: list[tuple[LaneId, Said]] = []
        for lane in host.lanes:
            for _ in range(_PACKETS_AT_ONCE):
                if not (packet := _receive(lane)):
                    break
                message = self._understood(lane, packet)
                if message is not None:
                    said.append((lane.lane_id, message))
        self._successors.follow(host, self._let_go(host))
        lane_ids = tuple(lane.lane_id for lane in host.lanes)
        said.append((lane_ids[0], LaneDown(lane_ids)))
        return said

    def _let_go(self, host: _Host) -> BaseProcess:
        """Close all that leads to the process, which is the caller's to free."""
        assert host.process is not None
        # First from the lanes, then from the system: others must not signal a reused number.
        process, host.process = host.process, None
        for lane in host.lanes:
            lane.kill_at_ns = None
            lane.executes = lane.stopped = False
            assert lane.channel is not None
            with contextlib.suppress(FileNotFoundError):  # it was closed at its other end first
                self._epoll.unregister(lane.channel)
            del self._lane_by_fd[lane.channel.fileno()]
            lane.channel.close()
            lane.channel = None
        if host.pidfd is not None:
            self._epoll.unregister(host.pidfd)
            del self._host_by_fd[host.pidfd]
            os.close(host.pidfd)
        host.pidfd = host.gone_at_ns = None
        return process

    def _attend(self, now_ns: int) -> list[tuple[LaneId, Said]]:
        """Kill processes in which a task does not end; lose those that do not even die."""
        for lane in self._lanes.values():
            if lane.kill_at_ns is not None and now_ns >= lane.kill_at_ns:
                lane.kill_at_ns = None
                self.kill(lane.lane_id, "the task does not end")
        said: list[tuple[LaneId, Said]] = []
        for host in self._hosts:
            if host.gone_at_ns is not None and now_ns >= host.gone_at_ns:
                _log.error("%s: killed, and does not end", host.name)
                said += self._lose(host)
        return said

    def _adopt_started(self, said: list[tuple[LaneId, Said]]) -> None:
        for host, (process, channels) in self._successors.taken():
            self._adopt(host, process, channels)
            for lane in host.lanes:
                self._read(lane, said)

    def _adopt(self, host: _Host, process: BaseProcess, channels: list[socket.socket]) -> None:
        host.process = process
        self._successors.began(host, host.name)
        for lane, channel in zip(host.lanes, channels, strict=True):
            lane.channel = channel
            # A stop may have been meant for the process before.
            lane.kill_at_ns = None
            lane.ignored = False
            lane.core = lane.cores[0] if lane.cores else -1
            self._lane_by_fd[channel.fileno()] = lane
            self._epoll.register(channel, select.EPOLLIN)
        assert process.pid is not None
        try:
            host.pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            # Gone already, as its channels tell; or the system does not have it.
            _log.debug("%s: no descriptor of its process: %s", host.name, error)
            return
        self._host_by_fd[host.pidfd] = host
        self._epoll.register(host.pidfd, select.EPOLLIN)

    def _start(self, host: _Host) -> tuple[BaseProcess, list[socket.socket]]:
        """A new process for the host, and our ends of its lanes' channels in their order."""
        setup = self._setup(host.name, host, host.place, host.lanes[0].lane_id)
        return processes.start(setup, len(host.lanes), self._shared.fd)

    def _setup(self, name: str, host: _Host, place: DevicePlace | None, number: int) -> LaneSetup:
        """`number` tells where the words of the process's first lane lie; the others' follow."""
        return LaneSetup(
            name=name,
            cores=host.lanes[0].cores,
            threads=self._threads,
            pool_capacity_bytes=self._shared.capacity_bytes,
            words_offset_bytes=self._shared.words_offset_bytes(number),
            log_level=logging.getLogger().getEffectiveLevel(),
            keep_bytes=self._keep_bytes,
            niceness=self._niceness,
            place=place,
        )

    def calibrator(self) -> AbstractContextManager[processes.Calibrator]:
        """A lane of its own for one model, so that no serving lane is kept from its tasks.

        On the first device, and good for all. Raises NotReady while the server stops.
        """
        host = self._hosts[0]
        place = None if host.place is None else host.place.for_calibration()
        setup = self._setup("calibrator", host, place, len(self._lanes))
        setup = replace(setup, niceness=min(self._niceness, self.calibrators.niceness))
        return self.calibrators.start(setup, self._shared.fd)

    def stop(self) -> None:
        """End every process. After this nothing of the pool runs."""
        self.calibrators.interrupt()
        atexit.unregister(self._kill)
        for host in self._hosts:
            for lane in host.lanes:
                self._continue(lane)
                self.send(lane.lane_id, Stop())
        ends_ns = clock.now_ns() + int(_STOP_WAIT_S * 1e9)
        for host in self._hosts:
            if host.process is not None:
                host.process.join(max(0.0, (ends_ns - clock.now_ns()) / 1e9))
                _kill(host)
                processes.reap(self._let_go(host))
        self._successors.end()
        self._epoll.close()
        os.close(self._wake_fd)

    def _kill(self) -> None:
        """The interpreter exits without `stop`; lanes would have it wait for them for ever."""
        for host in self._hosts:
            _kill(host)


def _kill(host: _Host) -> None:
    """End the process, if there is one, and all that it started."""
    process = host.process
    if process is not None:
        processes.kill(process)
        if host.gone_at_ns is None:
            host.gone_at_ns = clock.now_ns() + _GONE_AFTER_NS


def _receive(lane: _Lane) -> bytes | None:
    """A packet from the lane; empty: its process is gone; None: it says nothing now."""
    if lane.channel is None:
        return None
    try:
        return lane.channel.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _signal(lane: _Lane, number: signal.Signals) -> None:
    """Send a signal; a process that is gone is noticed by `poll`."""
    process = lane.host.process
    # ValueError: it was buried just now.
    with contextlib.suppress(ProcessLookupError, ValueError):
        if process is not None and process.pid is not None:
            os.kill(process.pid, number)
