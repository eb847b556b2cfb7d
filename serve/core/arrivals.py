"""Arrivals: which tasks enter, and what they find.

See ``rules.admission`` for the reasons to refuse one. A task of best effort (``Task.best_effort``)
enters only where no other is accepted and every lane of its device is idle, and starts at once. It
is given up when another arrives: its run is told to stop, and it never waits, runs again, or counts
as load. So beside it others are planned as without it, but for the slot and the memory that its run
holds until it has stopped.
"""

from msgspec.structs import replace

from serve.core.commands import AnswerTask, PrepareTask, ReleaseTask
from serve.core.ending import give_up
from serve.core.events import TaskArrived, TaskCancelled, TaskPrepared, TasksArrived
from serve.core.launcher import Launcher
from serve.core.parts import SchedulerParts
from serve.core.rules.admission import admit
from serve.core.rules.demand import target_class
from serve.core.rules.packing import behind_others, beyond_limits, less_urgent
from serve.core.state.record import Record
from serve.core.types import ZERO_NS, Nanos, Rejected, RejectReason, Task, Withdrawn


class Arrivals:
    """Takes in the arrivals of one device."""

    __slots__ = (
        "_board",
        "_key",
        "_launcher",
        "_max_queue",
        "_parts",
        "_quarantine",
        "_sheds_late",
        "_spare",
        "_tasks",
        "_totals",
        "draining",
    )

    def __init__(self, parts: SchedulerParts, launcher: Launcher) -> None:
        self._parts, self._totals, self._launcher = parts, parts.totals, launcher
        self._board, self._tasks = parts.board, parts.tasks
        self._key, self._quarantine = parts.policy.key, parts.totals.quarantine
        self._max_queue, self._sheds_late = parts.params.max_queue, parts.params.shed_late
        #: The task of best effort that was accepted last.
        self._spare: Record | None = None
        #: Nothing new is accepted.
        self.draining = False

    def drain(self) -> None:
        """Accept nothing new from now on."""
        self.draining = True
        self._give_up_spare()

    def set_limits(self, max_queue: int, *, sheds_late: bool) -> None:
        """Accept by other limits from now on, see ``LimitsChanged``."""
        self._max_queue, self._sheds_late = max_queue, sheds_late

    def one(self, event: TaskArrived) -> None:
        """Accept the task, or refuse it."""
        self._tasks.seen(event.task.task_id)
        if event.task.best_effort:
            self._try(event.task, event.prepare_started_ns)
            return
        self._give_up_spare()
        asked = self._ask(event.task)
        if isinstance(asked, Rejected):
            self._refuse(event.task, asked)
        else:
            self._enter(asked, event.prepare_started_ns)

    def several(self, event: TasksArrived) -> None:
        """Accept all of the tasks, or refuse all for the first that may not enter."""
        self._give_up_spare()
        entering: list[Task] = []
        refused: Rejected | None = None
        for task in event.tasks:
            self._tasks.seen(task.task_id)
            if refused is None:
                asked = self._ask(task, beside=len(entering))
                if isinstance(asked, Rejected):
                    refused = replace(asked, task_id=task.task_id)
                else:
                    entering.append(asked)
        if refused is not None:
            for task in event.tasks:
                self._refuse(task, refused)
            return
        for task in entering:
            self._enter(task, event.prepare_started_ns)

    def _try(self, task: Task, started_ns: Nanos | None) -> None:
        """Launch a task of best effort now, or refuse it."""
        refused = self._quarantine.rejects(task.model, self._tasks.now_ns)
        if refused is None and (why := task.lacks(self._board.ledger.budget_bytes)):
            refused = Rejected(RejectReason.TOO_BIG, why)
        if refused is None and (
            self.draining
            or started_ns is None
            or self._totals.unanswered
            or self._board.busy
            or not self._launch_spare(task, started_ns)
        ):
            refused = Rejected(RejectReason.BUSY, "it runs only while nothing else is there")
        if refused is not None:
            self._refuse(task, refused)

    def _launch_spare(self, task: Task, started_ns: Nanos) -> bool:
        at, now_ns = target_class(task.qos.target_ns), self._tasks.now_ns
        # Without work it is no load; a run that fails, for whatever reason, is its last.
        record = Record(task, self._key(task), ZERO_NS, at, 0, ZERO_NS, retried=True, alone=True)
        record.prepare_started_ns, record.prepared_ns = started_ns, now_ns
        if not self._launcher.launch_at_once(record):
            return False
        self._spare = record
        return True

    def _give_up_spare(self) -> None:
        """Stop the run of best effort, as another task arrives."""
        spare, self._spare = self._spare, None
        if spare is not None and not spare.state.answered:
            give_up(self._tasks, spare, TaskCancelled, Withdrawn(spare.state.label))

    def _refuse(self, task: Task, refused: Rejected) -> None:
        self._tasks.out += AnswerTask(task.task_id, refused), ReleaseTask(task.task_id)

    def _ask(self, task: Task, beside: int = 0) -> Task | Rejected:
        """Return the task as it may enter, or why it may not, `beside` others that do."""
        tasks, totals, max_queue = self._tasks, self._totals, self._max_queue
        now_ns = tasks.now_ns
        rejected = self._quarantine.rejects(task.model, now_ns) if self._quarantine.models else None
        if rejected is not None:
            return rejected
        estimate, shares = task.estimate, totals.shares
        if (tenant := shares.place(task.tenant)) != task.tenant:
            task = replace(task, tenant=tenant)
        is_beyond = False
        # What a tenant's own limits refuse was never for the lanes: it is no load, and no share.
        if totals.rates.any and not self.draining:
            own = shares.count(tenant) + beside
            follows = beside > 0
            limited = totals.rates.refusal(tenant, own, now_ns, follows=follows)
            if limited is not None:
                return limited
            is_beyond = totals.rates.is_beyond(tenant, now_ns) and shares.has_others(tenant)
        overloaded = totals.demand.asked(estimate.solo_ns, now_ns, totals.slots)
        shares.asks(tenant)
        budget_bytes = self._board.ledger.budget_bytes
        unanswered = totals.unanswered + beside
        # Most requests enter: whether one may is asked only where something is short.
        if (
            overloaded
            or self.draining
            or unanswered >= max_queue
            or estimate.reserve_bytes > task.most_bytes(budget_bytes)
        ):
            at = target_class(task.qos.target_ns)
            sheds = overloaded and self._sheds_late
            refusal = admit(
                task,
                budget_bytes=budget_bytes,
                unanswered=unanswered,
                max_queue=max_queue,
                has_share=shares.may_queue(tenant, max_queue),
                urgent_ns=Nanos(totals.demand.there_ns(at) // totals.slots) if sheds else None,
                backlog_ns=Nanos(tasks.work_ns // self._board.slots),
                draining=self.draining,
            )
            if refusal is not None:
                return refusal
            if overloaded and shares.is_over(tenant) and not (is_beyond or shares.is_ahead(tenant)):
                return less_urgent(task)
        if is_beyond:
            return beyond_limits(task)
        return behind_others(task) if shares.is_ahead(tenant) else task

    def _enter(self, task: Task, started_ns: Nanos | None) -> None:
        """Accept the task, and launch it where nothing stands in the way."""
        tasks, now_ns, work_ns = self._tasks, self._tasks.now_ns, task.estimate.solo_ns
        at = target_class(task.qos.target_ns)
        backlog_ns = Nanos(tasks.work_ns // self._board.slots)
        left_before_ns = self._totals.demand.came(at, work_ns)
        record = Record(task, self._key(task), backlog_ns, at, left_before_ns, work_ns)
        if started_ns is not None:
            record.prepare_started_ns, record.prepared_ns = started_ns, now_ns
            if self._launcher.launch_at_once(record):
                return
        tasks.admit(record)
        self._parts.window.arrived(task, now_ns)
        if started_ns is not None:
            tasks.step(record, PrepareTask)
            tasks.step(record, TaskPrepared)
