"""Event handlers: what an event changes before anything is planned or launched for it.

One method for each class of ``events``. See ``lifecycle`` for what may happen to a task and
``scheduler`` for what follows an event.
"""

from collections.abc import Callable
from typing import Any

from serve.core.arrivals import Arrivals
from serve.core.commands import (
    KillLane,
    QuarantineModel,
    RecycleLane,
    StopTask,
)
from serve.core.ending import completed, give_up
from serve.core.events import (
    BudgetChanged,
    DomainClosed,
    DomainOpened,
    DrainStarted,
    Event,
    LaneLost,
    LaneMeasured,
    LaneReady,
    LaneRemoved,
    LaneReplaced,
    LaneSeen,
    LimitsChanged,
    ModelUnloaded,
    PrepareFailed,
    RunTakesLess,
    SlowdownChanged,
    TaskArrived,
    TaskCancelled,
    TaskFailed,
    TaskFinished,
    TaskOverran,
    TaskPrepared,
    TasksArrived,
    TenantsChanged,
    Tick,
)
from serve.core.launcher import Launcher
from serve.core.lifecycle import Cause, UnionSplit
from serve.core.parts import SchedulerParts
from serve.core.rules.watch import Verdict
from serve.core.state.record import Record, Run
from serve.core.types import (
    Expired,
    Failed,
    FailReason,
    LaneId,
    Withdrawn,
)
from serve.errors import InvariantViolation


