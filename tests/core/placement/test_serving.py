"""Stores, samplers and lanes of servers: what is beside what, and how many requests are late."""

import pytest

from serve.core.placement.job import JobMachine, JobRole
from serve.core.placement.queueing import foreseen
from serve.core.placement.search import SearchParams, cheapest
from serve.core.placement.serving import RequestClass, ServingKind, beside_lanes, serving
from serve.errors import ConfigError

CLASSES = (
    RequestClass("large", 100.0, 1e6, 1.2e6, 0.004, 0.010, 0.060),
    RequestClass("small", 50.0, 1e4, 1.2e4, 0.001, 0.002, 0.010),
)


def problem(rates=(1e9, 1e9, 1e8, 1e8), *, classes=CLASSES, cores=8, parts=4, copies=1, lanes=8):
    machines = [
        JobMachine(f"m{n}", (64.0, float(cores)), rate, rate) for n, rate in enumerate(rates)
    ]
    same = (1.0,) * len(machines)
    kinds = (
        ServingKind("sampler", JobRole.SAMPLER, 8, (0.0, 1.0), same),
        ServingKind("lane", JobRole.LANE, lanes, (0.0, 1.0), same),
    )
    resources = ("memory", "cores")
    return serving(resources, machines, parts, copies, (16.0, 0.0), kinds, classes, 3e-4)


def test_servers_that_are_alike_have_parts_samplers_and_lanes_each():
    given = problem(copies=2)
    where = beside_lanes(given)
    layout = given.layout(where)
    assert given.job.excess(where) == 0
    assert all(len(set(holders)) == 2 for holders in layout.holders)
    assert [pool.size for pool in layout.samplers] == [2] * 4
    assert [pool.size for pool in layout.lanes] == [2] * 4
    with pytest.raises(ConfigError, match="no machine has room for sampler"):
        beside_lanes(problem(cores=3))


@pytest.mark.parametrize("change", [{"parts": 0}, {"copies": 5}, {"classes": ()}, {"lanes": 0}])
def test_counts_that_make_no_server_are_refused(change):
    with pytest.raises(ConfigError, match="must be at least 1"):
        problem(**change)


def test_what_is_busy_adds_up_to_the_work():
    given = problem()
    layout = given.layout(beside_lanes(given))
    found = foreseen(given, beside_lanes(given), 0.5)
    prepared = [
        busy * one.size for busy, one in zip(found.sampler_busy, layout.samplers, strict=True)
    ]
    run = [busy * one.size for busy, one in zip(found.lane_busy, layout.lanes, strict=True)]
    assert sum(prepared) == pytest.approx(0.5 * (100 * 0.004 + 50 * 0.001))
    assert sum(run) == pytest.approx(0.5 * (100 * 0.010 + 50 * 0.002))
    sent = sum(a * m.out_bytes_s for a, m in zip(found.out_busy, given.job.machines, strict=True))
    come = sum(a * m.in_bytes_s for a, m in zip(found.in_busy, given.job.machines, strict=True))
    assert sent == pytest.approx(come)


def test_more_load_costs_more_beyond_what_can_be_done_too():
    given = problem()
    where = beside_lanes(given)
    costs = [foreseen(given, where, load).cost for load in (0.1, 1, 2, 4, 8, 16)]
    assert costs == sorted(costs)
    assert costs[0] < 0.01
    assert costs[-1] > 1


def test_servers_alone_send_nothing():
    given = problem((1.0,), parts=1, cores=16)
    found = foreseen(given, beside_lanes(given), paired=True)
    assert found.out_busy == found.in_busy == (0.0,)
    assert found.late < 0.01


def test_the_search_finds_cheaper_placements_that_are_allowed():
    given = problem(copies=2)
    first = beside_lanes(given)

    def cost(where):
        return foreseen(given, where, 8.0).cost

    found = cheapest(given.job, cost, SearchParams(steps=300, tolerance=0.5), first, 3)
    assert len(set(found)) == 3
    assert cost(found[0]) < 0.9 * cost(first)
    assert [cost(one) for one in found] == sorted(cost(one) for one in found)
    for where in found:
        assert given.job.excess(where) == 0
        assert not any(given.job.has_copy(where, task, where[task]) for task in given.job.movable)
