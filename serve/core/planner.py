"""Planning: when pending tasks are planned, and which of the plan the host prepares.

Covers when the window closes, what a planning looks at, and how far the host works ahead. Does not
cover how tasks are grouped, see ``policies``, nor how a plan is run, see ``disciplines``.
"""

from serve.core.commands import PrepareTask
from serve.core.disciplines.base import Discipline
from serve.core.lifecycle import State
from serve.core.params import SchedulerParams
from serve.core.policies import Policy
from serve.core.rules.quarantine import Quarantine
from serve.core.rules.window import Window
from serve.core.state.backlog import Backlog
from serve.core.state.device_state import Board
from serve.core.state.record import Record
from serve.core.state.tasks import Tasks
from serve.core.types import Capacity, Failed, FailReason, Nanos
from serve.errors import InvariantViolation

#: Looked up for every task in the plan.
_QUEUED = State.QUEUED


class Planner:
    """Moves tasks from one device's backlog into its plan."""

    def __init__(
        self,
        params: SchedulerParams,
        policy: Policy,
        discipline: Discipline,
        window: Window,
        backlog: Backlog,
        board: Board,
        tasks: Tasks,
        quarantine: Quarantine,
    ) -> None:
        #: Lanes or budget changed: the plan was made for another device.
        self.stale = False
        #: The budget was lowered while tasks were pending, so some may never fit.
        self.shrunk = False
        self._horizon = params.planned_at_once
        self._prepare_depth = params.prepare_depth
        self._policy = policy
        self._discipline = discipline
        self._window = window
        self._backlog = backlog
        self._board = board
        self._plan = board.plan
        self._tasks = tasks
        self._quarantine = quarantine

    @property
    def is_short(self) -> bool:
        """A lane or the prepare stage could take more than is planned."""
        return self._plan.count < self._prepare_depth + self._board.free_slots

    def closes_ns(self) -> Nanos | None:
        """Return when the window closes; None when nothing has arrived since it last closed."""
        if not self._window.open:
            return None
        return self._window.closes_ns(self._discipline.could_start(self._board))

    def horizon(self) -> list[Record]:
        """Return the tasks that would be planned next."""
        return self._backlog.horizon(self._horizon, self._tasks.now_ns)

    def plan_if_due(self) -> bool:
        """Plan when the window has closed, when the plan runs short, or when it is stale.

        Whether the plan is another one now.
        """
        window, stale = self._window, self.stale
        unplanned = self._backlog.plannable_count - self._plan.loose
        if not (window.open or unplanned or stale):
            return False
        planned = 0
        now_ns = self._tasks.now_ns
        closes_ns = self.closes_ns()
        closed = closes_ns is not None and closes_ns <= now_ns
        if window.replans:
            if closed or stale or (unplanned and self.is_short):
                self._plan.drop_loose()
                planned = self._plan_next(pinned=False)
                window.closed(now_ns, planned)
        else:
            if closed:
                self._backlog.seal()
                window.closed(now_ns, 0)
            while self._plan.count < self._horizon and (added := self._plan_next(pinned=True)):
                planned += added
        if stale:
            self.stale = False
            self._tasks.moved = True
        return planned > 0

    def prepare_next(self) -> None:
        """Have the host prepare the tasks that launch next."""
        plan, tasks = self._plan, self._tasks
        if not plan.count:
            return
        quota = self._prepare_depth + self._board.free_slots
        for group in plan.groups:
            for record in group.members:
                if quota <= 0:
                    return
                quota -= 1
                if record.state is _QUEUED:
                    tasks.step(record, PrepareTask)
                    record.prepare_started_ns = tasks.now_ns
                    tasks.out.append(PrepareTask(record.task.task_id))

    def fail_outgrown(self, records: list[Record]) -> bool:
        """Fail those that will never have the memory they need; whether there were any."""
        budget_bytes = self._board.ledger.budget_bytes
        outgrown = [
            (record, why) for record in records if (why := record.task.lacks(budget_bytes, " now"))
        ]
        for record, why in outgrown:
            self._tasks.step(record, Failed, Failed(FailReason.OUT_OF_MEMORY, why))
        return bool(outgrown)

    def fail_quarantined(self, record: Record) -> bool:
        """Fail the record if its model is in quarantine; return True when it was."""
        reason = self._quarantine.reason(record.task.model, self._tasks.now_ns)
        if reason:
            self._tasks.step(record, Failed, Failed(FailReason.QUARANTINED, reason))
        return bool(reason)

    def _plan_next(self, pinned: bool) -> int:
        """Append groups made of the backlog's horizon; how many tasks these are."""
        records = self.horizon()
        while self.shrunk and self.fail_outgrown(records):
            records = self.horizon()
        if not records:
            return 0
        if len(records) == 1:  # as often as not, and there is nothing to decide
            self._plan.append(records, pinned)
        else:
            self._append_groups(records, pinned)
        if pinned:
            for record in records:
                self._backlog.discard(record)
        return len(records)

    def _append_groups(self, records: list[Record], pinned: bool) -> None:
        """Append what the policy makes of the records."""
        capacity = Capacity(self._board.ledger.budget_bytes, self._board.slots)
        by_id = self._tasks.records
        planned = 0
        for group in self._policy.plan([r.task for r in records], capacity, self._tasks.now_ns):
            members = [by_id[task.task_id] for task in group.tasks]
            planned += len(members)
            self._plan.append(members, pinned)
        if planned != len(records):
            raise InvariantViolation(
                f"policy {self._policy.name} planned {planned} tasks of {len(records)}"
            )
