"""The lane processes: started from a fork server, pinned, watched, restarted with back-off.

A process holds one lane, which can then be suspended, or all lanes of one device as threads.
Does not decide what runs: the driver polls for what lanes said and is told when one is lost.
Only the driver's own thread calls `poll`; `send` may be called from any thread, and a thread that
waits for one lane's answer may read it itself, see `lend`.
"""

import atexit
import contextlib
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue

from serve.core.types import LaneId, TaskId
from serve.runtime import clock, messages, processes
from serve.runtime.calibrators import Calibrators
from serve.runtime.entry import DevicePlace, LaneSetup
from serve.runtime.heap import private_bytes_of
from serve.runtime.messages import MAX_PACKET_BYTES, FromLane, Message, RunTask, Stop
from serve.runtime.shm import SharedPool
from serve.runtime.stopping import SIGNAL as STOP_SIGNAL

_log = logging.getLogger(__name__)

_BACK_OFF_FIRST_NS = 50_000_000
_BACK_OFF_MOST_NS = 10_000_000_000
#: A lane that lived this long starts its back-off anew.
_HEALTHY_AFTER_NS = 30_000_000_000
_STOP_WAIT_S = 2.0
#: `poll` looks after hung runs this often at least.
_WATCH_NS = 10_000_000_000
#: A run told to stop that goes on for so long is ended with its process.
_STOP_GRACE_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class LaneUp:
    """A lane's process started and waits for its models."""


@dataclass(frozen=True, slots=True)
class LaneDown:
    """A process ended, and with it all its lanes; a new one follows by itself."""

    reason: str
    #: Of the process; said once, under the first one's id.
    lane_ids: tuple[LaneId, ...]


@dataclass(slots=True)
class _Host:
    """A process and the lanes in it."""

    name: str
    #: On a device they share; None: the process is the one lane's own.
    place: DevicePlace | None
    lanes: list["_Lane"]
    process: BaseProcess | None = None
    started_ns: int = 0
    failures: int = 0
    restart_at_ns: int | None = None
    restarts: int = 0

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid


@dataclass(slots=True)
class _Lane:
    lane_id: LaneId
    cores: tuple[int, ...]
    host: _Host
    channel: socket.socket | None = None
    #: When the task it runs must have ended, else the lane is taken for hung.
    kill_at_ns: int | None = None
    #: While it is suspended: what is left of that time.
    left_ns: int | None = None
    #: Core its process is pinned to, and whether it executes there now.
    core: int = -1
    executes: bool = False
    stopped: bool = False
    #: `poll` is not told what the lane says, see `lend`.
    lent: bool = False


