"""Carries out what the discipline decides: runs are launched, suspended and resumed.

See ``disciplines`` for the decisions and ``rules.merging`` for which tasks share a run.
"""

from serve.core.commands import LaunchTask, ResumeTask, SuspendTask
from serve.core.disciplines.base import LaunchMove, SuspendMove, WaitMove
from serve.core.disciplines.order import leaves_last_lane
from serve.core.parts import SchedulerParts
from serve.core.rules.merging import gather
from serve.core.rules.patience import Patience
from serve.core.rules.watch import NEVER_NS
from serve.core.state.record import PlannedGroup, Record, Run
from serve.core.types import Nanos
from serve.errors import InvariantViolation

#: Moves of one call, by lanes: each lane is launched on once, and each move swaps two at most.
#: A discipline that goes on beyond this goes round in circles.
_MOVES_PER_LANE = 8


class Launcher:
    """Moves runs onto lanes and off their slots."""

    __slots__ = (
        "_board",
        "_parts",
        "_patience",
        "_planner",
        "_recycling",
        "_replans",
        "_reserved",
        "_suspends",
        "_tasks",
        "_totals",
        "_watch",
        "_watched",
        "_window",
        "held_until_ns",
    )

    def __init__(self, parts: SchedulerParts) -> None:
        self._parts = parts
        self._board, self._tasks, self._totals = parts.board, parts.tasks, parts.totals
        self._planner, self._recycling, self._watch = parts.planner, parts.recycling, parts.watch
        self._window, self._watched = parts.window, parts.params.watched
        self._reserved = parts.reserved
        #: A group may start whatever else runs, and everything is planned anew each time.
        self._replans = parts.window.replans and not parts.discipline.holds_groups
        #: A run may be suspended for another, so lanes count, not slots.
        self._suspends = parts.discipline.suspends and parts.board.can_suspend
        self._patience = Patience(parts.params.patience, holds_groups=parts.discipline.holds_groups)
        #: Until when an idle lane is held for a task that is being prepared.
        self.held_until_ns: Nanos | None = None

    def launch_at_once(self, record: Record) -> bool:
        """Accept and launch a new, prepared record where nothing waits and a lane is free.

        The short way for what planning, discipline and ``launch_ready`` come to then: the record's
        own group, started now. Returns False, with nothing changed, wherever they might come to
        something else.
        """
        board, tasks, now_ns = self._board, self._tasks, self._tasks.now_ns
        task, executing = record.task, board.executing_count
        estimate, timeout_ns = task.estimate, task.qos.timeout_ns
        if (
            not self._replans
            or tasks.pending
            or self._window.open
            or self._planner.stale
            or not board.idle_for(task)
            or executing >= board.max_slots
            or leaves_last_lane(
                record, board, len(board.idle) if self._suspends else board.free_slots
            )
            or executing != len(board.busy)
            or board.ledger.need_bytes(task) > board.ledger.available_bytes
            or (executing and board.weighs_slowdown and board.slowdown[-1] != 1.0)
            or self._recycling.over
            or (executing and self._watch.next_ns <= now_ns)
            or (timeout_ns is not None and task.arrived_ns + timeout_ns <= now_ns)
            or (tasks.expires_ns is not None and tasks.expires_ns <= now_ns)
        ):
            return False
        if not task.best_effort:
            self._window.passed(now_ns)
        self._patience.nobody_waits()
        self.held_until_ns = None
        record.prepare_exposed_ns = board.waited_for_ns(record, now_ns)
        group_id = self._totals.next_group_id()
        record.group = PlannedGroup([], 1, False, group_id, 1)
        tasks.admit_launched(record)
        run = board.occupy((record,), estimate, now_ns)
        if self._watched:
            if not executing and self._watch.next_ns <= now_ns:
                self._watch.next_ns = NEVER_NS  # of a run that ended
            self._watch.begins(run, now_ns)
        record.run = run
        record.attempt = 1
        bounded = self._reserved.keeps_off(estimate.run_ns, now_ns)
        tasks.out.append(
            LaunchTask(run.task_id, run.lane_id, group_id, 1, run.reserve_bytes, bounded=bounded)
        )
        board.note(now_ns)
        return True

    def launch_ready(self) -> bool:
        """Carry out the discipline's moves until it waits; return True when there were any."""
        moved = False
        parts = self._parts
        board, tasks, now_ns = parts.board, parts.tasks, parts.tasks.now_ns
        moves_left = _MOVES_PER_LANE * (len(parts.params.device.lane_ids) + len(board.domain_of))
        while moves_left:
            if board.plan.count == 0 and board.executing_count == len(board.busy):
                self.held_until_ns = None
                return moved
            move = parts.discipline.decide(board, parts.params.bypass_limit, now_ns)
            if isinstance(move, WaitMove):
                self.held_until_ns = move.until_ns
                return moved
            moved = True
            to_launch = move.favoured if isinstance(move, SuspendMove) else move
            if isinstance(to_launch, LaunchMove) and parts.planner.fail_quarantined(
                to_launch.record
            ):
                continue
            moves_left -= 1
            if isinstance(move, SuspendMove):
                self._suspend(move.run)
                move = move.favoured
            if isinstance(move, LaunchMove):
                for passed in move.bypassed:
                    passed.bypassed += 1
                self._launch(move.record)
            else:
                self._resume(move.run)
        held = f"{tasks.pending} tasks are pending"
        raise InvariantViolation(f"discipline {parts.discipline.name} never waits; {held}")

    def _suspend(self, run: Run) -> None:
        tasks = self._parts.tasks
        for record in run.members:
            tasks.step(record, SuspendTask)
        self._parts.board.suspend(run, tasks.now_ns)
        tasks.out.append(SuspendTask(run.task_id, run.lane_id))

    def _resume(self, run: Run) -> None:
        parts = self._parts
        tasks = parts.tasks
        for record in run.members:
            tasks.step(record, ResumeTask)
        parts.board.resume(run, tasks.now_ns)
        if parts.params.watched:
            parts.watch.goes_on(run, tasks.now_ns)
        tasks.out.append(ResumeTask(run.task_id, run.lane_id))

    def _launch(self, record: Record) -> None:
        """Launch the record, with those that join it."""
        parts = self._parts
        board, tasks, params = parts.board, parts.tasks, parts.params
        members: tuple[Record, ...] = (record,)
        estimate = record.task.estimate
        if params.unions is not None:
            members, estimate = gather(
                record,
                board,
                params.unions,
                tasks.now_ns,
                most=params.most_merged,
                own_group=parts.discipline.holds_groups,
            )
        first = self._leave_plan(record)
        for member in members[1:]:
            self._leave_plan(member)
        run = board.occupy(members, estimate, tasks.now_ns)
        if params.watched:
            parts.watch.begins(run, tasks.now_ns)
        for member in members:
            member.run = run
            member.attempt += 1
        assert first.group_id is not None
        companions = tuple(member.task.task_id for member in members[1:])
        bounded = self._reserved.keeps_off(estimate.run_ns, tasks.now_ns)
        tasks.out.append(
            LaunchTask(
                run.task_id, run.lane_id, first.group_id, first.size, run.reserve_bytes, companions,
                bounded,
            )
        )  # fmt: skip
        self._promote_the_patient()

    def _leave_plan(self, record: Record) -> PlannedGroup:
        """Take the record, which goes onto a lane, off the plan; return its group, numbered."""
        parts = self._parts
        plan = parts.plan
        record.prepare_exposed_ns = parts.board.waited_for_ns(record, parts.tasks.now_ns)
        parts.tasks.step(record, LaunchTask)
        group = plan.launch(record)
        if group.group_id is None:
            group.group_id = parts.totals.next_group_id()
        if parts.discipline.holds_groups and not group.pinned:
            plan.pin(group)
            for member in group.members:
                parts.backlog.discard(member)
        return group

    def _promote_the_patient(self) -> None:
        """Put the longest waiting task first once `patience` others were launched before it.

        One whose place in the plan is fixed keeps that: from there it is not passed by again.
        """
        parts = self._parts
        oldest = self._patience.launched(parts.backlog, parts.board, parts.tasks.now_ns)
        if oldest is None:
            return
        oldest.promoted = True
        if oldest.task.task_id in parts.backlog and parts.window.replans:
            parts.backlog.discard(oldest)
            if oldest.group is not None:
                parts.plan.remove(oldest, parts.tasks.now_ns)
            parts.plan.put_first(oldest)
