"""Replay of a live run's journal through the scheduler.

``first_difference`` proves parity: a fresh scheduler, told what the live one was told, answers the
same. ``recorded`` takes from a journal what was asked for and what it truly took: requests for a
simulation under another policy or discipline, and the device they ran on as it was seen to be.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import msgspec

from serve.core.events import (
    BudgetChanged,
    Event,
    LaneLost,
    TaskArrived,
    TaskCancelled,
    TaskFailed,
    TaskFinished,
    TaskOverran,
    TaskPrepared,
    TasksArrived,
)
from serve.core.fleet.fleet import make_scheduler
from serve.core.types import Bytes, LaneId, Nanos, Task, TaskEstimate, TaskId
from serve.errors import ConfigError
from serve.journal import AnswerLeft, Journal, commands_of, encode_commands
from serve.sim.device import DeviceModel, Offered

#: A slowdown is learned from at least so many runs.
_LEAST_RUNS = 8
#: A run tells what it is like beside k others when it was beside k for this share of its time.
_MOSTLY = 0.8


@dataclass(frozen=True, slots=True)
class Difference:
    """First step where a scheduler answered something else than the journal holds."""

    #: Of the call, from 0.
    index: int
    event: Event
    #: As `encode_commands` writes them.
    recorded: bytes
    replayed: bytes


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests and device of a journal."""

    #: Those answered with a result, in order of arrival. Run times are as if each had run alone;
    #: tasks that ran as one share its time.
    requests: tuple[Offered, ...]
    device: DeviceModel
    #: How many of them were answered late.
    late: int
    #: Measured ÷ estimated run time of the runs that were alone, ascending.
    run_ratios: tuple[float, ...]


@dataclass(slots=True)
class _Seen:
    """Request on its way through the journal."""

    task: Task
    prepare_at_ns: int = 0
    prepare_ns: int = 0
    launched_ns: int = 0
    #: When it last started to execute, and how long it has, by number of others.
    since_ns: int | None = None
    #: Where it was launched, if it was.
    lane_id: LaneId | None = None
    beside_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    finished_ns: int = 0
    #: On the lane's clock, without standing suspended.
    run_ns: int = 0
    left_ns: int = 0
    #: What ran with it as one.
    companions: "tuple[_Seen, ...]" = ()

    @property
    def executed_ns(self) -> int:
        return sum(self.beside_ns.values())


def first_difference(journal: Journal) -> Difference | None:
    """Tell a fresh scheduler everything at its recorded time; None when all its answers agree."""
    told: deque[TaskEstimate | None] = deque()

    def unions(model: str, sizes: Sequence[tuple[int, ...]]) -> TaskEstimate | None:
        # One question more than recorded: the commands will differ, and that is told.
        return told.popleft() if told else None

    scheduler = make_scheduler(replace(journal.params, unions=unions if journal.merges else None))
    for index, step in enumerate(journal.steps):
        told.clear()
        told.extend(step.unions)
        replayed = encode_commands(scheduler.handle(step.event, step.at_ns))
        if replayed != step.commands:
            return Difference(index, step.event, step.commands, replayed)
    return None


def budget_of(journal: Journal) -> Bytes:
    """Return each device's memory for tasks at the journal's end, with all models loaded."""
    budgets = [s.event.budget_bytes for s in journal.steps if isinstance(s.event, BudgetChanged)]
    return budgets[-1] if budgets else journal.params.device.budget_bytes


def recorded(journal: Journal) -> Recording:
    """Return what the journal's requests took, and how its device slowed them.

    Raises ConfigError when it holds no request that ran once and to its end.
    """
    ran = sorted(_ran(journal), key=lambda seen: seen.task.task_id)
    if not ran:
        raise ConfigError("the journal holds no request that ran to its end")
    alone = [seen.run_ns / seen.task.estimate.run_ns for seen in _mostly_beside(ran, 0)]
    slowdown = _slowdown(ran)
    handed_ns = [max(0, seen.executed_ns - seen.run_ns) for seen in ran]
    return Recording(
        requests=tuple(_offered(seen, slowdown) for seen in ran),
        device=DeviceModel(slowdown=slowdown, launch_ns=Nanos(round(median(handed_ns)))),
        late=sum(seen.left_ns > seen.task.due_ns for seen in ran),
        run_ratios=tuple(sorted(alone)),
    )


def _ran(journal: Journal) -> Iterator[_Seen]:
    """Yield the requests that were launched once and finished."""
    course = _Course(journal)
    for row in journal.rows:
        if isinstance(row, AnswerLeft):
            done = course.answered.pop(row.task_id, None)
            if done is not None:
                done.left_ns = row.at_ns
                yield done
            continue
        course.happened(row.event, row.at_ns)
        for name, fields in commands_of(row):
            course.told(name, fields, row.at_ns)