class LanePool:
    """All lanes of one device, or of several equal ones."""

    def __init__(
        self,
        lane_cores: tuple[tuple[int, ...], ...],
        shared: SharedPool,
        keep_bytes: int,
        threads: int = 1,
        places: Sequence[DevicePlace] = (),
    ) -> None:
        """One lane for each of `lane_cores`, in a process of its own.

        With `places`, so many on each, as threads of one process there; those of the first place
        come first.
        """
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
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._started: SimpleQueue[tuple[_Host, BaseProcess, list[socket.socket]]] = SimpleQueue()
        self._restarting: dict[LaneId, threading.Thread] = {}
        self._stopping = False
        self.calibrators = Calibrators(self._executes_on)

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
        return sum(host.restarts for host in self._hosts)

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
            _log.warning("lane %d: cannot be reached, killing it: %s", lane_id, error)
            _signal(lane, signal.SIGKILL)

    def launch(self, lane_id: LaneId, task: RunTask, limit_ns: int) -> None:
        """Have an idle lane run a task on a core of its own; it is killed after `limit_ns`."""
        lane = self._lanes[lane_id]
        self._take_core(lane)
        lane.kill_at_ns = clock.now_ns() + limit_ns
        self.send(lane_id, task)
        self.calibrators.look()

    def suspend(self, lane_id: LaneId) -> None:
        """Stop the lane's process, which is its own, where it is; its core is free."""
        lane = self._lanes[lane_id]
        lane.stopped, lane.executes = True, False
        if lane.kill_at_ns is not None:
            lane.left_ns, lane.kill_at_ns = lane.kill_at_ns - clock.now_ns(), None
        _signal(lane, signal.SIGSTOP)
        self.calibrators.look()

    def resume(self, lane_id: LaneId) -> None:
        """Let the lane's process go on, on a core of its own."""
        lane = self._lanes[lane_id]
        self._take_core(lane)
        if lane.left_ns is not None:
            lane.kill_at_ns, lane.left_ns = clock.now_ns() + lane.left_ns, None
        self._continue(lane)
        self.calibrators.look()

    def stop_run(self, lane_id: LaneId, task_id: TaskId) -> None:
        """End the run of that task, if it still runs there; a suspended lane goes on for it.

        The lane says how it ended, as ever, or is lost: no run outlives this for long.
        """
        lane = self._lanes[lane_id]
        self._shared.write_word(lane_id, task_id)
        if lane.host.place is not None:
            # It ends at its next allocation; others run in its process.
            return
        lane.kill_at_ns = clock.now_ns() + _STOP_GRACE_NS
        lane.left_ns = None
        _signal(lane, STOP_SIGNAL)
        self._continue(lane)
        self.wake()

    def recycle(self, lane_id: LaneId) -> None:
        """End an idle lane's process; another follows at once."""
        lane = self._lanes[lane_id]
        lane.host.failures = 0
        _signal(lane, signal.SIGKILL)

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
        lane.kill_at_ns = lane.left_ns = None
        lane.executes = False
        self._continue(lane)
        self.take_back(lane_id)
        self.calibrators.look()

    def lend(self, lane_id: LaneId) -> bool:
        """Leave the lane to a thread that waits for its answer; False when the lane is gone.

        `poll` is then told only of its end, until `ended` or `take_back`. Driver's lock.
        """
        lane = self._lanes[lane_id]
        lane.lent = self._watch(lane, 0)
        return lane.lent

    def take_back(self, lane_id: LaneId) -> None:
        """`poll` is told again what the lane says. Driver's lock."""
        lane = self._lanes[lane_id]
        if lane.lent:
            lane.lent = False
            self._watch(lane, select.EPOLLIN)

    def overhear(self, lane_id: LaneId, bell: int) -> FromLane | LaneUp | None:
        """Wait for what a lane that was lent says.

        None: the eventfd `bell` rang first, `poll` has read it, or the lane is gone, which `poll`
        tells.
        """
        lane = self._lanes[lane_id]
        channel = lane.channel
        ready = select.poll()
        ready.register(bell, select.POLLIN)
        try:
            if channel is not None:
                ready.register(channel, select.POLLIN)
        except ValueError:  # closed just now
            return None
        if bell in (fd for fd, _ in ready.poll()):
            return None
        packet = _receive(lane)
        return self._understand(lane, packet) if packet else None

    def _watch(self, lane: _Lane, events: int) -> bool:
        """Have `poll` told of these events, and of the lane's end; False when it is gone."""
        try:
            if lane.channel is None:
                return False
            self._epoll.modify(lane.channel, events)
        except (OSError, ValueError):
            return False  # just now
        return True

    def _executes_on(self, cores: Sequence[int]) -> bool:
        """Whether a lane executes on one of them, or on any where lanes are pinned to none."""
        return any(
            lane.executes and (not cores or lane.core in cores) for lane in self._lanes.values()
        )

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

    def poll(self, until_ns: int | None) -> list[tuple[LaneId, FromLane | LaneUp | LaneDown]]:
        """Wait for lanes, for `wake` or until `until_ns`; what lanes said, in order."""
        now = clock.now_ns()
        self._attend(now)
        dues = [now + _WATCH_NS]
        if until_ns is not None:
            dues.append(until_ns)
        dues += [host.restart_at_ns for host in self._hosts if host.restart_at_ns is not None]
        dues += [lane.kill_at_ns for lane in self._lanes.values() if lane.kill_at_ns is not None]
        timeout_s = max(0.0, (min(dues) - now) / 1e9)
        said: list[tuple[LaneId, FromLane | LaneUp | LaneDown]] = []
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
                self._adopt_started(said)
            elif fd in self._lane_by_fd:  # else it was closed with another of its process
                self._read(self._lane_by_fd[fd], said)
        return said

    def _read(self, lane: _Lane, said: list[tuple[LaneId, FromLane | LaneUp | LaneDown]]) -> None:
        while (packet := _receive(lane)) is not None:
            if not packet:
                said += self._lose(lane.host)
                return
            message = self._understand(lane, packet)
            said.append((lane.lane_id, message))
            if isinstance(message, messages.TaskDone | messages.TaskError):
                return

    def _understand(self, lane: _Lane, packet: bytes) -> FromLane | LaneUp:
        message = messages.decode_from_lane(packet)
        if not isinstance(message, messages.LaneStarted):
            return message
        _log.info("lane %d: process %d up, cores %s", lane.lane_id, message.pid, lane.cores)
        return LaneUp()

    def _lose(self, host: _Host) -> list[tuple[LaneId, FromLane | LaneUp | LaneDown]]:
        """A process ended: the last that its lanes said, and then that they are down."""
        reason = self._bury(host)
        said: list[tuple[LaneId, FromLane | LaneUp | LaneDown]] = []
        for lane in host.lanes:
            while packet := _receive(lane):
                said.append((lane.lane_id, self._understand(lane, packet)))
            self._close(lane)
        lane_ids = tuple(lane.lane_id for lane in host.lanes)
        said.append((lane_ids[0], LaneDown(reason, lane_ids)))
        return said

    def _close(self, lane: _Lane) -> None:
        assert lane.channel is not None
        self._epoll.unregister(lane.channel)
        del self._lane_by_fd[lane.channel.fileno()]
        lane.channel.close()
        lane.channel = None
        lane.lent = False

    def _bury(self, host: _Host) -> str:
        """End and free a process that is ending, schedule its successor; says how it ended."""
        assert host.process is not None
        for lane in host.lanes:
            lane.kill_at_ns = lane.left_ns = None
            lane.executes = lane.stopped = False
        self.calibrators.look()
        # First from the lanes, then from the system: others must not signal a reused number.
        process, host.process = host.process, None
        reason = processes.reap(process)
        now = clock.now_ns()
        if now - host.started_ns > _HEALTHY_AFTER_NS:
            host.failures = 0
        back_off_ns = min(_BACK_OFF_MOST_NS, _BACK_OFF_FIRST_NS << min(host.failures, 20))
        host.failures += 1
        if not self._stopping:
            host.restart_at_ns = now + back_off_ns
            _log.warning("%s: lost (%s); restart in %.2f s", host.name, reason, back_off_ns / 1e9)
        return reason

    def _attend(self, now_ns: int) -> None:
        """Restart processes that are due, kill those in which a task hangs."""
        for lane in self._lanes.values():
            if lane.kill_at_ns is not None and now_ns >= lane.kill_at_ns:
                lane.kill_at_ns = None
                _log.error("lane %d: the task does not end; killing the process", lane.lane_id)
                if lane.host.process is not None:
                    lane.host.process.kill()
        for host in self._hosts:
            if host.restart_at_ns is not None and now_ns >= host.restart_at_ns:
                host.restart_at_ns = None
                host.restarts += 1
                # The fork server may have to be started anew, which takes seconds.
                thread = threading.Thread(
                    target=self._respawn, args=(host,), name=f"restart {host.name}", daemon=True
                )
                self._restarting[host.lanes[0].lane_id] = thread
                thread.start()

    def _respawn(self, host: _Host) -> None:
        try:
            process, channels = self._start(host)
        except (OSError, EOFError) as error:  # EOFError: the fork server died just then
            _log.error("%s: cannot be started: %r", host.name, error)
            host.restart_at_ns = clock.now_ns() + _BACK_OFF_MOST_NS
        else:
            self._started.put((host, process, channels))
        if not self._stopping:
            self.wake()

    def _adopt_started(self, said: list[tuple[LaneId, FromLane | LaneUp | LaneDown]]) -> None:
        while True:
            try:
                host, process, channels = self._started.get_nowait()
            except Empty:
                return
            self._adopt(host, process, channels)
            for lane in host.lanes:
                self._read(lane, said)

    def _adopt(self, host: _Host, process: BaseProcess, channels: list[socket.socket]) -> None:
        host.process, host.started_ns = process, clock.now_ns()
        for lane, channel in zip(host.lanes, channels, strict=True):
            lane.channel = channel
            # A stop may have been meant for the process before.
            lane.kill_at_ns = lane.left_ns = None
            lane.core = lane.cores[0] if lane.cores else -1
            self._lane_by_fd[channel.fileno()] = lane
            self._epoll.register(channel, select.EPOLLIN)

    def _start(self, host: _Host) -> tuple[BaseProcess, list[socket.socket]]:
        """A new process for the host, and our ends of its lanes' channels in their order."""
        setup = self._setup(host.name, host, host.place, host.lanes[0].lane_id)
        return processes.start(setup, len(host.lanes), self._shared.fd)

    def _setup(self, name: str, host: _Host, place: DevicePlace | None, word: int) -> LaneSetup:
        """`word` is the one that the first lane of the process stops at; the others' follow."""
        return LaneSetup(
            name=name,
            cores=host.lanes[0].cores,
            threads=self._threads,
            pool_capacity_bytes=self._shared.capacity_bytes,
            stop_word_offset_bytes=self._shared.word_offset_bytes(word),
            log_level=logging.getLogger().getEffectiveLevel(),
            keep_bytes=self._keep_bytes,
            place=place,
        )

    def calibrator(
        self, *, background: bool = False
    ) -> AbstractContextManager[processes.Calibrator]:
        """A lane of its own for one model, so that no serving lane is kept from its tasks.

        On the first device, and good for all. In the background it gets what lanes leave of the
        last core, which is the least busy. Raises NotReady while the server stops.
        """
        host = self._hosts[0]
        place = None if host.place is None else host.place.for_calibration()
        setup = self._setup("calibrator", host, place, len(self._lanes))
        setup = replace(setup, calibrates=True)
        if background:
            setup = replace(setup, background=True, cores=tuple(self._cores[-1:]))
        return self.calibrators.start(setup, self._shared.fd)

    def stop(self) -> None:
        """End every process. After this nothing of the pool runs."""
        self._stopping = True
        self.calibrators.interrupt()
        atexit.unregister(self._kill)
        for host in self._hosts:
            host.restart_at_ns = None
            for lane in host.lanes:
                self._continue(lane)
                self.send(lane.lane_id, Stop())
        ends_ns = clock.now_ns() + int(_STOP_WAIT_S * 1e9)
        for host in self._hosts:
            if host.process is not None:
                host.process.join(max(0.0, (ends_ns - clock.now_ns()) / 1e9))
                host.process.kill()
                self._lose(host)
        for thread in self._restarting.values():
            thread.join()
        while not self._started.empty():
            _, process, channels = self._started.get_nowait()
            for channel in channels:
                channel.close()
            process.kill()
            processes.reap(process)
        self._epoll.close()
        os.close(self._wake_fd)

    def _kill(self) -> None:
        """The interpreter exits without `stop`; lanes would have it wait for them for ever."""
        for host in self._hosts:
            if host.process is not None:
                host.process.kill()


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
