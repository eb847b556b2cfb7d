"""Random histories of everything that can happen, over every policy, discipline and window.

On one device and on several; each of those with one or all of its lanes in a process.
"""

from itertools import cycle

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from serve.core.disciplines import DISCIPLINES
from serve.core.events import (
    DrainStarted,
    LimitsChanged,
    PrepareFailed,
    SlowdownChanged,
    TaskCancelled,
    TaskFailed,
    TenantsChanged,
)
from serve.core.policies import POLICIES
from serve.core.types import (
    Bytes,
    Failed,
    FailReason,
    InputBlock,
    Rejected,
    RejectReason,
    TaskId,
    TenantRules,
)
from tests.builders import MS, US, params, sized, task, unions_saving
from tests.core.world import World

BUDGET = 20
LANES = 3
TENANTS = ("", "first", "second")
SLOWDOWNS = [(1.0,), (1.0, 1.3), (1.0, 1.6, 2.2)]


class History(RuleBasedStateMachine):
    """Anything, in any order; the world checks each command, the end that nothing is left."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        discipline=st.sampled_from(sorted(DISCIPLINES)),
        window=st.sampled_from(["adaptive", "fixed"]),
        parallelism=st.sampled_from([1, 2, LANES]),
        prepare_ahead=st.sampled_from([None, 0, 1, 6]),
        horizon=st.sampled_from([2, 5, 32]),
        can_suspend=st.booleans(),
        saved_ns=st.sampled_from([None, 0, 90 * US, 5 * MS]),
        devices=st.sampled_from([1, 1, 2, 3]),
        slowdown=st.sampled_from(SLOWDOWNS),
        lane_limit=st.sampled_from([None, 10]),
        lane_requests=st.sampled_from([None, 1, 4]),
        own=st.booleans(),
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
        )
        #: Models with lanes of their own, and whether these are gone.
        self.closed = False
        self.domains = {}
        if own and devices == 1:
            self.domains = {"gat:1": "own"}
        self.world = World(found)
        for domain in self.domains.values():
            self.world.open(domain)
        for lane in sorted(self.world.device_of):
            self.world.lane_ready(lane)
        self.draining = False
        #: Limits on their unanswered requests, by tenant.
        self.most_of = {}

    def unanswered_of(self, tenant):
        world = self.world
        return sum(
            one.tenant == tenant and task_id not in world.answers
            for task_id, one in world.tasks.items()
        )

    @rule(
        reserve=st.integers(0, BUDGET + 1),
        run_ns=st.sampled_from([100 * US, MS, 8 * MS]),
        timeout_ns=st.sampled_from([None, None, 1, 3 * MS, 20 * MS]),
        priority=st.sampled_from([0, 0, 1, 3]),
        model=st.sampled_from(["gcn:1", "gcn:1", "gat:1"]),
        tenant=st.sampled_from(TENANTS),
        count=st.integers(1, 4),
        prepared=st.booleans(),
    )
    def arrive(self, reserve, run_ns, timeout_ns, priority, model, tenant, count, prepared):
        world = self.world
        if self.closed and model in self.domains:
            return
        for _ in range(count):
            unanswered = self.unanswered_of(tenant)
            arriving = task(
                len(world.tasks),
                reserve=reserve,
                run_ns=run_ns,
                timeout_ns=timeout_ns,
                priority=priority,
                model=model,
                tenant=tenant,
                domain=self.domains.get(model, ""),
                arrived_ns=world.now,
            )
            world.arrive(arriving, world.now if prepared else None)
            outcome = world.answers.get(arriving.task_id)
            refused = isinstance(outcome, Rejected)
            most = self.most_of.get(tenant)
            if refused and outcome.reason is RejectReason.TENANT_LIMIT:
                assert most is not None
                assert not self.draining
                assert unanswered >= most
                continue
            assert refused or most is None or unanswered < most
            if world.now < world.quarantined.get(model, 0):
                assert refused
                assert outcome.reason is RejectReason.QUARANTINED
            elif self.draining:
                assert refused
                assert outcome.reason is RejectReason.DRAINING
            elif reserve > max(world.budgets):
                assert refused
                assert outcome.reason is RejectReason.TOO_BIG

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
        had_all = self.world.held[task_id] >= self.world.budgets[self.world.device_of[lane]]
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

    @rule(data=st.data(), size_bytes=st.integers(0, BUDGET + 5))
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
        max_queue=st.sampled_from([1, 3, 512]),
        shed_late=st.booleans(),
        run_limit_ns=st.sampled_from([None, 5 * MS, 10**12]),
    )
    def limits_changed(self, max_queue, shed_late, run_limit_ns):
        self.world.tell(LimitsChanged(max_queue, shed_late, run_limit_ns))

    @rule(model=st.sampled_from(["gcn:1", "gat:1"]))
    def model_unloaded(self, model):
        self.world.unload(model)

    @precondition(lambda self: self.world.lanes_up)
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

    @precondition(lambda self: not self.draining and len(self.world.tasks) > 6)
    @rule()
    def drain(self):
        self.draining = True
        self.world.tell(DrainStarted())

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.world.finish_everything()
        self.world.tell(DrainStarted())
        assert self.world.scheduler.drained


History.TestCase.settings = settings(max_examples=300, stateful_step_count=40)
TestHistory = History.TestCase
