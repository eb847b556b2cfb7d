"""The world outside a scheduler, for tests: it obeys commands and knows what may be asked."""

from collections import Counter

from serve.core.commands import (
    AddLane,
    AnswerTask,
    KillLane,
    LaunchTask,
    LookAtLane,
    PrepareTask,
    QuarantineModel,
    RecycleLane,
    ReleaseTask,
    RemoveLane,
    ResumeTask,
    StopTask,
    SuspendTask,
)
from serve.core.events import (
    BudgetChanged,
    DomainClosed,
    DomainOpened,
    LaneLost,
    LaneMeasured,
    LaneReady,
    LaneRemoved,
    LaneReplaced,
    ModelUnloaded,
    RunTakesLess,
    TaskArrived,
    TaskFinished,
    TaskOverran,
    TaskPrepared,
    TasksArrived,
    Tick,
)
from serve.core.fleet.fleet import make_scheduler
from serve.core.invariants import check_invariants
from serve.core.types import Bytes, Nanos, Rejected, Task, TaskId
from tests.builders import usage


class World:
    """Delivers events in time, checks every command against what it saw before."""

    def __init__(self, params):
        self.params = params
        self.scheduler = make_scheduler(params)
        self.device_of = {
            lane_id: device_id
            for device_id, device in enumerate(params.devices)
            for lane_id in device.lane_ids
        }
        #: Lanes of trust domains, and those that were removed and are not gone.
        self.domain_of = {}
        self.removed = set()
        self.now = Nanos(0)
        self.tasks: dict[TaskId, Task] = {}
        self.answers = {}
        self.released = set()
        self.preparing = set()
        #: Prepared since they arrived or since their lane was lost.
        self.prepared = set()
        self.lanes_up = set()
        #: Lane to the task that names its run, lost lanes left out; and all tasks of the run.
        self.on_lane = {}
        self.members = {}
        #: Runs that were told to stop, and lanes of which the process was told to end.
        self.stopping = set()
        self.dying = set()
        #: Models said to be in quarantine, and until when.
        self.quarantined = {}
        #: Lanes whose task is stopped.
        self.stopped = set()
        self.launches = {}
        self.losses = {}
        self.overruns = {}
        #: Runs that gave memory back, and how often a task had needed that after all.
        self.gave_back = set()
        self.refills = {}
        #: Times a union with the task failed.
        self.splits = {}
        #: Of the lanes that were measured since they started, what they hold.
        self.lane_holds = {}
        #: Requests that ended on each lane since it started.
        self.lane_ran = Counter()
        #: What each launch was given.
        self.held = {}
        #: By device.
        self.budgets = [device.budget_bytes for device in params.devices]
        #: What Σ reserved may not pass: the budget, or what was in use when it was lowered.
        self.ceilings = list(self.budgets)

    def tell(self, event, at_ns=None):
        """Deliver `event` now, or by a clock that says `at_ns`, and obey; the commands, checked."""
        commands = self.scheduler.handle(event, self.now if at_ns is None else at_ns)
        for command in commands:
            self._obey(command)
        self._check()
        return commands

    def advance(self, duration_ns):
        """Let time pass, with a tick whenever the scheduler asked for one."""
        end = self.now + duration_ns
        while (wake := self.scheduler.next_wakeup()) is not None and wake <= end:
            self.now = Nanos(max(self.now, wake))
            self.tell(Tick())
        self.now = Nanos(end)

    # Events, as they can happen.

    def arrive(self, task, prepared_since_ns=None):
        self.tasks[task.task_id] = task
        if prepared_since_ns is not None:
            self.prepared.add(task.task_id)
        return self.tell(TaskArrived(task, prepared_since_ns))

    def arrive_jointly(self, tasks, prepared_since_ns=None):
        for one in tasks:
            self.tasks[one.task_id] = one
            if prepared_since_ns is not None:
                self.prepared.add(one.task_id)
        commands = self.tell(TasksArrived(tuple(tasks), prepared_since_ns))
        refused = [one for one in tasks if isinstance(self.answers.get(one.task_id), Rejected)]
        assert len(refused) in (0, len(tasks)), "all or none"
        return commands

    def prepare(self, task_id, found=None):
        """Preparing ends, and `found` is what the task turned out to be."""
        self.preparing.remove(task_id)
        if task_id not in self.answers:
            self.prepared.add(task_id)
            if found is not None:
                self.tasks[task_id] = self.tasks[task_id].found(found)
        return self.tell(TaskPrepared(task_id, found))

    def end(self, lane_id, event=None):
        """The lane delivers `event`, by default that its task finished."""
        task_id = self.on_lane.pop(lane_id)
        self.gave_back.discard(task_id)
        members = self.members.pop(task_id)
        self.lane_ran[lane_id] += len(members)
        self.stopped.discard(lane_id)
        self.stopping.discard(task_id)
        if len(members) > 1 and event is not None:
            self._again(members, self.splits)
        return self.tell(event or TaskFinished(task_id, lane_id, usage()))

    def overrun(self, lane_id):
        """The lane's run asks for more than it may."""
        task_id = self.on_lane[lane_id]
        if len(self.members[task_id]) == 1:
            first = not (task_id in self.losses or task_id in self.overruns)
            refills = task_id in self.gave_back and first and task_id not in self.refills
            self._again([task_id], self.refills if refills else self.overruns)
        return self.end(lane_id, TaskOverran(task_id, lane_id, "asked for more"))

    def takes_less(self, lane_id, size_bytes):
        """The lane's run takes no more than that."""
        task_id = self.on_lane[lane_id]
        shares = self.tasks[task_id].block is not None and task_id not in self.overruns
        if size_bytes < self.held[task_id] and not shares:
            self.held[task_id] = size_bytes
            self.gave_back.add(task_id)
            device_id = self.device_of[lane_id]
            self.ceilings[device_id] = max(self.budgets[device_id], self.reserved(device_id))
        return self.tell(RunTakesLess(task_id, lane_id, Bytes(size_bytes)))

    def _again(self, members, why):
        """Those not answered are to be prepared and run again, and why."""
        for task_id in members:
            if task_id not in self.answers:
                self.prepared.discard(task_id)
                why[task_id] = why.get(task_id, 0) + 1

    def lane_ready(self, lane_id):
        self.lanes_up.add(lane_id)
        return self.tell(LaneReady(lane_id))

    def measure(self, lane_id, held_bytes):
        self.lane_holds[lane_id] = held_bytes
        return self.tell(LaneMeasured(lane_id, held_bytes))

    def replace(self, lane_id):
        """Another process, with the same models, takes the place of the lane's."""
        self._new_process(lane_id)
        return self.tell(LaneReplaced(lane_id))

    def _new_process(self, lane_id):
        self.lane_holds.pop(lane_id, None)
        self.lane_ran.pop(lane_id, None)

    def lane_lost(self, lane_id, *others):
        for lost in (lane_id, *others):
            self.lanes_up.discard(lost)
            self._new_process(lost)
            self.stopped.discard(lost)
            self.dying.discard(lost)
            task_id = self.on_lane.pop(lost, None)
            if task_id is not None:
                self.stopping.discard(task_id)
                self.gave_back.discard(task_id)
                self._again(self.members.pop(task_id), self.losses)
        return self.tell(LaneLost(lane_id, others))

    def open(self, domain):
        """A model of the domain comes: the lanes that are made for it."""
        commands = self.tell(DomainOpened(domain))
        return [one.lane_id for one in commands if isinstance(one, AddLane)]

    def close(self, domain):
        """The last model of the domain is gone: the lanes that are removed at once."""
        commands = self.tell(DomainClosed(domain))
        return [one.lane_id for one in commands if isinstance(one, RemoveLane)]

    def lane_gone(self, lane_id):
        self.removed.remove(lane_id)
        return self.tell(LaneRemoved(lane_id))

    def unload(self, model):
        self.quarantined.pop(model, None)
        return self.tell(ModelUnloaded(model))

    def change_budget(self, size_bytes, device_id=0):
        self.budgets[device_id] = size_bytes
        self.ceilings[device_id] = max(size_bytes, self.reserved(device_id))
        return self.tell(BudgetChanged(Bytes(size_bytes), device_id))

    def reserved(self, device_id=0):
        held = [
            task_id
            for lane_id, task_id in self.on_lane.items()
            if self.device_of[lane_id] == device_id
        ]
        blocks = [self.tasks[t].block for t in held if t not in self.overruns]
        shared = Counter(block for block in blocks if block is not None)
        twice = sum((count - 1) * block.size_bytes for block, count in shared.items())
        return sum(self.held[task_id] for task_id in held) - twice

    # What each command may be.

    def _obey(self, command):
        if isinstance(command, RecycleLane):
            assert command.lane_id not in self.on_lane, "recycled while it runs something"
            device = self.params.device
            if command.reason == "memory":
                assert self.lane_holds[command.lane_id] > device.lane_limit_bytes
            else:
                assert self.lane_ran[command.lane_id] >= device.lane_requests
            self._new_process(command.lane_id)
            self.lanes_up.remove(command.lane_id)
            self.dying.discard(command.lane_id)
            return
        if isinstance(command, AddLane):
            assert command.lane_id not in self.device_of.keys() | self.removed, "an id twice"
            self.device_of[command.lane_id] = 0
            self.domain_of[command.lane_id] = command.domain
            return
        if isinstance(command, RemoveLane):
            assert command.lane_id not in self.on_lane, "removed while it runs something"
            del self.device_of[command.lane_id], self.domain_of[command.lane_id]
            self.lanes_up.discard(command.lane_id)
            self._new_process(command.lane_id)
            self.dying.discard(command.lane_id)
            self.removed.add(command.lane_id)
            return
        if isinstance(command, QuarantineModel):
            assert self.now >= self.quarantined.get(command.model, 0), "in quarantine already"
            left_s = int(command.reason.split()[-2])
            self.quarantined[command.model] = self.now + left_s * 1_000_000_000
            return
        task_id = command.task_id
        assert task_id in self.tasks
        assert task_id not in self.released, f"{command} after it was released"
        if isinstance(command, PrepareTask):
            assert task_id not in self.answers
            assert task_id not in self.preparing | self.prepared
            self.preparing.add(task_id)
        elif isinstance(command, LaunchTask):
            assert command.lane_id in self.lanes_up
            assert command.lane_id not in self.on_lane, "two runs on one lane"
            assert self.tasks[task_id].domain == self.domain_of.get(command.lane_id, "")
            device_id = self.device_of[command.lane_id]
            budget = self.budgets[device_id]
            assert command.group_size >= 1
            self.on_lane[command.lane_id] = task_id
            self.members[task_id] = (task_id, *command.companions)
            self.held[task_id] = command.reserve_bytes
            for member in self.members[task_id]:
                self._check_launched(member)
            if command.companions:
                self._check_union(self.members[task_id], command.reserve_bytes)
            elif self.overruns.get(task_id):
                most = self.tasks[task_id].most_bytes(budget)
                assert most < budget or self.reserved(device_id) == budget, "it overran: not alone"
                assert command.reserve_bytes == most
            else:
                assert command.reserve_bytes == self.tasks[task_id].reserve_bytes
            assert self.reserved(device_id) <= budget, "launched into memory that is not there"
        elif isinstance(command, StopTask):
            assert self.on_lane[command.lane_id] == task_id
            waited_for = set(self.members[task_id]) - self.answers.keys()
            assert self.params.watched or not waited_for, "somebody waits for it"
            assert task_id not in self.stopping, "stopped twice"
            self.stopping.add(task_id)
        elif isinstance(command, LookAtLane | KillLane):
            assert self.on_lane[command.lane_id] == task_id
            assert command.lane_id not in self.stopped, "it stands suspended"
            assert command.lane_id not in self.dying, "its process is to end"
            assert task_id not in self.stopping, "it is to end"
            if isinstance(command, KillLane):
                self.dying.add(command.lane_id)
        elif isinstance(command, SuspendTask):
            assert self.params.device.can_suspend
            assert self.on_lane[command.lane_id] == task_id
            assert command.lane_id not in self.stopped, "suspended twice"
            assert task_id not in self.stopping, "suspended while it is to end"
            self.stopped.add(command.lane_id)
        elif isinstance(command, ResumeTask):
            assert self.on_lane[command.lane_id] == task_id
            self.stopped.remove(command.lane_id)
        elif isinstance(command, AnswerTask):
            assert task_id not in self.answers, "answered twice"
            self.answers[task_id] = command.outcome
        elif isinstance(command, ReleaseTask):
            assert task_id in self.answers, "released before it was answered"
            assert task_id not in self.preparing, "released while being prepared"
            assert not any(task_id in m for m in self.members.values()), "released on a lane"
            self.released.add(task_id)
        else:
            raise AssertionError(f"unknown command {command}")

    def _check_launched(self, task_id):
        assert task_id not in self.answers
        assert task_id in self.prepared, "launched before it was prepared"
        until_ns = self.quarantined.get(self.tasks[task_id].model, 0)
        assert self.now >= until_ns, "launched while its model is in quarantine"
        assert sum(task_id in m for m in self.members.values()) == 1, "runs twice at once"
        self.launches[task_id] = self.launches.get(task_id, 0) + 1
        again = [
            why.get(task_id, 0) for why in (self.losses, self.overruns, self.splits, self.refills)
        ]
        assert self.launches[task_id] == 1 + sum(again)
        assert max(again) <= 1

    def _check_union(self, members, reserve_bytes):
        tasks = [self.tasks[task_id] for task_id in members]
        assert len(tasks) <= self.params.most_merged
        assert len({task.model for task in tasks}) == 1
        for task_id in members:
            assert not self.overruns.get(task_id), "it overran, so it runs alone"
            assert not self.splits.get(task_id), "a union with it failed before"
        sizes = [(task.num_nodes, task.num_edges) for task in tasks]
        together = self.params.unions(tasks[0].model, sizes)
        assert reserve_bytes == together.reserve_bytes <= tasks[0].most_bytes(reserve_bytes)
        launches_ns = (len(tasks) - 1) * self.params.device.launch_ns
        apart_ns = sum(task.estimate.run_ns for task in tasks) + launches_ns
        assert together.run_ns < apart_ns, "nothing is gained"

    def _check(self):
        scheduler = self.scheduler
        check_invariants(scheduler)
        for device_id, device in enumerate(self.params.devices):
            reserved = self.reserved(device_id)
            ceiling = max(self.budgets[device_id], min(self.ceilings[device_id], reserved))
            assert reserved <= ceiling
            self.ceilings[device_id] = ceiling
            lanes = {lane for lane, of in self.device_of.items() if of == device_id}
            executing = len((self.on_lane.keys() - self.stopped) & lanes)
            assert executing <= device.slots
            stopped = self.stopped & lanes
            assert not stopped or executing, "a task stands suspended and no other executes"
        assert scheduler.reserved_bytes == sum(map(self.reserved, range(len(self.budgets))))
        assert scheduler.running_count == len(self.on_lane)
        assert scheduler.suspended_count == len(self.stopped)
        assert scheduler.lanes_up == len(self.lanes_up)
        wake = scheduler.next_wakeup()
        assert wake is None or wake > self.now, "would spin"

    def finish_everything(self):
        """Every lane works, every prepare and run ends: nothing may be left over."""
        for lane_id in [*self.device_of]:
            if lane_id in self.device_of.keys() - self.lanes_up:
                self.lane_ready(lane_id)
        for _ in range(20 * len(self.tasks) + 20):
            if self.released == self.tasks.keys():
                break
            if self.dying:
                self.lane_lost(min(self.dying))
            elif down := self.device_of.keys() - self.lanes_up:
                self.lane_ready(min(down))
            elif self.preparing:
                self.prepare(min(self.preparing))
            elif self.on_lane:
                self.end(min(self.on_lane.keys() - self.stopped))
            else:
                wake = self.scheduler.next_wakeup()
                assert wake is not None, "tasks are left and nothing will ever happen"
                self.advance(wake - self.now)
        assert self.answers.keys() == self.tasks.keys(), "each task exactly one answer"
        assert self.released == self.tasks.keys(), "each task exactly one release"
        assert self.scheduler.reserved_bytes == 0
        assert self.scheduler.queued_count == self.scheduler.running_count == 0


def ready(world, *tasks):
    """All of them arrived and prepared."""
    for one in tasks:
        world.arrive(one)
    while world.preparing:
        world.prepare(min(world.preparing))
