"""The scheduler: one pure state machine that decides what is prepared and run, when and where.

Drivers (the server, the simulator, the tests) feed it events and carry out its commands. It knows
nothing of how that is done. See ``lifecycle`` for what may happen to a task, ``handlers`` for what
each event changes, ``planner`` for when tasks are planned and prepared, ``policies`` for what is
planned, ``disciplines`` for how a plan is run and ``launcher`` for how their moves are made.

Every step costs at most O(log n) in the number of pending tasks: they are kept in the policy's
order, and only a bounded horizon of them is planned at a time.
"""

from serve.core.commands import Command, LookAtLane
from serve.core.events import Event
from serve.core.handlers import EventHandlers
from serve.core.jobs.events import JobEvent
from serve.core.jobs.jobs import TrainingJobs
from serve.core.launcher import Launcher
from serve.core.lifecycle import State
from serve.core.params import SchedulerParams
from serve.core.parts import make_parts
from serve.core.rules.watch import NEVER_NS
from serve.core.state.shared_counts import Totals
from serve.core.types import Bytes, Nanos, TaskId


class Scheduler:
    """Decides for one device; changes only in ``handle``."""

    def __init__(self, params: SchedulerParams, totals: Totals | None = None) -> None:
        """Build the scheduler of `params.device`; a fleet passes its `totals`."""
        self.params = params
        #: For a fleet, and for tests to look at.
        self.parts = parts = make_parts(params, totals or Totals())
        self._tasks, self._board, self._planner = parts.tasks, parts.board, parts.planner
        self._recycling, self._watch, self._window = parts.recycling, parts.watch, parts.window
        self._own_lanes = parts.own_lanes
        #: Training beside requests; to be looked at only.
        self.jobs: TrainingJobs = parts.jobs
        self._launcher = Launcher(parts)
        self._handlers = EventHandlers(parts, self._launcher)
        self._on = self._handlers.by_event

    def handle(self, event: Event, now_ns: Nanos) -> list[Command]:
        """Take in one event and return what to do about it, in this order.

        A `now_ns` before that of an earlier call counts as that. Raises InvariantViolation, with
        nothing changed, for an event that cannot happen.
        """
        tasks = self._tasks
        if now_ns > tasks.now_ns:
            tasks.now_ns = now_ns
        out: list[Command] = []
        tasks.out = out
        on = self._on.get(type(event))
        if on is None:
            # Of a training job: no request hears of it.
            assert isinstance(event, JobEvent)
            self.jobs.take_in(event, out)
            self.jobs.settle(tasks.now_ns, out, draining=self.draining)
            return out
        on(event)
        if self._recycling.over:
            self._handlers.recycle_idle_lanes()
        if self._own_lanes.leaving:
            out += self._own_lanes.remove_idle()
            self._planner.stale = True
        while (
            tasks.expires_ns is not None
            and tasks.expires_ns <= tasks.now_ns
            and (expired := tasks.expired()) is not None
        ):
            self._handlers.expire(expired)
        if self._watch.next_ns <= tasks.now_ns:
            out += [LookAtLane(r.task_id, r.lane_id) for r in self._watch.due(tasks.now_ns)]
        self._plan_and_launch()
        if self.jobs.records:
            self.jobs.settle(tasks.now_ns, out, draining=self.draining, answers=True)
        return out

    def _plan_and_launch(self) -> None:
        tasks, planner, board = self._tasks, self._planner, self._board
        if not (
            tasks.pending
            or planner.stale
            or self._window.open
            or board.executing_count != len(board.busy)
        ):
            # Nothing waits, so there is nothing to plan and nothing to launch.
            if tasks.moved:
                tasks.moved = False
                self._launcher.held_until_ns = None
                board.note(tasks.now_ns)
            return
        planned = planner.plan_if_due()
        if tasks.queued and (planned or tasks.moved):
            planner.prepare_next()
        # Planning or preparing tasks that are not READY is no reason to ask the discipline.
        if not (tasks.moved or (planned and tasks.ready)):
            return
        while self._launcher.launch_ready():
            planned = planner.plan_if_due()
            if tasks.queued:
                planner.prepare_next()
            if not planned:
                break
        tasks.moved = False
        board.note(tasks.now_ns)

    def next_wakeup(self) -> Nanos | None:
        """Return when a ``Tick`` is needed unless another event comes first; None for never."""
        wake_ns = self._planner.closes_ns() if self.parts.window.open else None
        held_ns = self._launcher.held_until_ns
        if held_ns is not None and (wake_ns is None or held_ns < wake_ns):
            wake_ns = held_ns
        expires_ns = self._tasks.expires_ns
        if expires_ns is not None and (wake_ns is None or expires_ns < wake_ns):
            wake_ns = expires_ns
        if self.params.watched and self._board.busy:
            look_ns = self._watch.next_ns
            if look_ns < NEVER_NS and (wake_ns is None or look_ns < wake_ns):
                wake_ns = look_ns
        return wake_ns

    @property
    def jobs_wake_ns(self) -> Nanos | None:
        """When a ``JobsTick`` is needed unless another event comes first; None for never."""
        return self.jobs.wake_ns

    @property
    def queued_count(self) -> int:
        """Accepted tasks not on a lane yet."""
        return self._tasks.pending

    @property
    def running_count(self) -> int:
        """Runs on lanes, suspended ones included."""
        return len(self._board.busy)

    @property
    def suspended_count(self) -> int:
        """Runs on lanes that are suspended."""
        return len(self._board.busy) - self._board.executing_count

    @property
    def overdue_count(self) -> int:
        """Runs that take far longer than expected, so that their lanes take no other."""
        return sum(run.overdue for run in self._board.busy.values())

    @property
    def lanes_up(self) -> int:
        """Lanes that can work."""
        return self._board.lanes_up

    @property
    def reserved_bytes(self) -> Bytes:
        """Memory reserved by tasks on lanes."""
        return self._board.ledger.reserved_bytes

    @property
    def budget_bytes(self) -> Bytes:
        """Memory for tasks."""
        return self._board.ledger.budget_bytes

    @property
    def devices(self) -> tuple["Scheduler", ...]:
        """The scheduler of each device: itself."""
        return (self,)

    @property
    def draining(self) -> bool:
        """True when nothing new is accepted."""
        return self._handlers.draining

    @property
    def drained(self) -> bool:
        """True when draining and everything accepted is answered and released."""
        return self._handlers.draining and not self._tasks.records

    @property
    def prepares_at_once(self) -> bool:
        """True when a task arriving now would be prepared now, so it may as well come prepared."""
        return self.parts.window.replans and not self.draining and self._planner.is_short

    def quarantine_reason(self, model: str, now_ns: Nanos) -> str:
        """Return why the model may not run at `now_ns`; empty when it may."""
        return self.parts.totals.quarantine.reason(model, now_ns)

    def state(self, task_id: TaskId) -> State | None:
        """Return the task's state: DONE also if it was rejected, None if it never arrived."""
        return self._tasks.state(task_id)

    def story(self, task_id: TaskId) -> tuple[str, ...]:
        """Return the task's moves as far as they are remembered, one line each."""
        return self._tasks.story(task_id)
