"""Invariants of a scheduler between any two events, checked the slow and obvious way."""

from collections import Counter
from collections.abc import Sequence

from serve.core.fleet.fleet import Fleet
from serve.core.jobs.lifecycle import JobState
from serve.core.lifecycle import State
from serve.core.scheduler import Scheduler
from serve.core.state.record import Record
from serve.errors import InvariantViolation


def check_invariants(scheduler: Scheduler | Fleet) -> None:
    """Raise InvariantViolation naming the first rule that does not hold. Looks at everything."""
    devices = scheduler.devices
    for device in devices:
        for check in (_memory, _lanes, _counters, _plan, _membership, _jobs):
            check(device)
    _totals(devices)
    idle = isinstance(scheduler, Fleet) and scheduler.has_idle_device_with_work_elsewhere()
    _require(not idle, "a device idles while another has a queue for it")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantViolation(rule)


def _memory(scheduler: Scheduler) -> None:
    ledger = scheduler.parts.board.ledger
    runs = {run.task_id: run for run in scheduler.parts.board.busy.values()}
    _require(ledger.holders() == runs.keys(), "exactly the runs on lanes hold memory")
    total_bytes = sum(run.reserve_bytes for run in runs.values())
    blocks = Counter(r.task.block for run in runs.values() for r in run.members if r.task.block)
    twice_bytes = sum((count - 1) * block.size_bytes for block, count in blocks.items())
    held_bytes = total_bytes - twice_bytes
    _require(ledger.reserved_bytes == held_bytes, "the ledger's sum is that of its holders")
    left_bytes = ledger.budget_bytes - held_bytes
    _require(ledger.available_bytes == left_bytes, "what is not reserved is available")


def _lanes(scheduler: Scheduler) -> None:
    board = scheduler.parts.board
    _require(not (board.idle & board.busy.keys()), "a lane is idle or busy")
    own, shared = board.domain_of, set(scheduler.params.device.lane_ids)
    _require(not (own.keys() & shared), "a lane of a domain is no shared one")
    _require(board.idle | board.busy.keys() <= shared | own.keys(), "only known lanes are up")
    idle = {name: {i for i in board.idle if own.get(i, "") == name} for name in ("", *own.values())}
    _require(board.idle_in == idle, "idle lanes by domain")
    leaving = scheduler.parts.own_lanes.leaving
    _require(leaving <= own.keys() & board.busy.keys(), "a lane leaves when it runs nothing")
    _require(
        all(
            record.task.domain == own.get(lane_id, "")
            for lane_id, run in board.busy.items()
            for record in run.members
        ),
        "a lane runs tasks of its domain alone",
    )
    recycling = scheduler.parts.recycling
    left = recycling.over & board.idle
    _require(not left or recycling.busy, "an idle lane over its limits is started anew")
    members: list[Record] = []
    for lane_id, run in board.busy.items():
        _require(run.lane_id == lane_id and bool(run.members), f"lane {lane_id} is held")
        for record in run.members:
            _require(record.run is run, f"task {record.task.task_id} is on one lane")
            _require(record.state.executing == run.executing, "a run executes as a whole")
        members += run.members
    executing = sum(run.executing for run in board.busy.values())
    _require(board.executing_count == executing, "executing count")
    _require(board.open_slots >= 0, "no more execute than the device has slots")
    on_lane = {r.task.task_id for r in scheduler.parts.tasks.records.values() if r.state.on_lane}
    _require(len(members) == len(on_lane), "a lane holds what it runs")
    _require({r.task.task_id for r in members} == on_lane, "who is on a lane is in its run")
    for record in scheduler.parts.tasks.records.values():
        _require((record.run is not None) == record.state.on_lane, "no run without a lane")