class EventHandlers:
    """Takes in events for one device."""

    __slots__ = (
        "_arrivals",
        "_board",
        "_own_lanes",
        "_parts",
        "_planner",
        "_quarantine",
        "_recycling",
        "_tasks",
        "_totals",
        "by_event",
    )

    def __init__(self, parts: SchedulerParts, launcher: Launcher) -> None:
        self._parts, self._totals = parts, parts.totals
        self._board, self._tasks, self._planner = parts.board, parts.tasks, parts.planner
        self._recycling, self._quarantine = parts.recycling, parts.totals.quarantine
        self._own_lanes = parts.own_lanes
        self._arrivals = arrivals = Arrivals(parts, launcher)
        self.by_event: dict[type[Event], Callable[[Any], None]] = {
            TaskArrived: arrivals.one,
            TasksArrived: arrivals.several,
            TaskPrepared: self._on_prepared,
            PrepareFailed: self._on_prepare_failed,
            TaskFinished: self._on_finished,
            TaskFailed: self._on_failed,
            TaskOverran: self._on_overran,
            RunTakesLess: self._on_takes_less,
            TaskCancelled: self._on_cancelled,
            LaneReady: self._on_lane_ready,
            LaneLost: self._on_lane_lost,
            LaneMeasured: self._on_lane_measured,
            LaneReplaced: self._on_lane_replaced,
            LaneSeen: self._on_lane_seen,
            BudgetChanged: self._on_budget_changed,
            SlowdownChanged: self._on_slowdown_changed,
            TenantsChanged: self._on_tenants_changed,
            LimitsChanged: self._on_limits_changed,
            ModelUnloaded: self._on_model_unloaded,
            DomainOpened: self._on_domain_opened,
            DomainClosed: self._on_domain_closed,
            LaneRemoved: self._on_lane_removed,
            DrainStarted: self._on_drain_started,
            Tick: self._on_tick,
        }

    @property
    def draining(self) -> bool:
        """True when nothing new is accepted."""
        return self._arrivals.draining

    def expire(self, record: Record) -> None:
        """Answer the record, whose time limit has passed."""
        give_up(self._tasks, record, Expired, Expired(record.state.label))

    def recycle_idle_lanes(self) -> None:
        """Have idle lanes that hold too much or ran enough started anew, one at a time."""
        while (found := self._recycling.next(self._board.idle)) is not None:
            lane_id, reason = found
            self._board.lane_down(lane_id)
            self._tasks.out.append(RecycleLane(lane_id, reason))
            self._planner.stale = True

    # Requests.

    def _on_prepared(self, event: TaskPrepared) -> None:
        record = self._tasks.get(event.task_id, TaskPrepared)
        self._tasks.step(record, TaskPrepared)
        record.prepared_ns = self._tasks.now_ns
        if event.found is not None and record.state.pending:
            record.resize(event.found)
            if record.alone:
                record.reserve_all(self._board.ledger.budget_bytes)
            self._planner.fail_outgrown([record])

    def _on_prepare_failed(self, event: PrepareFailed) -> None:
        record = self._tasks.get(event.task_id, PrepareFailed)
        self._tasks.step(record, PrepareFailed, Failed(event.reason, event.message))

    def _on_finished(self, event: TaskFinished) -> None:
        run = self._parts.run_of(event.task_id, event.lane_id, TaskFinished)
        if self._quarantine.models:
            self._quarantine.lane_kept(run.model)
        self._recycling.ran(run.lane_id, len(run.members))
        board, tasks, totals, usage = self._board, self._tasks, self._totals, event.usage
        now_ns = tasks.now_ns
        if len(run.members) == 1:
            record = run.members[0]
            outcome = completed(record, usage, board, totals, now_ns)
            board.vacate(run, now_ns)
            tasks.step(record, TaskFinished, outcome)
            return
        outcomes = [completed(r, usage, board, totals, now_ns) for r in run.members]
        board.vacate(run, now_ns)
        for record, outcome in zip(run.members, outcomes, strict=True):
            tasks.step(record, TaskFinished, outcome)

    def _on_failed(self, event: TaskFailed) -> None:
        run = self._parts.run_of(event.task_id, event.lane_id, TaskFailed)
        self._gave_way(run)
        if self._split(run, TaskFailed):
            return
        outcome = Failed(event.reason, event.message)
        if run.over_limit and event.reason is FailReason.STOPPED:
            outcome = Failed(FailReason.TIME_LIMIT, run.over_limit)
        self._tasks.step(run.members[0], TaskFailed, outcome)

    def _on_overran(self, event: TaskOverran) -> None:
        run = self._parts.run_of(event.task_id, event.lane_id, TaskOverran)
        self._gave_way(run)
        if self._split(run, TaskOverran):
            return
        record = run.members[0]
        budget_bytes = self._board.ledger.budget_bytes
        if record.state.answered:
            self._tasks.step(record, TaskOverran)
        elif run.gave_back and not record.retried:
            # It did not have what was estimated; it runs again with that.
            self._tasks.step(record, TaskOverran)
            record.retried = True
            self._planner.fail_outgrown([record])
        elif record.alone or record.task.reserve_bytes >= record.task.most_bytes(budget_bytes):
            message = f"{event.message}; the device has {budget_bytes} bytes for tasks"
            if record.task.most_bytes(budget_bytes) < budget_bytes:
                limit_bytes = record.task.limits.memory_bytes
                message = f"{event.message}; its model may take {limit_bytes} (model.max_memory)"
            self._tasks.step(record, Failed, Failed(FailReason.OUT_OF_MEMORY, message))
        else:
            self._tasks.step(record, TaskOverran)
            record.alone = record.retried = True
            record.reserve_all(budget_bytes)

    def _on_takes_less(self, event: RunTakesLess) -> None:
        run = self._parts.run_of(event.task_id, event.lane_id, RunTakesLess)
        less = event.reserve_bytes < run.reserve_bytes
        if less and run.members[0].task.block is None:
            self._board.ledger.shrink(run.task_id, event.reserve_bytes)
            run.reserve_bytes, run.gave_back = event.reserve_bytes, True
            self._tasks.moved = True

    def _gave_way(self, run: Run) -> None:
        """Note that the run ended without an output, and that its lane is idle."""
        self._quarantine.lane_kept(run.model)
        self._recycling.ran(run.lane_id, len(run.members))
        self._board.vacate(run, self._tasks.now_ns)

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
            give_up(self._tasks, record, TaskCancelled, Withdrawn(record.state.label))
        elif not self._tasks.known(task_id):
            raise self._tasks.violation(task_id, "TaskCancelled before it arrived")

    def _on_lane_ready(self, event: LaneReady) -> None:
        lane_id = event.lane_id
        self._own_lanes.require(lane_id)
        if lane_id in self._board.idle or lane_id in self._board.busy:
            raise InvariantViolation(f"lane {lane_id} is ready and was up already")
        self._board.lane_up(lane_id)
        self._recycling.up(lane_id)
        self._planner.stale = True

    def _on_lane_lost(self, event: LaneLost) -> None:
        lost = event.lane_id, *event.others
        for lane_id in lost:
            self._own_lanes.require(lane_id)
        for lane_id in lost:
            self._recycling.restarted(lane_id)
            run = self._board.busy.get(lane_id)
            if run is not None:
                self._blame(run.model)
                self._board.vacate(run, self._tasks.now_ns)
                merged = len(run.members) > 1
                for record in reversed(run.members):
                    record.apart |= merged
                    self._lose(record, lane_id, "" if merged else run.over_limit)
            # A lane may also be lost while it starts, before it was ever ready.
            self._board.lane_down(lane_id)
        self._planner.stale = True

    def _blame(self, model: str) -> None:
        """Count a lane that a run of the model ended, and quarantine the model when due."""
        if self._quarantine.lane_lost(model, self._tasks.now_ns):
            self._tasks.out.append(
                QuarantineModel(model, self._quarantine.reason(model, self._tasks.now_ns))
            )

    def _lose(self, record: Record, lane_id: LaneId, over_limit: str) -> None:
        """Hand the record of a lost lane over, once, or fail it when it took too long."""
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
        self._own_lanes.require(event.lane_id)
        self._recycling.measured(event.lane_id, event.held_bytes)

    def _on_lane_replaced(self, event: LaneReplaced) -> None:
        self._own_lanes.require(event.lane_id)
        self._recycling.restarted(event.lane_id)

    def _on_lane_seen(self, event: LaneSeen) -> None:
        run = self._board.busy.get(event.lane_id)
        if run is None or run.task_id != event.task_id or run.stopping or not run.executing:
            return
        verdict = self._parts.watch.seen(run, event.look, self._tasks.now_ns)
        if run.overdue:
            # One run that hangs or never ends must not keep the next group from the other lanes.
            for record in run.members:
                self._parts.plan.let_go(record, self._tasks.now_ns)
            self._tasks.moved = True
        if verdict is Verdict.GOES_ON:
            return
        run.stopping = True
        if verdict is Verdict.STANDS_STILL:
            self._tasks.out.append(KillLane(run.task_id, run.lane_id))
            return
        took_s, may_s = run.taken_ns / 1e9, self._parts.watch.limit_ns(run) / 1e9
        run.over_limit = f"its run took {took_s:.1f} s, a run of it may take {may_s:g} s"
        self._tasks.out.append(StopTask(run.task_id, run.lane_id))

    def _on_budget_changed(self, event: BudgetChanged) -> None:
        ledger = self._board.ledger
        if event.budget_bytes < ledger.budget_bytes and self._tasks.pending:
            self._planner.shrunk = True
        ledger.set_budget(event.budget_bytes)
        self._planner.stale = True
        for group in list(self._parts.plan.groups):
            if group.pinned:
                for record in group.members:
                    if record.alone:
                        record.reserve_all(event.budget_bytes)
                self._planner.fail_outgrown(list(group.members))

    def _on_slowdown_changed(self, event: SlowdownChanged) -> None:
        self._board.set_slowdown(event.slowdown, self._tasks.now_ns)
        self._tasks.moved = True

    def _on_tenants_changed(self, event: TenantsChanged) -> None:
        self._totals.shares.set_rules(event.tenants)
        self._totals.rates.set_rules(event.tenants)

    def _on_limits_changed(self, event: LimitsChanged) -> None:
        self._arrivals.set_limits(event.max_queue, sheds_late=event.shed_late)
        self._parts.watch.set_limit(event.run_limit_ns)

    def _on_model_unloaded(self, event: ModelUnloaded) -> None:
        self._quarantine.forget(event.model)

    def _on_domain_opened(self, event: DomainOpened) -> None:
        self._tasks.out += self._own_lanes.open(event.domain)

    def _on_domain_closed(self, event: DomainClosed) -> None:
        """The scheduler takes the lanes away that run nothing, now and later."""
        for record in self._tasks.records.values():
            if record.state.pending and record.task.domain == event.domain:
                raise InvariantViolation(f"{event.domain} is closed; a task of it waits")
        self._own_lanes.close(event.domain)

    def _on_lane_removed(self, event: LaneRemoved) -> None:
        self._own_lanes.removed(event.lane_id)

    def _on_drain_started(self, event: DrainStarted) -> None:
        self._arrivals.drain()

    def _on_tick(self, event: Tick) -> None:
        """Planning and expiry follow every event; here, what the discipline waited for."""
        self._tasks.moved = True
