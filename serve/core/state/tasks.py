"""Accepted tasks that are not done, and their moves along the table.

Covers what a move entails wherever tasks are counted: backlog, plan, time limits, tenants' shares,
demand, the answers and releases owed. Does not cover lanes and memory, nor why a task moves: see
``scheduler``.
"""

from heapq import heapify, heappop, heappush

from serve.core.commands import AnswerTask, Command, LaunchTask, PrepareTask, ReleaseTask
from serve.core.events import TaskArrived, TaskPrepared
from serve.core.lifecycle import TRANSITION_OF, Cause, State
from serve.core.state.backlog import Backlog
from serve.core.state.plan import Plan
from serve.core.state.record import Record
from serve.core.state.shared_counts import Totals
from serve.core.types import Nanos, Outcome, TaskId
from serve.errors import InvariantViolation

#: A member of an Enum takes longer to look up than a global.
_QUEUED, _PREPARING = State.QUEUED, State.PREPARING
_READY, _RUNNING = State.READY, State.RUNNING
#: Time limits of answered tasks that may wait for their time, beside as many as there are others.
_MOST_ANSWERED = 64


class Tasks:
    """The records, by id, and the one way to change their state."""

    __slots__ = (
        "_plan",
        "_remember",
        "_timers",
        "_totals",
        "backlog",
        "expires_ns",
        "moved",
        "now_ns",
        "out",
        "pending",
        "queued",
        "ready",
        "records",
        "timed_count",
        "work_ns",
    )

    def __init__(self, backlog: Backlog, plan: Plan, totals: Totals) -> None:
        self.records: dict[TaskId, Record] = {}
        self.backlog = backlog
        #: Accepted tasks not on a lane yet.
        self.pending = 0
        #: Σ estimated solo time of tasks pending or on a lane.
        self.work_ns = 0
        #: What moves ask the driver to do, in order.
        self.out: list[Command] = []
        #: A task moved, or may be launched for another reason, since this was set to False.
        self.moved = False
        #: Tasks to be prepared.
        self.queued = 0
        #: Tasks that wait for a lane, prepared.
        self.ready = 0
        #: The time of the event that is being handled.
        self.now_ns = Nanos(0)
        #: When the next time limit passes; None: none ever does.
        self.expires_ns: Nanos | None = None
        self._plan = plan
        #: Unanswered tasks with a time limit.
        self.timed_count = 0
        #: A heap of (expiry, task id): theirs, and some of tasks that were answered since.
        self._timers: list[tuple[Nanos, TaskId]] = []
        self._totals = totals
        self._remember = totals.history.add

    def seen(self, task_id: TaskId) -> None:
        """Note the arrival of a task; raise InvariantViolation when it is there already."""
        if task_id in self.records:
            raise self.violation(task_id, "arrived twice")
        if task_id > self._totals.newest_id:
            self._totals.newest_id = task_id

    def admit(self, record: Record) -> None:
        """Accept the task, which then waits to be planned."""
        task = record.task
        self.records[task.task_id] = record
        self._remember((self.now_ns, task.task_id, None, TaskArrived, record.state))
        self.backlog.add(record)
        self._totals.shares.enter(task.tenant, record.work_ns)
        self.pending += 1
        self.queued += 1
        self._totals.unanswered += 1
        self.work_ns += record.work_ns
        self._time(record)

    def admit_launched(self, record: Record) -> None:
        """Accept a prepared task that goes onto a lane at once."""
        task = record.task
        task_id, now_ns, remember = task.task_id, self.now_ns, self._remember
        self.records[task_id] = record
        record.state = _RUNNING
        remember((now_ns, task_id, None, TaskArrived, _QUEUED))
        remember((now_ns, task_id, _QUEUED, PrepareTask, _PREPARING))
        remember((now_ns, task_id, _PREPARING, TaskPrepared, _READY))
        remember((now_ns, task_id, _READY, LaunchTask, _RUNNING))
        self._totals.shares.enter(task.tenant, record.work_ns)
        self._totals.unanswered += 1
        self.work_ns += record.work_ns
        self._time(record)

    def take_out(self, record: Record, now_ns: Nanos) -> None:
        """Remove a pending record that goes to another device; the totals keep it."""
        del self.records[record.task.task_id]
        self.pending -= 1
        self.queued -= record.state is State.QUEUED
        self.ready -= record.state is State.READY
        self.work_ns -= record.work_ns
        self.backlog.discard(record)
        if record.group is not None:
            self._plan.remove(record, now_ns)
        self._untime(record)

    def put_in(self, record: Record) -> None:
        """Add a pending record from another device; the caller gives it a place in the plan."""
        self.records[record.task.task_id] = record
        self.pending += 1
        self.queued += record.state is State.QUEUED
        self.ready += record.state is State.READY
        self.work_ns += record.work_ns
        self._time(record)

    def step(self, record: Record, cause: Cause, outcome: Outcome | None = None) -> None:
        """Move the record along the table, with everything the move entails."""
        task_id = record.task.task_id
        before = record.state
        try:
            move = TRANSITION_OF[before, cause]
        except KeyError:
            what = f"{cause.__name__} while {before.label}"
            raise self.violation(task_id, what) from None
        if not move.changes:
            return
        record.state = after = move.after
        self._remember((self.now_ns, task_id, before, cause, after))
        self.queued += move.queued
        self.ready += move.ready
        if move.stirs:
            self.moved = True
        if not move.entails:
            return
        if move.leaves_lane:
            self._leave_lane(record)
        elif move.leaves_queue:
            self.pending -= 1
            self.backlog.discard(record)
            if move.answers and record.group is not None:
                self._plan.remove(record, self.now_ns)
        if move.ends_work:
            self.work_ns -= record.work_ns
            self._totals.shares.leave(record.task.tenant, record.work_ns)
            self._totals.demand.left(record.target_class, record.work_ns)
        if move.answers:
            assert outcome is not None
            self._totals.unanswered -= 1
            self._untime(record)
            self.out.append(AnswerTask(task_id, outcome))
        if move.releases:
            del self.records[task_id]
            self.out.append(ReleaseTask(task_id))

    def _leave_lane(self, record: Record) -> None:
        """Take the record off its lane; a task handed over goes back to the front."""
        record.run = None
        if record.state.pending:
            self.pending += 1
            self._plan.hand_over(record)
        else:
            self._plan.end(record, self.now_ns)

    def known(self, task_id: TaskId) -> bool:
        """Return True when the task arrived, however long ago."""
        return task_id <= self._totals.newest_id

    def get(self, task_id: TaskId, cause: Cause) -> Record:
        """Return the task's record; raise InvariantViolation when `cause` cannot concern it."""
        record = self.records.get(task_id)
        if record is None:
            what = "when done" if self.known(task_id) else "before it arrived"
            raise self.violation(task_id, f"{cause.__name__} {what}")
        return record

    def state(self, task_id: TaskId) -> State | None:
        """Return the task's state: DONE also for a rejected one, None if it never arrived."""
        record = self.records.get(task_id)
        if record is not None:
            return record.state
        return State.DONE if self.known(task_id) else None

    def expired(self) -> Record | None:
        """Return an unanswered task whose time limit has passed, or None."""
        if self.expires_ns is None or self.expires_ns > self.now_ns:
            return None
        return self.records[self._timers[0][1]]

    def _time(self, record: Record) -> None:
        """Start the record's time limit, if it has one."""
        task = record.task
        if task.qos.timeout_ns is None:
            return
        expires_ns = Nanos(task.arrived_ns + task.qos.timeout_ns)
        heappush(self._timers, (expires_ns, task.task_id))
        self.timed_count += 1
        if self.expires_ns is None or expires_ns < self.expires_ns:
            self.expires_ns = expires_ns

    def _untime(self, record: Record) -> None:
        """End the time limit of the record, which was answered or taken out, if it has one."""
        task, timers = record.task, self._timers
        if task.qos.timeout_ns is None:
            return
        self.timed_count -= 1
        if timers[0][1] == task.task_id:
            heappop(timers)
            while timers and not self._is_timed(timers[0][1]):
                heappop(timers)
            self.expires_ns = timers[0][0] if timers else None
        elif len(timers) > 2 * self.timed_count + _MOST_ANSWERED:
            timers[:] = [timer for timer in timers if self._is_timed(timer[1])]
            heapify(timers)

    def _is_timed(self, task_id: TaskId) -> bool:
        record = self.records.get(task_id)
        return record is not None and not record.state.answered

    def story(self, task_id: TaskId) -> tuple[str, ...]:
        """The task's moves as far as they are remembered, one line each."""
        return self._totals.history.story(task_id)

    def violation(self, task_id: TaskId, what: str) -> InvariantViolation:
        """Return the error to raise when `what` cannot have happened, with the task's story."""
        story = "; ".join(self.story(task_id)) or "no story"
        return InvariantViolation(f"task {task_id}: {what} ({story})")
