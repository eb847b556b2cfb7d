"""Random histories of everything that can happen, over every policy, discipline and window.

On one device and on several; each of those with one or all of its lanes in a process.
"""

from dataclasses import replace as replaced
from itertools import cycle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from serve.core.disciplines import DISCIPLINES
from serve.core.events import (
    DrainStarted,
    LaneLost,
    LaneReady,
    LaneRemoved,
    LaneSeen,
    LimitsChanged,
    PrepareFailed,
    SlowdownChanged,
    TaskArrived,
    TaskCancelled,
    TaskFailed,
    TaskFinished,
    TaskPrepared,
    TenantsChanged,
    Tick,
)
from serve.core.policies import POLICIES
from serve.core.types import (
    NO_LIMITS,
    Bytes,
    Failed,
    FailReason,
    InputBlock,
    LaneId,
    LaneLook,
    LaneState,
    Nanos,
    Rejected,
    RejectReason,
    RunLimits,
    TaskId,
    TenantRules,
)
from serve.errors import InvariantViolation
from tests.builders import MS, US, params, sized, task, unions_saving, usage
from tests.core.plain_state import state_of
from tests.core.world import World

BUDGET = 20
LANES = 4
TENANTS = ("", "first", "second")
LIMITS = [NO_LIMITS, NO_LIMITS, RunLimits(Bytes(9)), RunLimits(run_ns=Nanos(400 * MS))]
SLOWDOWNS = [(1.0,), (1.0, 1.3), (1.0, 1.6, 2.2)]


