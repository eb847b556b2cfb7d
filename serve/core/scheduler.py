"""The scheduler: one pure state machine that decides what is prepared and run, when and where.

Covers admission, launching, time limits, lost lanes and draining. Does not cover how any of it is
done: drivers (the engine, the simulator, the tests) feed it events and carry out its commands. See
``lifecycle`` for what may happen to a task, ``planner`` for when it is planned and prepared,
``policies`` for what is planned and ``disciplines`` for how a plan is run.

Every step costs at most O(log n) in the number of pending tasks: they are kept in the policy's
order, and only a bounded horizon of them is planned at a time.
"""

from collections.abc import Callable
from typing import Any

from serve.core.commands import (
    AnswerTask,
    Command,
    KillLane,
    LaunchTask,
    LookAtLane,
    PrepareTask,
    QuarantineModel,
    RecycleLane,
    ReleaseTask,
    ResumeTask,
    StopTask,
    SuspendTask,
)
from serve.core.disciplines import get_discipline
from serve.core.disciplines.base import Launch, Suspend, Wait
from serve.core.ending import completed
from serve.core.events import (
    BudgetChanged,
    DrainStarted,
    Event,
    LaneLost,
    LaneMeasured,
    LaneReady,
    LaneSeen,
    ModelUnloaded,
    PrepareFailed,
    SlowdownChanged,
    TaskArrived,
    TaskCancelled,
    TaskFailed,
    TaskFinished,
    TaskOverran,
    TaskPrepared,
    Tick,
)
from serve.core.lifecycle import Cause, State, UnionSplit
from serve.core.params import SchedulerParams
from serve.core.planner import Planner
from serve.core.policies import get_policy
from serve.core.rules.admission import admit
from serve.core.rules.demand import target_class
from serve.core.rules.merging import gather
from serve.core.rules.packing import less_urgent
from serve.core.rules.patience import Patience
from serve.core.rules.recycling import Recycling
from serve.core.rules.watch import NEVER_NS, Verdict, Watch
from serve.core.rules.window import make_window
from serve.core.state.backlog import Backlog
from serve.core.state.device_state import Board
from serve.core.state.plan import Plan
from serve.core.state.record import PlannedGroup, Record, Run
from serve.core.state.shared_counts import Totals
from serve.core.state.tasks import Tasks
from serve.core.types import (
    Bytes,
    Cancelled,
    Expired,
    Failed,
    FailReason,
    LaneId,
    Nanos,
    Outcome,
    TaskId,
)
from serve.errors import InvariantViolation

#: Moves of one call, by lanes: each lane is launched on once, and each move swaps two at most.
#: A discipline that goes on beyond this goes round in circles.
_MOVES_PER_LANE = 8