def _jobs(scheduler: Scheduler) -> None:
    jobs, board = scheduler.jobs, scheduler.parts.board
    on_workers = [r for r in jobs.records.values() if r.state.on_worker]
    _require(len(on_workers) <= scheduler.params.jobs.workers, "no more jobs than workers")
    started = sorted(r.job.job_id for r in jobs.on_workers)
    _require(started == sorted(r.job.job_id for r in on_workers), "who has a worker is started")
    held_bytes = sum(r.reserve_bytes for r in on_workers)
    _require(jobs.ledger.reserved_bytes == held_bytes, "jobs on workers hold their memory")
    _require(jobs.ledger.available_bytes >= 0, "jobs take no more than the memory for training")
    states = [r.state for r in jobs.on_workers]
    running = jobs.running_count
    _require(board.job_time.running == running, "jobs that run are counted for runs beside them")
    _require(JobState.RUNNING not in states[running:], "the first jobs run, the others stand")
    executing = board.executing_count + running
    _require(executing <= board.max_slots, "requests and jobs execute on no more than all slots")


def _counters(scheduler: Scheduler) -> None:
    tasks = scheduler.parts.tasks
    records = tasks.records.values()
    _require(all(r.state is not State.DONE for r in records), "tasks that are done are forgotten")
    _require(tasks.pending == sum(r.state.pending for r in records), "pending count")
    queued = sum(r.state is State.QUEUED for r in records)
    _require(tasks.queued == queued, "queued count")
    _require(tasks.ready == sum(r.state is State.READY for r in records), "ready count")
    work_ns = sum(r.work_ns for r in records if r.state.pending or r.state.on_lane)
    _require(tasks.work_ns == work_ns, "work is that of tasks pending or on lanes")
    timed = sum(r.task.expires_ns is not None and not r.state.answered for r in records)
    _require(tasks.timed_count == timed, "one timer for each time limit")


def _totals(schedulers: Sequence[Scheduler]) -> None:
    totals = schedulers[0].parts.totals
    records = [r for scheduler in schedulers for r in scheduler.parts.tasks.records.values()]
    ids = {r.task.task_id for r in records}
    _require(len(ids) == len(records), "a task is on one device")
    unanswered = sum(not r.state.answered for r in records)
    _require(totals.unanswered == unanswered, "unanswered count")
    there = [r for r in records if r.state.pending or r.state.on_lane]
    held = Counter(r.task.tenant for r in there)
    _require(totals.shares.counts() == held, "requests by tenant")
    for at in {r.target_class for r in records}:
        there_ns = sum(r.work_ns for r in there if r.target_class <= at)
        _require(totals.demand.there_ns(at) == there_ns, "work by target")


def _plan(scheduler: Scheduler) -> None:
    plan = scheduler.parts.plan
    members = [r for g in plan.groups for r in g.members]
    _require(len(members) == len({r.task.task_id for r in members}), "a task is planned once")
    _require(plan.count == len(members), "planned count")
    loose = [r for g in plan.groups if not g.pinned for r in g.members]
    _require(plan.loose == len(loose), "loose count")
    holds = scheduler.parts.discipline.holds_groups
    for index, group in enumerate(plan.groups):
        _require(bool(group.members) or (holds and group.active > 0), "no group is empty")
        _require(all(r.group is group for r in group.members), "members know their group")
        _require(all(r.state.pending for r in group.members), "only pending tasks are planned")
        active = sum(
            r.group is group for run in scheduler.parts.board.busy.values() for r in run.members
        )
        _require(group.active == active, "a group knows its members on lanes")
        if holds and active:
            _require(index == 0, "one held group at a time")


def _membership(scheduler: Scheduler) -> None:
    backlog = scheduler.parts.backlog
    pending = {i: r for i, r in scheduler.parts.tasks.records.items() if r.state.pending}
    for task_id, record in pending.items():
        pinned = record.group is not None and record.group.pinned
        _require(pinned != (task_id in backlog), "pending: in the backlog or in a pinned group")
    held = sum(r.group is not None and r.group.pinned for r in pending.values())
    _require(len(backlog) + held == len(pending), "the backlog holds only pending tasks")
