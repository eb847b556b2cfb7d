"""The pool of all lanes: their processes, and the orders that the driver gives them.

A process runs one lane, which can then be suspended, or all lanes of one device as threads. The
pool does not decide what runs. Only the driver's thread calls `poll`; `send` may be called from any
thread.
"""

import atexit
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from serve.core.types import LaneId, LaneLook, TaskId
from serve.ipc import passing
from serve.ipc.messages import Message, RunTask, Stop
from serve.ipc.private_memory import private_bytes_of
from serve.ipc.setup import Confinement, DevicePlace
from serve.ipc.shared_pool import SharedPool
from serve.ipc.stop_word import SIGNAL as STOP_SIGNAL
from serve.server import clock
from serve.server.lanes import processes
from serve.server.lanes.calibrators import Calibrator, Calibrators
from serve.server.lanes.lane_handle import LaneHandle, LaneProcess
from serve.server.lanes.listener import LaneListener, PacketPort, Reports
from serve.server.lanes.process_state import look_at
from serve.server.lanes.restarts import Started
from serve.server.lanes.setups import LaneSetups
from serve.server.lanes.successors import Successors
from serve.server.lanes.trainers import Trainers

_log = logging.getLogger(__name__)

_STOP_WAIT_S = 2.0
#: Time that a run has to end after it was told to; then its process is killed.
_STOP_GRACE_NS = 2_000_000_000
#: Number of the words of a process that runs no task.
_CALIBRATORS_WORDS = 0


