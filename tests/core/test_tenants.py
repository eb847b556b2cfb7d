"""Weights and limits of tenants: what enters, and who gets the lanes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.core.events import TaskCancelled, TenantsChanged
from serve.core.invariants import check_invariants
from serve.core.rules.shares import AHEAD_NS, MOST_TENANTS, Shares
from serve.core.rules.tenants import TenantRates
from serve.core.scheduler import Scheduler
from serve.core.types import Completed, Rejected, RejectReason, TaskId, TenantRules
from serve.sim.device import DeviceModel
from serve.sim.engine import Simulation
from tests.builders import MS, params, task
from tests.core.test_shares import traffic
from tests.core.world import World
from tests.sim.test_engine import offered

SECOND_NS = 1_000_000_000


class ClosedLoop:
    """Clients that send their next request when the last one is answered."""

    def __init__(self, clients, rules=(), seconds=6, lanes=8, discipline="preemptive"):
        chosen = params(
            policy="slack", discipline=discipline, lanes=lanes, parallelism=2, can_suspend=True
        )
        self.simulation = Simulation(Scheduler(chosen), DeviceModel())
        self.simulation.scheduler.handle(TenantsChanged(tuple(rules)), 0)
        self.given_ms = {}
        #: What each request is, by its task.
        self.of = {}
        self.sent = 0
        for client in clients:
            self.send(*client)
        seen = 0
        while self.simulation.now_ns < seconds * SECOND_NS:
            self.simulation.step()
            for row in self.simulation.answered[seen:]:
                assert isinstance(row.outcome, Completed)
                tenant, priority, run_ms = self.of[row.task.task_id]
                self.given_ms[tenant] = self.given_ms.get(tenant, 0) + run_ms
                self.send(tenant, priority, run_ms)
                seen += 1
        check_invariants(self.simulation.scheduler)

    def send(self, tenant, priority, run_ms):
        self.sent += 1
        self.of[self.sent] = (tenant, priority, run_ms)
        request = offered(
            self.sent, run_ms, self.simulation.now_ns / MS, tenant=tenant, priority=priority
        )
        self.simulation.offer(request)

    def share(self, tenant):
        return self.given_ms.get(tenant, 0) / sum(self.given_ms.values())


@pytest.mark.parametrize("discipline", ["preemptive", "rolling"])
def test_six_urgent_clients_leave_the_other_tenant_its_half(discipline):
    six = [("a", 1, 10)] * 6
    assert ClosedLoop([*six, *[("b", 0, 10)] * 6], discipline=discipline).share("b") >= 0.45


def test_many_clients_leave_a_few_their_half():
    assert ClosedLoop([("a", 0, 10)] * 40 + [("b", 0, 10)] * 4).share("b") >= 0.45


def test_weights_divide_the_lanes():
    rules = (TenantRules("a", weight=3.0),)
    loop = ClosedLoop([("a", 0, 10)] * 8 + [("b", 1, 10)] * 8, rules)
    assert 0.7 <= loop.share("a") <= 0.8


def test_a_tenant_that_rests_gains_nothing_by_it():
    shares = Shares()
    shares.enter("a", 100 * AHEAD_NS)
    shares.enter("b", 1)
    assert not shares.is_ahead("a")
    shares.enter("a", 2 * AHEAD_NS)
    assert shares.is_ahead("a")
    assert not shares.is_ahead("b")
    shares.leave("b", 1)
    assert not shares.is_ahead("a")


def test_alone_a_tenant_keeps_its_priorities():
    shares = Shares()
    for _ in range(10):
        shares.enter("a", AHEAD_NS)
    assert not shares.is_ahead("a")


def test_names_beyond_the_most_share_one_place():
    shares = Shares()
    places = set()
    for number in range(10 * MOST_TENANTS):
        place = shares.place(f"t{number}")
        places.add(place)
        shares.asks(place)
        shares.enter(place, 1)
    assert len(places) <= MOST_TENANTS + 1
    assert shares.place("t0") == "t0"
    assert len(shares._given_ns) <= MOST_TENANTS + 1


def test_a_tenant_with_limits_keeps_them_beside_ever_so_many_names():
    rules = (TenantRules("limited", max_in_queue=1),)
    simulation = Simulation(Scheduler(params(lanes=1)), DeviceModel())
    simulation.scheduler.handle(TenantsChanged(rules), 0)
    names = [*(f"t{number}" for number in range(MOST_TENANTS)), "limited", "limited"]
    simulation.run([offered(i, 5, 0.0, tenant=name) for i, name in enumerate(names)])
    refused = [row.task.task_id for row in simulation.answered if isinstance(row.outcome, Rejected)]
    assert refused == [MOST_TENANTS + 1]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 10**9), st.booleans()), max_size=80)
)
@settings(max_examples=80, deadline=None)
def test_never_is_everybody_ahead_and_nothing_stays(rows):
    shares, there = Shares(), []
    for tenant, work, ends in rows:
        shares.enter(tenant, work)
        there.append((tenant, work))
        assert not all(shares.is_ahead(one) for one in shares.counts())
        if ends:
            shares.leave(*there.pop(0))
    for row in there:
        shares.leave(*row)
    assert shares._given_ns == {}


def test_a_rate_lets_a_second_enter_at_once_and_then_the_rate():
    rates = TenantRates()
    rates.set_rules((TenantRules("a", requests_per_s=5.0),))
    outcomes = [rates.refusal("a", 0, at) for at in [0] * 7]
    assert [one is None for one in outcomes] == [True] * 5 + [False] * 2
    refused = outcomes[-1]
    assert refused.reason is RejectReason.TENANT_LIMIT
    assert rates.refusal("a", 0, refused.retry_after_ns) is None
    assert rates.refusal("a", 0, refused.retry_after_ns) is not None
    assert rates.refusal("b", 0, 0) is None
    rates.set_rules(())
    assert not rates.any


@given(st.floats(0.5, 1000.0), st.lists(st.integers(0, 10**8), min_size=1, max_size=200))
@settings(max_examples=60, deadline=None)
def test_no_more_than_the_rate_enters(rate, gaps):
    rates = TenantRates()
    rates.set_rules((TenantRules("a", requests_per_s=rate),))
    now_ns = entered = 0
    for gap in gaps:
        now_ns += gap
        entered += rates.refusal("a", 0, now_ns) is None
    assert entered <= max(1.0, rate) + rate * now_ns / SECOND_NS + 1e-6


def test_the_scheduler_refuses_beyond_the_limits():
    rules = (TenantRules("a", max_in_queue=2), TenantRules("b", requests_per_s=1.0))
    simulation = Simulation(Scheduler(params(lanes=1)), DeviceModel())
    simulation.scheduler.handle(TenantsChanged(rules), 0)
    names = ["a", "a", "a", "b", "b", "c", "c", "c"]
    simulation.run([offered(i + 1, 5, 0.0, tenant=name) for i, name in enumerate(names)])
    refused = [row.task.task_id for row in simulation.answered if isinstance(row.outcome, Rejected)]
    assert refused == [3, 5]
    assert all(
        row.outcome.retry_after_ns > 0
        for row in simulation.answered
        if isinstance(row.outcome, Rejected)
    )
    check_invariants(simulation.scheduler)


def test_a_run_that_nobody_waits_for_counts_until_it_has_stopped():
    world = World(params(lanes=2))
    world.lane_ready(0)
    world.lane_ready(1)
    world.tell(TenantsChanged((TenantRules("a", max_in_queue=1),)))
    world.arrive(task(0, tenant="a"), 0)
    world.tell(TaskCancelled(TaskId(0)))
    world.arrive(task(1, tenant="a"), 0)
    assert world.answers[1].reason is RejectReason.TENANT_LIMIT
    world.end(0)
    world.arrive(task(2, tenant="a"), 0)
    assert list(world.on_lane.values()) == [2]


def served(requests, rule, **choices):
    """Return what became of the requests, with limits for the tenant `flood`."""
    simulation = Simulation(Scheduler(params(**choices)), DeviceModel())
    simulation.scheduler.handle(TenantsChanged((rule,)), 0)
    simulation.run(requests)
    check_invariants(simulation.scheduler)
    return simulation.answered


def test_a_tenant_is_beyond_its_limits_for_a_second():
    rates = TenantRates()
    rules = (TenantRules("a", requests_per_s=1.0), TenantRules("b", max_in_queue=1))
    rates.set_rules(rules)
    assert rates.refusal("a", 0, 0) is None
    assert not rates.is_beyond("a", 0)
    assert rates.refusal("a", 0, 0) is not None
    assert rates.refusal("b", 1, MS) is not None
    rates.set_rules(rules)
    assert rates.is_beyond("a", SECOND_NS - 1)
    assert not rates.is_beyond("a", SECOND_NS)
    assert rates.is_beyond("b", SECOND_NS)
    rates.set_rules(rules[:1])
    assert not rates.is_beyond("b", SECOND_NS)


def test_what_limits_refuse_is_no_load_for_the_others():
    flood = [offered(i, 50, i, tenant="flood") for i in range(300)]
    calm = [offered(300 + i, 10, 300, tenant="calm", target_ns=24 * MS) for i in range(4)]
    rule = TenantRules("flood", requests_per_s=1.0)
    choices = {"policy": "sqtf", "discipline": "rolling", "lanes": 2, "shed_late": True}
    rows = served([*flood, *calm], rule, **choices)
    ends = [row.outcome for row in rows if row.task.tenant == "calm"]
    assert [type(end) for end in ends] == [Completed] * 4


@pytest.mark.parametrize(
    ("lanes", "discipline", "most"), [(8, "preemptive", 0.02), (2, "rolling", 0.2)]
)
def test_a_flood_beyond_its_limits_leaves_the_others_their_targets(lanes, discipline, most):
    requests = traffic([("flood", 7.0), ("calm", 0.2)])
    rule = TenantRules("flood", requests_per_s=200.0, max_in_queue=16)
    rows = served(
        requests, rule, policy="slack", discipline=discipline, lanes=lanes, parallelism=2,
        can_suspend=True,
    )  # fmt: skip
    calm = [row for row in rows if row.task.tenant == "calm"]
    kept = sum(isinstance(row.outcome, Completed) and row.cause is None for row in calm)
    assert 1 - kept / len(calm) < most


@pytest.mark.parametrize("discipline", ["preemptive", "rolling"])
def test_alone_a_tenant_beyond_its_limits_has_all_lanes(discipline):
    requests = [offered(i, 10, i, tenant="flood") for i in range(200)]
    rule = TenantRules("flood", max_in_queue=4)
    rows = served(requests, rule, discipline=discipline, lanes=2)
    assert 38 <= sum(isinstance(row.outcome, Completed) for row in rows) <= 46