class _Course:
    """What was on its way through a journal, up to one of its rows."""

    def __init__(self, journal: Journal) -> None:
        #: Requests that may still count, and those of them that ran to their end.
        self._seen: dict[TaskId, _Seen] = {}
        self.answered: dict[TaskId, _Seen] = {}
        #: Runs by the task that names them, those included that do not count.
        self._executing: dict[TaskId, _Seen] = {}
        #: A lane of a trust domain is one of the only device.
        self._device_of: dict[LaneId | None, int] = {
            lane_id: device_id
            for device_id, device in enumerate(journal.params.devices)
            for lane_id in device.lane_ids
        }

    def happened(self, event: Event, now_ns: int) -> None:
        """Take in an event."""
        seen = self._seen
        if isinstance(event, TaskArrived | TasksArrived):
            for task in (event.task,) if isinstance(event, TaskArrived) else event.tasks:
                one = seen[task.task_id] = _Seen(task)
                if event.prepare_started_ns is not None:
                    one.prepare_ns = now_ns - event.prepare_started_ns
        elif isinstance(event, TaskPrepared) and event.task_id in seen:
            one = seen[event.task_id]
            one.prepare_ns = now_ns - one.prepare_at_ns
            if event.found is not None:
                one.task = one.task.found(event.found)
        elif isinstance(event, TaskFinished) and event.task_id in seen:
            self._finished(event, now_ns)
        elif isinstance(event, TaskFailed | TaskOverran):
            self._advance(now_ns)
            self._executing.pop(event.task_id, None)  # it may run again, much later
        elif isinstance(event, LaneLost):
            self._advance(now_ns)
            lost = {event.lane_id, *event.others}
            for task_id in [i for i, one in self._executing.items() if one.lane_id in lost]:
                del self._executing[task_id]
        elif isinstance(event, TaskCancelled):
            seen.pop(event.task_id, None)

    def told(self, name: str, fields: Mapping[str, Any], now_ns: int) -> None:
        """Take in a command."""
        task_id = TaskId(fields.get("task_id", -1))  # of a command about a lane or a model
        one = self._seen.get(task_id)
        if name in ("SuspendTask", "ReleaseTask"):
            self._advance(now_ns)
            self._executing.pop(task_id, None)
        elif one is not None and name == "PrepareTask":
            one.prepare_at_ns = now_ns
        elif one is not None and name in ("LaunchTask", "ResumeTask"):
            self._advance(now_ns)
            if name == "LaunchTask" and one.launched_ns:
                del self._seen[task_id]  # launched a second time; others still run beside it
            one.launched_ns = one.launched_ns or now_ns
            one.since_ns = now_ns
            one.lane_id = LaneId(fields["lane_id"])
            self._executing[task_id] = one
            for companion in fields.get("companions", ()):
                if companion in self._seen:
                    one.companions += (self._seen.pop(companion),)

    def _finished(self, event: TaskFinished, now_ns: int) -> None:
        """Divide what the run took among its members."""
        self._advance(now_ns)
        self._executing.pop(event.task_id, None)
        first = self._seen.pop(event.task_id)
        members = (first, *first.companions)
        stood_ns = now_ns - first.launched_ns - first.executed_ns
        run_ns = event.usage.run_ns - stood_ns
        estimated_ns = sum(one.task.estimate.run_ns for one in members)
        for one in members:
            one.finished_ns, one.launched_ns = now_ns, first.launched_ns
            one.beside_ns = first.beside_ns
            one.run_ns = run_ns * one.task.estimate.run_ns // estimated_ns
            if one.run_ns > 0:
                self.answered[one.task.task_id] = one

    def _advance(self, now_ns: int) -> None:
        """Count up to now beside whom each executes; who does is about to change."""
        executing, device_of = self._executing.values(), self._device_of
        beside = Counter(device_of.get(one.lane_id, 0) for one in executing)
        for one in executing:
            assert one.since_ns is not None
            one.beside_ns[beside[device_of.get(one.lane_id, 0)] - 1] += now_ns - one.since_ns
            one.since_ns = now_ns


def _mostly_beside(ran: Sequence[_Seen], others: int) -> list[_Seen]:
    return [s for s in ran if s.beside_ns.get(others, 0) > _MOSTLY * s.executed_ns]


def _slowdown(ran: Sequence[_Seen]) -> tuple[float, ...]:
    """Return the slowdown by number of co-runners, never falling, against runs alone."""
    most = max(max(seen.beside_ns, default=0) for seen in ran)
    learned: list[float] = []
    for others in range(most + 1):
        ratios = [s.run_ns / s.task.estimate.run_ns for s in _mostly_beside(ran, others)]
        known = learned[-1] if learned else 1.0
        learned.append(max(known, median(ratios)) if len(ratios) >= _LEAST_RUNS else known)
    return tuple(value / learned[0] for value in learned)


def _offered(seen: _Seen, slowdown: Sequence[float]) -> Offered:
    """Return the request with its run time as if nothing had run beside it, for any lane."""
    weight = sum(ns / slowdown[others] for others, ns in seen.beside_ns.items())
    alone_ns = seen.run_ns * weight / seen.executed_ns
    return Offered(
        msgspec.structs.replace(seen.task, domain=""),
        run_ns=Nanos(max(1, round(alone_ns))),
        prepare_ns=Nanos(seen.prepare_ns),
        answer_ns=Nanos(max(0, seen.left_ns - seen.finished_ns)),
    )