def _first_words(lane_id: int) -> int:
    """Return the number of the first words of a lane that has a process, of two in turn."""
    return 1 + 2 * lane_id


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
        confinement: Callable[[str], Confinement] | None = None,
    ) -> None:
        """Make one lane for each of `lane_cores`, in a process of its own.

        With `places`, make that many on each place, as threads of one process; the lanes of the
        first place come first. `niceness` is that of lanes that compute on this machine's cores.
        `confinement` is that of lanes in their own processes for the models of a trust domain.
        """
        # A thread of the server would wait for a tick of the kernel for a lane of its own niceness.
        # Nice lanes of a GPU would leave the device without work.
        niceness = niceness if all(place.on_processor for place in places) else 0
        rules = None if places else confinement
        self._setups = LaneSetups(shared, keep_bytes, threads, niceness, rules)
        self._shared = shared
        self._lanes: dict[LaneId, LaneHandle] = {}
        self._processes = [LaneProcess(f"device {place.name}", place, []) for place in places]
        self._lane_cores = lane_cores
        #: True from the start of its lanes on.
        self.runs = False
        if not places:
            self._processes = [
                LaneProcess(f"lane {index}", None, []) for index in range(len(lane_cores))
            ]
        for number, process in enumerate(self._processes):
            for cores in lane_cores if places else lane_cores[number : number + 1]:
                self._make_lane(LaneId(len(self._lanes)), cores, process)
        self._listener = LaneListener(self._processes, self._start)
        self.calibrators = calibrators = Calibrators()
        self.trainers = Trainers(self._setups, self._processes, self._lanes, calibrators, shared)
        #: None where several lanes share a process.
        self.successors: Successors | None = None
        if not places:
            self.successors = Successors(
                self._lanes,
                self._listener,
                self.calibrators,
                shared,
                lambda lane, words: self._setups.of(lane.process, words),
            )

    @property
    def lane_ids(self) -> tuple[LaneId, ...]:
        """All lanes, up or not."""
        return tuple(self._lanes)

    @property
    def has_room_for_lanes(self) -> bool:
        """True when there are words in shared memory for the lanes of one more trust domain."""
        return _first_words(len(self._lanes) + len(self._lane_cores)) < self._shared.most_words - 2

    def lanes_of(self, domain: str) -> tuple[LaneId, ...]:
        """Return the lanes of a trust domain; those that others share for the empty one."""
        lanes = tuple(self._lanes.values())
        return tuple(one.lane_id for one in lanes if one.process.domain == domain)

    def domain_of(self, lane_id: LaneId) -> str | None:
        """Return the trust domain of the lane, empty for none; None when there is no such lane."""
        lane = self._lanes.get(lane_id)
        return None if lane is None else lane.process.domain

    @property
    def lane_ids_by_device(self) -> tuple[tuple[LaneId, ...], ...]:
        """All lanes, up or not, for each device."""
        if self._processes[0].place is None:
            return (self.lane_ids,)
        return tuple(tuple(lane.lane_id for lane in process.lanes) for process in self._processes)

    @property
    def restarts(self) -> int:
        """Number of restarts of processes so far."""
        return self._listener.restarts.count

    @property
    def unconfined(self) -> str:
        """Why models may do what they should not on this system; empty when they may not."""
        return self._listener.unconfined

    def pids(self) -> dict[LaneId, int]:
        """Return the process id of each lane that has a process."""
        return {
            lane.lane_id: lane.process.pid
            for lane in tuple(self._lanes.values())
            if lane.process.pid is not None
        }

    def memory_bytes(self) -> dict[LaneId, int]:
        """Return the private memory of each process, by its first lane."""
        found = {}
        for process in tuple(self._processes):
            size_bytes = None if process.pid is None else private_bytes_of(process.pid)
            if size_bytes is not None:
                found[process.lanes[0].lane_id] = size_bytes
        return found

    def start(self) -> None:
        """Start every process; `poll` reports the lanes that are up."""
        # At exit the interpreter waits for its children: without `stop` they would never end.
        atexit.register(self._kill_all)
        self.runs = True
        for process in self._processes:
            self._listener.attach(process, *self._start(process))

    def stop(self) -> None:
        """End every process. After this nothing of the pool runs."""
        self.calibrators.interrupt()
        if self.successors is not None:
            self.successors.close()
        atexit.unregister(self._kill_all)
        for lane in tuple(self._lanes.values()):
            lane.resume()
            self.send(lane.lane_id, Stop())
        ends_ns = clock.now_ns() + int(_STOP_WAIT_S * 1e9)
        for process in self._processes:
            if process.child is not None:
                process.child.join(max(0.0, (ends_ns - clock.now_ns()) / 1e9))
                process.kill()
                processes.reap(self._listener.detach(process))
        self._listener.close()

    def poll(self, until_ns: int | None) -> Reports:
        """Wait for lanes, for `wake` or until `until_ns`; return what lanes said, in order."""
        return self._listener.poll(until_ns)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` would report something."""
        return self._listener.fileno()

    def lend_channels(self, port: PacketPort | None) -> None:
        """Have `port` read what lanes say, for `taken`; None: `poll` again. The polling thread."""
        self._listener.lend_channels(port)

    def taken(self, packets: Sequence[tuple[int, bytes]]) -> Reports:
        """Return what lanes said in packets that a port has read, by descriptor."""
        return self._listener.taken(packets)

    def due_ns(self, until_ns: int | None) -> int:
        """Return when `poll` must be called, at `until_ns` at the latest."""
        return self._listener.due_ns(until_ns)

    def wake(self) -> None:
        """Make a waiting `poll` return. Any thread."""
        self._listener.wake()

    # --- lanes of trust domains -------------------------------------------------------------

    def add_lane(self, lane_id: LaneId, domain: str) -> None:
        """Make a lane for models of the trust domain; `poll` reports when it is up. Never waits.

        A lane whose thread cannot be started never comes up, and the log says so.
        """
        cores = self._lane_cores[len(self.lanes_of(domain)) % len(self._lane_cores)]
        process = LaneProcess(f"lane {lane_id}", None, [], domain=domain)
        self._make_lane(lane_id, cores, process)
        self._processes.append(process)
        try:
            self._listener.restarts.begin(process, process.name)
        except RuntimeError as error:  # the system is out of threads
            _log.error("lane %d: cannot be started: %s", lane_id, error)

    def remove_lane(self, lane_id: LaneId) -> None:
        """End a lane of a trust domain that runs nothing; `poll` reports it. Never waits."""
        if self.successors is not None:
            self.successors.withdraw([lane_id])
        process = self._lanes.pop(lane_id).process
        self._processes.remove(process)
        self._listener.remove(process)

    # --- orders ---------------------------------------------------------------------------

    def send(self, lane_id: LaneId, message: Message) -> None:
        """Send a message; a lane that cannot take it is killed, which `poll` reports.

        Raises nothing. A lane that misses one message gets no later one: it is gone, or has
        hundreds of unread messages and is killed.
        """
        lane = self._lanes.get(lane_id)
        channel = None if lane is None else lane.channel
        if lane is None or channel is None:
            return
        try:
            passing.send(channel, message, socket.MSG_DONTWAIT)
        except OSError as error:
            self._listener.kill(lane, f"cannot be reached: {error}")

    def kill(self, lane_id: LaneId, why: str) -> None:
        """End the lane's process and all that it started; `poll` reports when it is gone.

        Does nothing for a lane that was removed. Any thread.
        """
        if (lane := self._lanes.get(lane_id)) is not None:
            self._listener.kill(lane, why)

    def launch(self, lane_id: LaneId, task: RunTask) -> None:
        """Have an idle lane run a task on a core of its own."""
        lane = self._lanes[lane_id]
        self._take_core(lane)
        if lane.told_to_stop:
            # The stop word may name this very task, which was part of a union then.
            lane.told_to_stop = False
            self._shared.write_stop(lane.words, 0)
        self.send(lane_id, task)

    def suspend(self, lane_id: LaneId) -> None:
        """Stop the process of a lane that has its own, where it is; this frees its core."""
        self._lanes[lane_id].suspend()
        self.trainers.keep_calibrators_off()

    def resume(self, lane_id: LaneId) -> None:
        """Let a suspended lane go on, on a core of its own."""
        lane = self._lanes[lane_id]
        self._take_core(lane)
        lane.resume()

    def stop_run(self, lane_id: LaneId, task_id: TaskId) -> None:
        """End the run of that task if it still runs there; a suspended lane is resumed for it.

        The lane reports how the run ended, or is killed if it does not end in time.
        """
        lane = self._lanes[lane_id]
        self._shared.write_stop(lane.words, task_id)
        lane.told_to_stop = True
        if lane.process.place is not None:
            # It ends at its next allocation; a signal would hit the other lanes of its process.
            return
        lane.kill_at_ns = clock.now_ns() + _STOP_GRACE_NS
        lane.process.signal(STOP_SIGNAL)
        lane.resume()
        self.wake()

    def recycle(self, lane_id: LaneId) -> None:
        """End an idle lane's process; it is restarted without back-off."""
        process = self._lanes[lane_id].process
        self._listener.restarts.forgive(process)
        process.kill()

    def ended(self, lane_id: LaneId) -> None:
        """Take note that the lane's task ended and the lane is idle; resume it if suspended."""
        self._lanes[lane_id].ended()
        self.trainers.keep_calibrators_off()

    def look(self, lane_id: LaneId, task_id: TaskId) -> LaneLook | None:
        """Return what the lane, which runs that task, does now; None when its process is gone."""
        return look_at(self._lanes[lane_id], self._shared, task_id)

    def calibrator(
        self, domain: str = "", writable: tuple[str, ...] = (), *, yields: bool = False
    ) -> AbstractContextManager[Calibrator]:
        """Start a process that calibrates one model, so that serving lanes keep to their tasks.

        It runs on the first device, and what it finds is valid for all. It may do what lanes of the
        trust domain may, and write to `writable` folders. See ``Calibrators.start`` for `yields`
        and what is raised.
        """
        most_niceness = self.calibrators.niceness
        setup = self._setups.of_calibrator(
            self._processes[0], _CALIBRATORS_WORDS, domain, most_niceness, writable
        )
        return self.calibrators.start(setup, self._shared.fd, yields=yields)

    def _make_lane(self, lane_id: LaneId, cores: tuple[int, ...], process: LaneProcess) -> None:
        # Lanes of one process have their words one behind the other.
        words = 1 + lane_id if process.place is not None else _first_words(lane_id)
        lane = self._lanes[lane_id] = LaneHandle(lane_id, cores, process, words)
        process.lanes.append(lane)

    def _take_core(self, lane: LaneHandle) -> None:
        """Pin the lane to a core on which no other lane executes; it keeps its core if it can.

        With suspended tasks there are more lanes than cores, so lanes cannot own cores.
        """
        free = self.trainers.free_cores()
        lane.executes = True
        if free and lane.core not in free and lane.process.pid is not None:
            lane.core = free[0]
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(lane.process.pid, free[:1])
        self.trainers.keep_calibrators_off()

    def _start(self, process: LaneProcess) -> Started:
        """Start a process; return it with our ends of its lanes' channels, in their order."""
        setup = self._setups.of(process, process.lanes[0].words)
        return processes.start(setup, len(process.lanes), self._shared.fd)

    def _kill_all(self) -> None:
        for process in self._processes:
            process.kill()
