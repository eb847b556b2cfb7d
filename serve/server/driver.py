"""The live driver of the scheduler: one lock and one thread, which the requests' threads share.

Whoever has an event (the thread a request came in on; the driver's own thread, which listens to the
lanes and keeps the timers) takes the lock, asks the scheduler what to do and does it. The work
under the lock is a few microseconds of dictionary work, a packet to a lane, or an order to a
waiting thread; nothing there blocks. With a native front (`serve_through`), the driver's thread
also hears its calls, and takes plain requests from arrival to answer by itself. See
``serve.core.scheduler`` for the decisions and ``docs/architecture.md`` for a request's way through
all this.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from serve.core.events import (
    Event,
    ModelUnloaded,
    TaskArrived,
    TaskCancelled,
    TasksArrived,
    Tick,
)
from serve.core.fleet.fleet import make_scheduler
from serve.core.jobs.events import JobsTick
from serve.core.params import SchedulerParams
from serve.core.types import Completed, Nanos, Outcome, Rejected, Sized, TaskId
from serve.obs.journal import JournalWriter
from serve.obs.live.tally import ServerState
from serve.obs.record import RequestRecord
from serve.server import clock
from serve.server.accepted import AcceptedRequests
from serve.server.command_table import CommandTable, JobPort
from serve.server.lane_monitor import LaneMonitor
from serve.server.lanes.listener import PacketPort, Reports
from serve.server.lanes.pool import LanePool
from serve.server.learning.learner import Learner
from serve.server.report_rows import RecordKeeper
from serve.server.ticket import PlainTicket, RequestTicket
from serve.threads import Thread

_log = logging.getLogger(__name__)

#: Size of a batch of lessons, unless somebody asks for them before: one lesson by itself finds all
#: it needs out of the caches.
_LESSONS = 8
#: Requests that are refused, about 0.1 ms each, before lanes with runs get a moment.
_REFUSALS_IN_A_ROW = 8
_WAY_S = 0.001
#: Exit code of the process when the driver's thread is lost.
EXIT_BUG = 70


class CallPort(PacketPort, Protocol):
    """A transport's port that the driver's thread serves. That thread calls all methods."""

    def begin(self, lanes_fd: int) -> None:
        """Have only the calling thread serve the port; watch `lanes_fd` too."""
        ...

    def poll(self, until_ns: int) -> tuple[bool, Sequence[tuple[int, bytes]]]:
        """Wait for calls, for `lanes_fd`, for packets, or until `until_ns`.

        Returns whether `lanes_fd` is readable, and packets by descriptor.
        """
        ...

    def take(self) -> None:
        """Take in the calls that `poll` has found; raises nothing."""
        ...

    def flush(self) -> None:
        """Send what was answered."""
        ...

    def end(self) -> None:
        """Note that the calling thread serves the port no more."""
        ...


class Driver:
    """Takes accepted requests through the scheduler and over the lanes to their answers."""

    def __init__(
        self,
        params: SchedulerParams,
        pool: LanePool,
        lanes: LaneMonitor,
        learner: Learner,
        records: RecordKeeper,
        *,
        lock: threading.Lock,
        jobs: JobPort,
        journal: JournalWriter | None = None,
    ) -> None:
        """`lock` is held for every step, and guards what the other parts know as well."""
        self.scheduler = make_scheduler(params if journal is None else journal.begin(params))
        self.requests = AcceptedRequests()
        self.lanes = lanes
        self._commands = CommandTable(self.requests, lanes, pool, jobs)
        self._pool = pool
        self._learner = learner
        self._records = records
        self._lock = lock
        self._journal = journal
        #: When the driver's thread wakes up at the latest; None: when something happens.
        self._armed_ns: int | None = None
        #: Plain requests that ended and are not answered yet. Appended to under the lock.
        self._ended: deque[tuple[PlainTicket, Outcome]] = deque()
        #: Requests that were refused since the driver's thread last made way for lanes.
        self._refused = 0
        #: The port to serve, under the lock; and the one that the driver's thread serves.
        self._port: CallPort | None = None
        self._served: CallPort | None = None
        #: Set while the driver's thread serves no port.
        self._left = threading.Event()
        self._left.set()
        self._drained = threading.Event()
        self._stopping = False
        self._thread = Thread(target=self._listen, name="driver")

    # --- life ---------------------------------------------------------------------------

    def start(self, timeout_s: float) -> int:
        """Listen to the lanes, wait until all are ready or time runs out; return how many are."""
        self._thread.start()
        return self.lanes.wait_ready(timeout_s)

    def stop(self) -> None:
        """Cancel unanswered requests and stop listening."""
        for ticket in self.requests.tickets():
            ticket.cancel()
        self._stopping = True
        if self._thread.is_alive():
            self._pool.wake()
            self._thread.join()

    def serve_through(self, port: CallPort) -> None:
        """Have the driver's thread serve `port` as well, as soon as it runs. Any thread."""
        with self._lock:
            self._port = port
        self._pool.wake()

    def leave_port(self, timeout_s: float) -> bool:
        """Return once the driver's thread serves no port; False if it hangs. Any other thread."""
        if self._lock.acquire(timeout=timeout_s):  # a thread that hangs may hold it
            self._port = None
            self._lock.release()
        self._pool.wake()
        return self._port is None and self._left.wait(timeout_s)

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until all accepted requests are answered; return False when time runs out."""
        return self._drained.wait(timeout_s)

    @property
    def lanes_able(self) -> int:
        """Number of ready lanes without a run that is far overdue."""
        return self.lanes.ready_count - self.scheduler.overdue_count

    @property
    def alive(self) -> bool:
        """False when the listening thread has died."""
        return not self._thread.ident or self._thread.is_alive()

    def state(self) -> ServerState:
        """Return what the live page shows of the present state. Any thread, without the lock."""
        with self._lock:
            return ServerState(
                queue=sum(ticket.run is None for ticket in self.requests.tickets()),
                reserved_bytes=self.scheduler.reserved_bytes,
                lanes_up=self.lanes.ready_count,
            )

    # --- requests -----------------------------------------------------------------------

    def accept(self, event: TaskArrived | TasksArrived, *tickets: RequestTicket) -> None:
        """Hand new tasks to the scheduler by `event`, which is about `tickets`. Under the lock."""
        for ticket in tickets:
            self.requests.add(ticket)
        self.handle_locked(event)

    def handle(self, event: Event) -> None:
        """Give the scheduler an event and carry out its commands. Any thread."""
        with self._lock:
            self.handle_locked(event)

    def handle_locked(self, event: Event) -> None:
        """Give the scheduler an event and carry out its commands. Under the lock."""
        now_ns = clock.now_ns()
        commands = self.scheduler.handle(event, now_ns)
        if self._journal is not None:
            self._journal.step(now_ns, event, commands)
        for caused in self._commands.carry_out(commands):
            self.handle_locked(caused)
        if self.scheduler.drained:
            self._drained.set()
        wakeup_ns = self._wakeup_ns()
        if wakeup_ns is not None and (self._armed_ns is None or wakeup_ns < self._armed_ns):
            self._armed_ns = wakeup_ns
            if threading.get_ident() != self._thread.ident:
                self._pool.wake()

    def unloaded(self, model: str) -> None:
        """Forget the quarantine of a model that is no longer served. Any thread."""
        self.handle(ModelUnloaded(model))

    def quarantine_reason(self, model: str) -> str:
        """Return why the model is not run now; empty when it may run. Any thread."""
        return self.scheduler.quarantine_reason(model, clock.now_ns())

    def cancel(self, task_id: TaskId) -> None:
        """Cancel a task, unless it has ended. Any thread."""
        with self._lock:
            if task_id in self.requests:
                self.handle_locked(TaskCancelled(task_id))

    def sized(self, exact: Callable[[], Sized]) -> Sized:
        """Return what `exact` returns under the lock, to which estimates belong. Any thread."""
        with self._lock:
            return exact()

    def answered(self, ticket: RequestTicket, outcome: Outcome, answered_ns: int) -> RequestRecord:
        """Return the record of an answered request, and keep it. Any thread."""
        record = self._records.keep(ticket, outcome, answered_ns)
        if self._journal is not None:
            task = ticket.task
            self._journal.left(task.arrived_ns + record.latency_ns, task.task_id)
        return record

    def release(self, ticket: RequestTicket, outcome: Outcome | None) -> None:
        """Note that the serving thread is done with the ticket, and how the task ended."""
        with self._lock:
            if isinstance(outcome, Completed) and ticket.run is not None:
                lesson = ticket.run.lesson(outcome)
                if lesson is not None:
                    self._learner.add(lesson)
            ticket.release()
            if self._learner.backlog >= (_LESSONS if self._records.serving else 1):
                self._learn()
            self.requests.answered(ticket)

    def answer_soon(self, ticket: PlainTicket, outcome: Outcome) -> None:
        """Have the driver's thread answer and release the ticket. Under the lock."""
        self._ended.append((ticket, outcome))
        if threading.get_ident() != self._thread.ident:
            self._pool.wake()

    def learn(self) -> None:
        """Correct the estimates by all runs that ended. Any thread."""
        if self._learner.backlog:
            with self._lock:
                self._learn()

    def _learn(self) -> None:
        """Under the lock."""
        for event in self._learner.learn():
            self.handle_locked(event)

    def _wakeup_ns(self) -> Nanos | None:
        """Return when the scheduler wants to be told the time, for requests or for jobs."""
        wakeup_ns, jobs_ns = self.scheduler.next_wakeup(), self.scheduler.jobs_wake_ns
        if jobs_ns is None or (wakeup_ns is not None and wakeup_ns <= jobs_ns):
            return wakeup_ns
        return jobs_ns

    # --- the driver's thread ------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while not self._stopping:
                self._turn(self._serving_port())
                with self._lock:
                    self._keep_time()
            self._answer_ended()
            with self._lock:
                self._port = None
            self._serving_port()
        except BaseException:
            # Without it no request is answered: end, so that a supervisor starts another server.
            _log.critical("a bug ended the driver's thread; the server ends", exc_info=True)
            _end_process()

    def _serving_port(self) -> CallPort | None:
        """Return the port to serve, after beginning or ending to."""
        with self._lock:
            port, served = self._port, self._served
            if port is served:
                return port
            self._served = port
            if port is not None:
                self._left.clear()
        if served is not None:
            self._pool.lend_channels(None)
            served.end()
        if port is None:
            self._left.set()
        else:
            port.begin(self._pool.fileno())
            self._pool.lend_channels(port)
        return port

    def _turn(self, port: CallPort | None) -> None:
        """Wait for something to happen, and see to it: lanes first."""
        if port is None:
            self._hear(self._pool.poll(self._armed_ns))
            self._answer_ended()
            return
        until_ns = self._pool.due_ns(self._armed_ns)
        lanes_ready, packets = port.poll(until_ns)
        self._hear(self._pool.taken(packets))
        if lanes_ready or clock.now_ns() >= until_ns:
            self._hear(self._pool.poll(0))
        self._answer_ended()
        port.take()
        self._answer_ended()
        self._make_way()

    def _answer_ended(self) -> None:
        """Answer the plain requests that ended, send the answers, and only then learn."""
        if not self._ended:
            return
        answered = []
        while self._ended:
            ticket, outcome = self._ended.popleft()
            ticket.answer(outcome)
            answered.append((ticket, outcome))
            self._refused += isinstance(outcome, Rejected)
        if self._served is not None:
            self._served.flush()
        for ticket, outcome in answered:
            self.release(ticket, outcome)

    def _make_way(self) -> None:
        """Sleep for a moment after some refusals, if a lane has a run.

        Lanes have a lower priority. Thousands of requests to refuse would keep this thread busy,
        and the lane on its core from beginning a run of somebody else.
        """
        if self._refused >= _REFUSALS_IN_A_ROW:
            self._refused = 0
            if self.scheduler.running_count:
                time.sleep(_WAY_S)

    def _hear(self, reports: Reports) -> None:
        for lane_id, message in reports:
            try:
                self.lanes.hear(lane_id, message, self.handle_locked)
            except Exception:
                # A bug; the server goes on with the requests it does not concern.
                _log.exception("lane %d: message %s cannot be handled", lane_id, message)

    def _keep_time(self) -> None:
        """Tick when it is time, and arm for the next. Under the lock."""
        now_ns = clock.now_ns()
        wakeup_ns = self.scheduler.next_wakeup()
        if wakeup_ns is not None and wakeup_ns <= now_ns:
            self.handle_locked(Tick())
        jobs_ns = self.scheduler.jobs_wake_ns
        if jobs_ns is not None and jobs_ns <= now_ns:
            self.handle_locked(JobsTick())
        wakeup_ns = self._wakeup_ns()
        # An earlier wake-up is kept even when nobody needs it now: moving it with the deadline of
        # every lone request would wake this thread for each.
        armed_ns = self._armed_ns
        if armed_ns is None or armed_ns <= now_ns or (wakeup_ns or armed_ns) < armed_ns:
            self._armed_ns = wakeup_ns


def _end_process() -> NoReturn:
    logging.shutdown()
    os._exit(EXIT_BUG)
