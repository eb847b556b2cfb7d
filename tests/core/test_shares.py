"""Fair shares: the sums, and that a flood leaves the others their targets."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from serve.core.invariants import check_invariants
from serve.core.rules.shares import RECENT, Shares
from serve.core.scheduler import Scheduler
from serve.core.types import Completed
from serve.sim.device import DeviceModel
from serve.sim.engine import Simulation
from tests.builders import params
from tests.sim.test_engine import offered

MAX_QUEUE = 60


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.booleans()), max_size=60))
@settings(max_examples=80)
def test_at_least_one_tenant_is_within_its_share(rows):
    shares, there = Shares(), []
    for tenant, work, ends in rows:
        shares.asks(tenant)
        shares.enter(tenant, work)
        there.append((tenant, work))
        if ends:
            shares.leave(*there.pop(0))
    tenants = {tenant for tenant, _, _ in rows}
    assert not tenants or not all(shares.is_over(tenant) for tenant in tenants)
    for row in there:
        shares.leave(*row)
    assert shares.counts() == {}
    assert not any(shares.is_over(tenant) for tenant in tenants)


def test_alone_is_never_over_and_has_no_room_beyond_the_queue():
    shares = Shares()
    shares.asks("a")
    shares.enter("a", 5)
    assert not shares.is_over("a")
    assert not shares.may_queue("a", 4)


def test_one_that_has_not_asked_lately_takes_no_share():
    shares = Shares()
    for tenant in ("b", *"a" * RECENT):
        shares.asks(tenant)
    shares.enter("a", 5)
    assert not shares.is_over("a")
    shares.asks("b")
    assert shares.is_over("a")
    assert shares.may_queue("b", 4)


def traffic(tenants):
    """(tenant, load) each for ten seconds, 1 to 20 ms a request, on two lanes."""
    rng, rows = random.Random(7), []
    for tenant, rho in tenants:
        now = 0.0
        while (now := now + rng.expovariate(rho * 2 / 7)) < 10_000:
            rows.append((now, rng.choice((1, 2, 5, 20)), tenant))
    requests = [
        offered(i, run, at, tenant=tenant) for i, (at, run, tenant) in enumerate(sorted(rows))
    ]
    # 0.2 ms of preparing, so that no target is as long as the run to the nanosecond.
    return [replace(request, prepare_ns=200_000) for request in requests]


def missed(requests, tenant):
    chosen = params(
        policy="slack", discipline="preemptive", lanes=8, parallelism=2, can_suspend=True,
        max_queue=MAX_QUEUE,
    )  # fmt: skip
    simulation = Simulation(Scheduler(chosen), DeviceModel())
    simulation.run(requests)
    check_invariants(simulation.scheduler)
    of = [row for row in simulation.answered if row.task.tenant == tenant]
    kept = sum(isinstance(row.outcome, Completed) and row.cause is None for row in of)
    return 1 - kept / len(of)


@pytest.mark.parametrize("flood", [1.5, 3.0])
def test_a_flood_leaves_the_others_their_targets(flood):
    requests = traffic([("flood", flood), ("calm", 0.2)])
    fair = missed(requests, "calm")
    nameless = [replace(r, task=structs.replace(r.task, tenant="")) for r in requests]
    assert fair < 0.06
    assert missed(nameless, "") > 0.4
    assert missed(requests, "flood") > fair