class History(RuleBasedStateMachine):
    """Anything, in any order; the world checks each command, the end that nothing is left."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        discipline=st.sampled_from(["preemptive", *sorted(DISCIPLINES)]),
        window=st.sampled_from(["adaptive", "fixed"]),
        parallelism=st.sampled_from([1, 1, 2, LANES]),
        prepare_ahead=st.sampled_from([None, 0, 1, 6]),
        horizon=st.sampled_from([2, 5, 32]),
        can_suspend=st.sampled_from([True, True, False]),
        saved_ns=st.sampled_from([None, 0, 90 * US, 5 * MS]),
        devices=st.sampled_from([1, 1, 2, 3]),
        slowdown=st.sampled_from(SLOWDOWNS),
        lane_limit=st.sampled_from([None, None, 10]),
        lane_requests=st.sampled_from([None, None, 1, 4]),
        own=st.booleans(),
        watched=st.booleans(),
        run_limit_ns=st.sampled_from([None, 800 * MS]),
        reserved_part=st.booleans(),
    )
    def start(
        self,
        policy,
        discipline,
        window,
        parallelism,
        prepare_ahead,
        horizon,
        can_suspend,
        saved_ns,
        devices,
        slowdown,
        lane_limit,
        lane_requests,
        own,
        watched,
        run_limit_ns,
        reserved_part,
    ):
        found = params(
            policy=policy,
            discipline=discipline,
            window=window,
            window_ns=2 * MS,
            budget=BUDGET,
            lanes=LANES,
            parallelism=parallelism,
            can_suspend=can_suspend,
            slowdown=slowdown,
            devices=devices,
            lane_limit=lane_limit,
            lane_requests=lane_requests,
            max_queue=12,
            prepare_ahead=prepare_ahead,
            horizon=horizon,
            bypass_limit=2,
            patience=3,
            unions=None if saved_ns is None else unions_saving(saved_ns),
            most_merged=3,
            watched=watched,
            run_limit_ns=run_limit_ns,
        )
        found = replaced(found, device=replaced(found.device, has_reserved_part=reserved_part))
        #: Models with lanes of their own, and whether these are gone.
        self.closed = False
        self.domains = {}
        if own and devices == 1:
            self.domains = {"gat:1": "own"}
        self.world = self.make_world(found)
        for domain in self.domains.values():
            self.world.open(domain)
        for lane in sorted(self.world.device_of):
            self.world.lane_ready(lane)
        self.draining = False
        #: Limits on their requests that wait or run, by tenant.
        self.most_of = {}

    def make_world(self, chosen):
        return World(chosen)

    def unfinished_of(self, tenant):
        """Return how many of the tenant's requests wait or run, also for nobody any more."""
        world = self.world
        on_lanes = {member for members in world.members.values() for member in members}
        return sum(
            one.tenant == tenant and (task_id in on_lanes or task_id not in world.answers)
            for task_id, one in world.tasks.items()
        )

    @rule(
        reserve=st.integers(0, BUDGET + 1),
        run_ns=st.sampled_from([100 * US, MS, 8 * MS]),
        timeout_ns=st.sampled_from([None, None, 1, 3 * MS, 20 * MS]),
        priority=st.sampled_from([0, 0, 1, 3]),
        model=st.sampled_from(["gcn:1", "gcn:1", "gat:1"]),
        tenant=st.sampled_from(TENANTS),
        limits=st.sampled_from(LIMITS),
        count=st.integers(1, 4),
        prepared=st.booleans(),
    )
    def arrive(self, reserve, run_ns, timeout_ns, priority, model, tenant, limits, count, prepared):
        world = self.world
        if self.closed and model in self.domains:
            return
        for _ in range(count):
            unfinished = self.unfinished_of(tenant)
            arriving = self.arrive_one(
                prepared=prepared,
                reserve=reserve,
                run_ns=run_ns,
                timeout_ns=timeout_ns,
                priority=priority,
                model=model,
                tenant=tenant,
                limits=limits,
            )
            outcome = world.answers.get(arriving.task_id)
            refused = isinstance(outcome, Rejected)
            most = self.most_of.get(tenant)
            if refused and outcome.reason is RejectReason.TENANT_LIMIT:
                assert most is not None
                assert not self.draining
                assert unfinished >= most
                continue
            assert refused or most is None or unfinished < most
            if world.now < world.quarantined.get(model, 0):
                assert refused
                assert outcome.reason is RejectReason.QUARANTINED
            elif self.draining:
                assert refused
                assert outcome.reason is RejectReason.DRAINING
            elif reserve > arriving.most_bytes(max(world.budgets)):
                assert refused
                assert outcome.reason is RejectReason.TOO_BIG

    @rule(
        reserves=st.lists(st.integers(1, 4), min_size=2, max_size=8),
        data=st.data(),
        model=st.sampled_from(["gcn:1", "gat:1"]),
        timeout_ns=st.sampled_from([None, None, 20 * MS]),
    )
    def rush(self, reserves, data, model, timeout_ns):
        """Every lane is up, and more comes than they can take, for targets of all kinds."""
        world = self.world
        if self.closed:
            return
        self.lanes_ready()
        for reserve in reserves:
            run_ns = data.draw(st.sampled_from([100 * US, MS, 8 * MS]))
            self.arrive_one(
                reserve=reserve,
                run_ns=run_ns,
                target_ns=data.draw(st.sampled_from([None, 3 * run_ns, 100 * MS])),
                timeout_ns=timeout_ns,
                model=model,
            )
        while world.preparing:
            world.prepare(min(world.preparing))

    def arrive_one(self, *, prepared=False, model, **fields):
        world = self.world
        arriving = task(
            len(world.tasks),
            model=model,
            domain=self.domains.get(model, ""),
            arrived_ns=world.now,
            **fields,
        )
        world.arrive(arriving, world.now if prepared else None)
        return arriving

    @rule(
        reserve=st.integers(0, BUDGET),
        run_ns=st.sampled_from([100 * US, 8 * MS]),
        limits=st.sampled_from(LIMITS),
    )
    def try_at_best_effort(self, reserve, run_ns, limits):
        """It runs at once, where nothing else is there, or not at all."""
        world = self.world
        if self.closed:
            return
        answered = world.tasks.keys() == world.answers.keys()
        arriving = task(
            len(world.tasks), reserve=reserve, run_ns=run_ns, arrived_ns=world.now, limits=limits
        )
        world.arrive(replace(arriving, best_effort=True), world.now)
        if arriving.task_id not in world.answers:
            assert answered
            assert not self.draining
            (lane,) = (lane for lane, of in world.on_lane.items() if of == arriving.task_id)
            device = [one for one, of in world.device_of.items() if of == world.device_of[lane]]
            assert world.on_lane.keys() & device == {lane}, "beside another run"
        elif reserve > arriving.most_bytes(max(world.budgets)):
            assert world.answers[arriving.task_id].reason in (
                RejectReason.TOO_BIG,
                RejectReason.QUARANTINED,
            )

    @rule(
        reserves=st.lists(st.integers(2, BUDGET + 1), min_size=1, max_size=4),
        shared=st.sampled_from([None, 1, 2]),
        run_ns=st.sampled_from([100 * US, MS, 8 * MS]),
        prepared=st.booleans(),
    )
    def arrive_jointly(self, reserves, shared, run_ns, prepared):
        world, first = self.world, len(self.world.tasks)
        if self.closed:
            return
        block = None if shared is None else InputBlock(TaskId(first), Bytes(shared))
        tasks = [
            replace(
                task(
                    first + at,
                    reserve=reserve,
                    run_ns=run_ns,
                    model=model,
                    domain=self.domains.get(model, ""),
                    arrived_ns=world.now,
                ),
                block=block,
            )
            for at, (reserve, model) in enumerate(zip(reserves, cycle(("gcn:1", "gat:1"))))
        ]
        world.arrive_jointly(tasks, world.now if prepared else None)
        if self.draining or max(reserves) > max(world.budgets):
            assert all(isinstance(world.answers[one.task_id], Rejected) for one in tasks)

    @precondition(lambda self: self.world.preparing)
    @rule(data=st.data())
    def prepared(self, data):
        self.world.prepare(data.draw(st.sampled_from(sorted(self.world.preparing))))

    @precondition(lambda self: self.world.preparing)
    @rule(
        data=st.data(),
        reserve=st.integers(0, BUDGET + 2),
        run_ns=st.sampled_from([100 * US, MS, 8 * MS]),
    )
    def prepared_and_found_to_be_another_size(self, data, reserve, run_ns):
        world = self.world
        task_id = data.draw(st.sampled_from(sorted(world.preparing)))
        answered_before = task_id in world.answers
        world.prepare(task_id, sized(reserve=reserve, run_ns=run_ns))
        if reserve > max(world.budgets) and not answered_before:
            outcome = world.answers[task_id]
            assert isinstance(outcome, Failed)
            assert outcome.reason is FailReason.OUT_OF_MEMORY

    @precondition(lambda self: self.world.preparing)
    @rule(data=st.data())
    def prepare_failed(self, data):
        task_id = data.draw(st.sampled_from(sorted(self.world.preparing)))
        self.world.preparing.remove(task_id)
        self.world.tell(PrepareFailed(task_id, FailReason.INVALID_INPUT, "NaN in x"))

    @precondition(lambda self: self.world.on_lane)
    @rule(data=st.data())
    def finished(self, data):
        self.world.end(data.draw(st.sampled_from(sorted(self.world.on_lane))))

    @precondition(lambda self: self.world.on_lane)
    @rule(data=st.data())
    def failed(self, data):
        lane = data.draw(st.sampled_from(sorted(self.world.on_lane)))
        task_id = self.world.on_lane[lane]
        self.world.end(lane, TaskFailed(task_id, lane, FailReason.MODEL_ERROR, "raised"))

    @precondition(lambda self: self.world.on_lane)
    @rule(data=st.data())
    def overran(self, data):
        lane = data.draw(st.sampled_from(sorted(self.world.on_lane)))
        task_id = self.world.on_lane[lane]
        budget = self.world.budgets[self.world.device_of[lane]]
        had_all = self.world.held[task_id] >= self.world.tasks[task_id].most_bytes(budget)
        again = task_id in self.world.overruns
        answered_before = task_id in self.world.answers
        merged = len(self.world.members[task_id]) > 1
        self.world.overrun(lane)
        if (had_all or again) and not answered_before and not merged:
            outcome = self.world.answers[task_id]
            assert isinstance(outcome, Failed)
            assert outcome.reason is FailReason.OUT_OF_MEMORY

    @precondition(lambda self: self.world.on_lane)
    @rule(data=st.data(), size_bytes=st.integers(0, BUDGET))
    def takes_less(self, data, size_bytes):
        self.world.takes_less(data.draw(st.sampled_from(sorted(self.world.on_lane))), size_bytes)

    @precondition(lambda self: self.world.tasks)
    @rule(data=st.data())
    def cancelled(self, data):
        task_id = data.draw(st.sampled_from(sorted(self.world.tasks)))
        answered_before = task_id in self.world.answers
        commands = self.world.tell(TaskCancelled(task_id))
        assert task_id in self.world.answers
        if answered_before:
            assert not any(command.task_id == task_id for command in commands)

    @precondition(lambda self: self.world.on_lane)
    @rule(
        data=st.data(),
        state=st.sampled_from(LaneState),
        cpu_ns=st.sampled_from([0, 0, MS, 10**12]),
        after_ns=st.sampled_from([0, MS, 600 * MS]),
        times=st.integers(1, 3),
    )
    def lane_seen(self, data, state, cpu_ns, after_ns, times):
        """Whether or not somebody asked what it does."""
        world = self.world
        lane = data.draw(st.sampled_from(sorted(world.on_lane)))
        look = LaneLook(state, Nanos(cpu_ns), 3)
        for _ in range(times if world.params.watched else 0):
            if lane in world.on_lane:
                world.tell(LaneSeen(world.on_lane[lane], lane, look))
            world.advance(after_ns)

    @precondition(lambda self: self.world.dying)
    @rule()
    def lane_killed(self):
        """It died, with whatever it runs by now."""
        self.world.lane_lost(min(self.world.dying))

    @precondition(lambda self: self.world.lanes_up)
    @rule(data=st.data())
    def lane_lost(self, data):
        lane = data.draw(st.sampled_from(sorted(self.world.lanes_up)))
        task_id = self.world.on_lane.get(lane)
        lost_before = self.world.losses.get(task_id, 0)
        answered_before = task_id in self.world.answers
        self.world.lane_lost(lane)
        if task_id is not None and lost_before and not answered_before:
            outcome = self.world.answers[task_id]
            assert isinstance(outcome, Failed)
            assert outcome.reason is FailReason.LANE_LOST

    @precondition(lambda self: self.world.lanes_up)
    @rule(data=st.data())
    def process_of_a_whole_device_lost(self, data):
        world = self.world
        of_lane = world.device_of
        device_id = of_lane[data.draw(st.sampled_from(sorted(world.lanes_up)))]
        world.lane_lost(*(lane for lane in sorted(of_lane) if of_lane[lane] == device_id))

    @precondition(lambda self: self.world.lanes_up)
    @rule(data=st.data(), held=st.integers(0, 30))
    def lane_measured(self, data, held):
        self.world.measure(data.draw(st.sampled_from(sorted(self.world.lanes_up))), held)

    @precondition(lambda self: self.world.lanes_up - self.world.on_lane.keys())
    @rule(data=st.data())
    def lane_replaced(self, data):
        idle = self.world.lanes_up - self.world.on_lane.keys()
        self.world.replace(data.draw(st.sampled_from(sorted(idle))))

    @precondition(lambda self: self.world.lanes_up < self.world.device_of.keys())
    @rule()
    def lane_ready(self):
        self.world.lane_ready(min(self.world.device_of.keys() - self.world.lanes_up))

    @precondition(lambda self: self.world.lanes_up < self.world.device_of.keys())
    @rule()
    def lanes_ready(self):
        while down := self.world.device_of.keys() - self.world.lanes_up:
            self.world.lane_ready(min(down))

    @precondition(lambda self: self.domains)
    @rule()
    def domain_opened_or_closed(self):
        world, (domain,) = self.world, self.domains.values()
        unanswered = world.tasks.keys() - world.answers.keys()
        if self.closed:
            world.open(domain)
            self.closed = False
        elif not any(world.tasks[task_id].domain == domain for task_id in unanswered):
            world.close(domain)
            self.closed = True

    @precondition(lambda self: self.world.removed)
    @rule()
    def lane_gone(self):
        self.world.lane_gone(min(self.world.removed))

    @rule(duration_ns=st.sampled_from([0, 10 * US, 500 * US, 5 * MS]))
    def time_passes(self, duration_ns):
        self.world.advance(duration_ns)

    @rule(data=st.data(), size_bytes=st.sampled_from([0, 7, 15, BUDGET, BUDGET, BUDGET + 5]))
    def budget_changed(self, data, size_bytes):
        device_id = data.draw(st.integers(0, len(self.world.budgets) - 1))
        self.world.change_budget(size_bytes, device_id)

    @rule(slowdown=st.sampled_from(SLOWDOWNS))
    def slowdown_changed(self, slowdown):
        self.world.tell(SlowdownChanged(slowdown))

    @rule(
        most_of=st.dictionaries(st.sampled_from(TENANTS), st.integers(0, 3)),
        weights=st.lists(st.sampled_from([0.1, 1.0, 50.0]), min_size=3, max_size=3),
    )
    def tenants_changed(self, most_of, weights):
        self.most_of = most_of
        self.world.tell(
            TenantsChanged(
                tuple(
                    TenantRules(name, weight, most_of.get(name))
                    for name, weight in zip(TENANTS, weights, strict=True)
                )
            )
        )

    @rule(
        max_queue=st.sampled_from([1, 12, 512]),
        shed_late=st.booleans(),
        run_limit_ns=st.sampled_from([None, 800 * MS, 10**12]),
    )
    def limits_changed(self, max_queue, shed_late, run_limit_ns):
        self.world.tell(LimitsChanged(max_queue, shed_late, run_limit_ns))

    @rule(model=st.sampled_from(["gcn:1", "gat:1"]))
    def model_unloaded(self, model):
        self.world.unload(model)

    @precondition(lambda self: self.world.lanes_up and len(self.world.tasks) > 10)
    @rule()
    def lanes_lost_in_a_row(self):
        """As often as it takes to put a model in quarantine, if a lane runs anything."""
        for _ in range(6):
            self.world.advance(100 * MS)  # those that end together count once
            self.lane_lost_under_a_run()

    def lane_lost_under_a_run(self):
        world = self.world
        if world.on_lane:
            lane = min(world.on_lane)
            world.lane_lost(lane)
            if lane in world.device_of:
                world.lane_ready(lane)
        while world.preparing:
            world.prepare(min(world.preparing))

    @precondition(lambda self: not self.draining and len(self.world.tasks) > 20)
    @rule()
    def drain(self):
        self.draining = True
        self.world.tell(DrainStarted())

    @rule(data=st.data())
    def impossible(self, data):
        """It is refused, and nothing has changed."""
        world, done = self.world, self.world.released
        unknown, nowhere = TaskId(len(world.tasks) + 5), LaneId(99)
        events = [
            TaskFinished(unknown, LaneId(0), usage()),
            TaskPrepared(unknown),
            TaskCancelled(unknown),
            LaneReady(nowhere),
            LaneRemoved(nowhere),
            *(TaskPrepared(task_id) for task_id in sorted(done)[:1]),
            *(TaskFinished(task_id, LaneId(0), usage()) for task_id in sorted(done)[:1]),
            *(TaskArrived(world.tasks[t]) for t in sorted(world.tasks.keys() - done)[:1]),
            *(LaneReady(lane) for lane in sorted(world.lanes_up)[:1]),
            *(LaneLost(lane, (nowhere,)) for lane in sorted(world.device_of)),
            *(
                TaskFailed(unknown, lane, FailReason.MODEL_ERROR, "raised")
                for lane in sorted(world.on_lane)
            ),
        ]
        if len(world.budgets) > 1:
            events = [event for event in events if not isinstance(event, LaneRemoved | TaskArrived)]
        event = data.draw(st.sampled_from(events))
        world.tell(Tick())
        before = state_of(world.scheduler)
        with pytest.raises(InvariantViolation):
            world.scheduler.handle(event, world.now)
        assert state_of(world.scheduler) == before

    @rule(back_ns=st.sampled_from([1, MS]))
    def the_clock_goes_back(self, back_ns):
        self.world.tell(Tick(), at_ns=Nanos(max(0, self.world.now - back_ns)))

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.world.finish_everything()
        self.world.tell(DrainStarted())
        assert self.world.scheduler.drained


History.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestHistory = History.TestCase