class Scheduler:
    """Decides; changes only in ``handle``."""

    def __init__(self, params: SchedulerParams, totals: Totals | None = None) -> None:
        """With `totals`, those of a fleet that this device is part of."""
        self.params = params
        self._totals = totals or Totals()
        self._policy = get_policy(params.policy)
        self._discipline = get_discipline(params.discipline)
        self._window = make_window(params.window, params.window_ns)
        self._lane_ids = frozenset(params.device.lane_ids)
        self._plan = Plan(self._discipline.holds_groups)
        self._board = Board(params.device, self._plan, self._policy)
        self._backlog = Backlog(self._policy, sealing=not self._window.replans)
        self._totals.add_board(self._board)
        self._tasks = Tasks(self._backlog, self._plan, self._totals)
        self._planner = Planner(
            params,
            self._policy,
            self._discipline,
            self._window,
            self._backlog,
            self._board,
            self._tasks,
            self._totals.quarantine,
        )
        self._recycling = Recycling(params.device.lane_limit_bytes)
        self._draining = False
        #: Until when an idle lane is held for a task being prepared.
        self._held_until_ns: Nanos | None = None
        self._patience = Patience(params.patience)
        self._watch = Watch(self._board, params.run_limit_ns)
        self._now = Nanos(0)
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            TaskArrived: self._on_arrived,
            TaskPrepared: self._on_prepared,
            PrepareFailed: self._on_prepare_failed,
            TaskFinished: self._on_finished,
            TaskFailed: self._on_failed,
            TaskOverran: self._on_overran,
            TaskCancelled: self._on_cancelled,
            LaneReady: self._on_lane_ready,
            LaneLost: self._on_lane_lost,
            LaneMeasured: self._on_lane_measured,
            LaneSeen: self._on_lane_seen,
            BudgetChanged: self._on_budget_changed,
            SlowdownChanged: self._on_slowdown_changed,
            ModelUnloaded: self._on_model_unloaded,
            DrainStarted: self._on_drain_started,
            Tick: self._on_tick,
        }

    # What drivers call.

    def handle(self, event: Event, now_ns: Nanos) -> list[Command]:
        """Take in one event and say what to do about it, in this order.

        `now_ns` counts as no earlier than in the calls before. Raises InvariantViolation, with
        nothing changed, for an event that cannot happen.
        """
        tasks = self._tasks
        if now_ns > self._now:
            self._now = tasks.now_ns = now_ns
        out: list[Command] = []
        tasks.out = out
        self._handlers[type(event)](event)
        if self._recycling.over:
            self._recycle_idle()
        while tasks.expires_ns is not None and (expired := tasks.expired()) is not None:
            self._give_up(expired, Expired, Expired(expired.state.label))
        if self._watch.next_ns <= self._now:
            tasks.out += [LookAtLane(r.task_id, r.lane_id) for r in self._watch.due(self._now)]
        planner = self._planner
        planned = planner.plan_if_due()
        if tasks.queued and (planned or tasks.moved):
            planner.prepare_next()
        # To plan what is not prepared, or to prepare it, is no reason to ask the discipline.
        if tasks.moved or (planned and tasks.ready):
            while self._launch_ready():
                planned = planner.plan_if_due()
                if tasks.queued:
                    planner.prepare_next()
                if not planned:
                    break
            tasks.moved = False
            self._board.note(self._now)
        return out

    def next_wakeup(self) -> Nanos | None:
        """When a ``Tick`` is needed unless another event comes first; None: never."""
        wake_ns = self._planner.closes_ns() if self._window.open else None
        held_ns = self._held_until_ns
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
    def queued_count(self) -> int:
        """Accepted tasks not on a lane yet."""
        return self._tasks.pending

    @property
    def running_count(self) -> int:
        """Runs on lanes, suspended ones included."""
        return len(self._board.busy)

    @property
    def suspended_count(self) -> int:
        """Runs on lanes that stand suspended."""
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
        """Memory that tasks on lanes hold."""
        return self._board.ledger.reserved_bytes

    @property
    def budget_bytes(self) -> Bytes:
        """Memory for tasks."""
        return self._board.ledger.budget_bytes

    @property
    def devices(self) -> tuple["Scheduler", ...]:
        """Who decides for each device: of one, it does."""
        return (self,)

    @property
    def draining(self) -> bool:
        """Nothing new is accepted."""
        return self._draining

    @property
    def drained(self) -> bool:
        """Draining, and everything accepted is answered and released."""
        return self._draining and not self._tasks.records

    @property
    def prepares_at_once(self) -> bool:
        """Whether a task arriving now would be prepared now, so it may as well come prepared."""
        return self._window.replans and not self._draining and self._planner.is_short

    def quarantine_reason(self, model: str, now_ns: Nanos | None = None) -> str:
        """Return why the model is not run at `now_ns`, or at the last event; empty if it is."""
        return self._totals.quarantine.reason(model, self._now if now_ns is None else now_ns)

    def state(self, task_id: TaskId) -> State | None:
        """Where the task stands; DONE also for a refused one, None if it never arrived."""
        return self._tasks.state(task_id)

    def story(self, task_id: TaskId) -> tuple[str, ...]:
        """The task's moves as far as they are remembered, one line each."""
        return self._tasks.story(task_id)

    # Events.

    def _on_arrived(self, event: TaskArrived) -> None:
        task = event.task
        task_id = task.task_id
        tasks, totals = self._tasks, self._totals
        demand, shares, slots = totals.demand, totals.shares, totals.slots
        tasks.seen(task_id)
        if (rejected := totals.quarantine.rejects(task.model, self._now)) is not None:
            tasks.out += AnswerTask(task_id, rejected), ReleaseTask(task_id)
            return
        backlog_ns = Nanos(tasks.work_ns // self._board.slots)
        work_ns = task.estimate.solo_ns
        overloaded = demand.asked(work_ns, self._now, slots)
        shares.asks(task.tenant)
        at = target_class(task.qos.target_ns)
        sheds = overloaded and self.params.shed_late
        urgent_ns = Nanos(demand.there_ns(at) // slots) if sheds else None
        refusal = admit(
            task,
            budget_bytes=self._board.ledger.budget_bytes,
            unanswered=totals.unanswered,
            max_queue=self.params.max_queue,
            has_share=shares.may_queue(task.tenant, self.params.max_queue),
            urgent_ns=urgent_ns,
            backlog_ns=backlog_ns,
            draining=self._draining,
        )
        if refusal is not None:
            tasks.out += AnswerTask(task_id, refusal), ReleaseTask(task_id)
            return
        if overloaded and shares.is_over(task.tenant):
            task = less_urgent(task)
        left_before_ns = demand.came(at, work_ns)
        record = Record(task, self._policy.key(task), backlog_ns, at, left_before_ns)
        tasks.admit(record)
        self._window.arrived(task, self._now)
        if event.prepare_started_ns is not None:
            tasks.step(record, PrepareTask)
            tasks.step(record, TaskPrepared)
            record.prepare_started_ns, record.prepared_ns = event.prepare_started_ns, self._now

    def _on_prepared(self, event: TaskPrepared) -> None:
        record = self._tasks.get(event.task_id, TaskPrepared)
        self._tasks.step(record, TaskPrepared)
        record.prepared_ns = self._now
        if event.found is not None and record.state.pending:
            record.resize(event.found)
            if record.alone:
                record.reserve_all(self._board.ledger.budget_bytes)
            self._planner.fail_outgrown([record])

    def _on_prepare_failed(self, event: PrepareFailed) -> None:
        record = self._tasks.get(event.task_id, PrepareFailed)
        self._tasks.step(record, PrepareFailed, Failed(event.reason, event.message))

    def _on_finished(self, event: TaskFinished) -> None:
        run = self._run_of(event.task_id, event.lane_id, TaskFinished)
        self._totals.quarantine.lane_kept(run.model)
        totals, usage = self._totals, event.usage
        outcomes = [completed(r, usage, self._board, totals, self._now) for r in run.members]
        self._board.vacate(run, self._now)
        for record, outcome in zip(run.members, outcomes, strict=True):
            self._tasks.step(record, TaskFinished, outcome)

    def _on_failed(self, event: TaskFailed) -> None:
        run = self._run_of(event.task_id, event.lane_id, TaskFailed)
        self._totals.quarantine.lane_kept(run.model)
        self._board.vacate(run, self._now)
        if self._split(run, TaskFailed):
            return
        outcome = Failed(event.reason, event.message)
        if run.over_limit and event.reason is FailReason.STOPPED:
            outcome = Failed(FailReason.TIME_LIMIT, run.over_limit)
        self._tasks.step(run.members[0], TaskFailed, outcome)

    def _on_overran(self, event: TaskOverran) -> None:
        run = self._run_of(event.task_id, event.lane_id, TaskOverran)
        self._totals.quarantine.lane_kept(run.model)
        self._board.vacate(run, self._now)
        if self._split(run, TaskOverran):
            return
        record = run.members[0]
        budget_bytes = self._board.ledger.budget_bytes
        if record.state.answered:
            self._tasks.step(record, TaskOverran)
        elif record.alone or record.task.reserve_bytes >= budget_bytes:
            message = f"{event.message}; the device has {budget_bytes} bytes for tasks"
            self._tasks.step(record, Failed, Failed(FailReason.OUT_OF_MEMORY, message))
        else:
            self._tasks.step(record, TaskOverran)
            record.alone = record.retried = True
            record.reserve_all(budget_bytes)

    def _split(self, run: Run, cause: Cause) -> bool:
        """Have each member run by itself if there are several: only one need be at fault."""
        if len(run.members) == 1:
            return False
        for record in reversed(run.members):
            self._tasks.step(record, cause if record.state.answered else UnionSplit)
            record.apart = True
        # The budget may have been lowered while they ran.
        self._planner.fail_outgrown([r for r in run.members if r.state.pending])
        return True

    def _on_cancelled(self, event: TaskCancelled) -> None:
        task_id = event.task_id
        record = self._tasks.records.get(task_id)
        if record is not None:
            self._give_up(record, TaskCancelled, Cancelled(record.state.label))
        elif not self._tasks.known(task_id):
            raise self._tasks.violation(task_id, "TaskCancelled before it arrived")

    def _on_lane_ready(self, event: LaneReady) -> None:
        lane_id = event.lane_id
        self._require_lane(lane_id)
        if lane_id in self._board.idle or lane_id in self._board.busy:
            raise InvariantViolation(f"lane {lane_id} is ready and was up already")
        self._board.lane_up(lane_id)
        self._recycling.up(lane_id)
        self._planner.stale = True

    def _on_lane_lost(self, event: LaneLost) -> None:
        for lane_id in (event.lane_id, *event.others):
            self._require_lane(lane_id)
            self._recycling.restarted(lane_id)
            run = self._board.busy.get(lane_id)
            if run is not None:
                self._blame(run.model)
                self._board.vacate(run, self._now)
                for record in reversed(run.members):
                    record.apart = len(run.members) > 1
                    self._lose(record, lane_id, "" if record.apart else run.over_limit)
            # A lane may also be lost while it starts, before it was ever ready.
            self._board.lane_down(lane_id)
        self._planner.stale = True

    def _blame(self, model: str) -> None:
        """Count a lane that a run of the model ended, and quarantine the model when due."""
        if self._totals.quarantine.lane_lost(model, self._now):
            self._tasks.out.append(QuarantineModel(model, self.quarantine_reason(model)))

    def _lose(self, record: Record, lane_id: LaneId, over_limit: str) -> None:
        """The lane died under the record: it is handed over, once, unless it took too long."""
        if over_limit and not record.state.answered:
            self._tasks.step(record, Failed, Failed(FailReason.TIME_LIMIT, over_limit))
            return
        if record.retried and not record.state.answered:
            before = "alone, after it overran" if record.alone else "as another did before"
            message = f"lane {lane_id} died while running it, {before}"
            self._tasks.step(record, Failed, Failed(FailReason.LANE_LOST, message))
            return
        self._tasks.step(record, LaneLost)
        record.retried = True
        if record.state.pending:
            # The budget may have been lowered while it ran.
            self._planner.fail_outgrown([record])

    def _on_lane_measured(self, event: LaneMeasured) -> None:
        self._require_lane(event.lane_id)
        self._recycling.measured(event.lane_id, event.held_bytes)

    def _recycle_idle(self) -> None:
        """Have idle lanes that hold too much started anew, one at a time."""
        while (lane_id := self._recycling.next(self._board.idle)) is not None:
            self._board.lane_down(lane_id)
            self._tasks.out.append(RecycleLane(lane_id))
            self._planner.stale = True

    def _on_lane_seen(self, event: LaneSeen) -> None:
        run = self._board.busy.get(event.lane_id)
        if run is None or run.task_id != event.task_id or run.stopping or not run.executing:
            return
        verdict = self._watch.seen(run, event.look, self._now)
        if verdict is Verdict.GOES_ON:
            return
        run.stopping = True
        if verdict is Verdict.STANDS_STILL:
            self._tasks.out.append(KillLane(run.task_id, run.lane_id))
            return
        took_s, may_s = run.taken_ns / 1e9, self._watch.limit_ns(run) / 1e9
        run.over_limit = f"its run took {took_s:.1f} s, a run of it may take {may_s:g} s"
        self._tasks.out.append(StopTask(run.task_id, run.lane_id))

    def _on_budget_changed(self, event: BudgetChanged) -> None:
        ledger = self._board.ledger
        if event.budget_bytes < ledger.budget_bytes and self._tasks.pending:
            self._planner.shrunk = True
        ledger.set_budget(event.budget_bytes)
        self._planner.stale = True
        for group in list(self._plan.groups):
            if group.pinned:
                for record in group.members:
                    if record.alone:
                        record.reserve_all(event.budget_bytes)
                self._planner.fail_outgrown(list(group.members))

    def _on_slowdown_changed(self, event: SlowdownChanged) -> None:
        self._board.set_slowdown(event.slowdown, self._now)
        self._tasks.moved = True

    def _on_model_unloaded(self, event: ModelUnloaded) -> None:
        self._totals.quarantine.forget(event.model)

    def _on_drain_started(self, event: DrainStarted) -> None:
        self._draining = True

    def _on_tick(self, event: Tick) -> None:
        """Planning and expiry follow every event; here, what the discipline waited for."""
        self._tasks.moved = True

    # The life of a task.

    def _give_up(self, record: Record, cause: Cause, outcome: Outcome) -> None:
        """The client waits no longer; a run nobody waits for is stopped."""
        self._tasks.step(record, cause, outcome)
        run = record.run
        if run is None or run.stopping or not all(r.state.answered for r in run.members):
            return
        run.stopping = True
        self._tasks.out.append(StopTask(run.task_id, run.lane_id))

    def _run_of(self, task_id: TaskId, lane_id: LaneId, cause: Cause) -> Run:
        """The run that the task names, on that lane; raises InvariantViolation if it is not."""
        run = self._tasks.get(task_id, cause).run
        if run is not None and (run.lane_id, run.task_id) == (lane_id, task_id):
            return run
        where = "on no lane" if run is None else f"on lane {run.lane_id}"
        if run is not None and run.task_id != task_id:
            where += f" with task {run.task_id}"
        what = f"{cause.__name__} from lane {lane_id} while {where}"
        raise self._tasks.violation(task_id, what)

    def _require_lane(self, lane_id: LaneId) -> None:
        if lane_id not in self._lane_ids:
            raise InvariantViolation(f"lane {lane_id} is not one of {sorted(self._lane_ids)}")

    # Launching.

    def _launch_ready(self) -> bool:
        """Carry out the discipline's moves; whether there were any."""
        moved = False
        board = self._board
        moves_left = _MOVES_PER_LANE * len(self._lane_ids)
        while moves_left:
            if board.plan.count == 0 and board.executing_count == len(board.busy):
                self._held_until_ns = None
                return moved
            move = self._discipline.decide(self._board, self.params.bypass_limit, self._now)
            if isinstance(move, Wait):
                self._held_until_ns = move.until_ns
                return moved
            to_launch = move.favoured if isinstance(move, Suspend) else move
            if isinstance(to_launch, Launch) and self._planner.fail_quarantined(to_launch.record):
                moved = True
                continue
            moves_left -= 1
            if isinstance(move, Suspend):
                self._suspend(move.run)
                move = move.favoured
            if isinstance(move, Launch):
                for passed in move.bypassed:
                    passed.bypassed += 1
                self._launch(move.record)
            else:
                self._resume(move.run)
            moved = True
        raise InvariantViolation(f"discipline {self._discipline.name} never waits")

    def _suspend(self, run: Run) -> None:
        for record in run.members:
            self._tasks.step(record, SuspendTask)
        self._board.suspend(run, self._now)
        self._tasks.out.append(SuspendTask(run.task_id, run.lane_id))

    def _resume(self, run: Run) -> None:
        for record in run.members:
            self._tasks.step(record, ResumeTask)
        self._board.resume(run, self._now)
        if self.params.watched:
            self._watch.goes_on(run, self._now)
        self._tasks.out.append(ResumeTask(run.task_id, run.lane_id))

    def _launch(self, record: Record) -> None:
        """Launch the record, with those that join it."""
        members: tuple[Record, ...] = (record,)
        estimate = record.task.estimate
        unions = self.params.unions
        if unions is not None:
            members, estimate = gather(
                record,
                self._board,
                unions,
                self._now,
                most=self.params.most_merged,
                own_group=self._discipline.holds_groups,
            )
        first = self._leave_plan(record)
        for member in members[1:]:
            self._leave_plan(member)
        run = self._board.occupy(members, estimate, self._now)
        if self.params.watched:
            self._watch.begins(run, self._now)
        for member in members:
            member.run = run
            member.attempt += 1
        assert first.group_id is not None
        companions = tuple(member.task.task_id for member in members[1:])
        self._tasks.out.append(
            LaunchTask(
                run.task_id, run.lane_id, first.group_id, first.size, run.reserve_bytes, companions
            )
        )
        self._count_passed_over()

    def _leave_plan(self, record: Record) -> PlannedGroup:
        """The record goes onto a lane; its group, by now numbered."""
        record.prepare_exposed_ns = self._board.waited_for_ns(record, self._now)
        self._tasks.step(record, LaunchTask)
        group = self._plan.launch(record)
        if group.group_id is None:
            group.group_id = self._totals.next_group_id()
        if self._discipline.holds_groups and not group.pinned:
            self._plan.pin(group)
            for member in group.members:
                self._backlog.discard(member)
        return group

    def _count_passed_over(self) -> None:
        """Put the longest waiting task first once `patience` others went before it."""
        if not self._window.replans:
            return
        oldest = self._patience.launched(self._backlog, self._board)
        if oldest is None:
            return
        oldest.promoted = True
        if oldest.state.pending:
            self._backlog.discard(oldest)
            if oldest.group is not None:
                self._plan.remove(oldest, self._now)
            self._plan.put_first(oldest)
