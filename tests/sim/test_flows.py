"""Requests on placed stores, samplers and lanes take what they must, and queue."""

from statistics import fmean

import pytest

from serve.core.placement.job import JobMachine, JobRole
from serve.core.placement.serving import RequestClass, ServingKind, beside_lanes, serving
from serve.sim.flows import served
from serve.sim.serving_plan import MOST_LATE, carried_load, plan_serving


def problem(rates, request, *, parts, samplers=1, lanes=1, cores=8.0, round_s=0.0):
    machines = [JobMachine(f"m{n}", (64.0, cores), rate, rate) for n, rate in enumerate(rates)]
    same = (1.0,) * len(machines)
    kinds = (
        ServingKind("sampler", JobRole.SAMPLER, samplers, (0.0, 1.0), same),
        ServingKind("lane", JobRole.LANE, lanes, (0.0, 1.0), same),
    )
    resources = ("memory", "cores")
    return serving(resources, machines, parts, 1, (16.0, 0.0), kinds, (request,), round_s)


def test_a_request_alone_takes_what_its_way_takes():
    request = RequestClass("one", 1e-3, 2e6, 3e6, 0.004, 0.010, 1.0)
    given = problem((1e8, 1e8, 1e8), request, parts=2, round_s=1e-3)
    # Parts on 0 and 1, the sampler on 1, the lane on 2: half of the rows come, the batch goes.
    found = served(given, (0, 1, 1, 2), 1.0, 3)
    alone_s = (1e6 / 1e8 + 1e-3) + 0.004 + (3e6 / 1e8 + 0.5e-3) + 0.010
    assert found.took_s == pytest.approx([alone_s] * 3)
    # All on one machine: nothing is sent.
    assert served(given, (0, 0, 0, 0), 1.0, 3).took_s == pytest.approx([0.014] * 3)


def test_requests_queue_before_a_sampler_as_theory_tells():
    request = RequestClass("one", 50.0, 1.0, 1.0, 0.010, 1e-9, 1.0)
    given = problem((1.0,), request, parts=1)
    found = served(given, (0, 0, 0), 1.0, 20_000)
    # One server, runs of one length, busy for half of the time: ρ s ÷ 2 (1 - ρ) of waiting.
    assert fmean(found.took_s) == pytest.approx(0.010 + 0.005, rel=0.05)


def test_too_much_load_is_given_up_and_samplers_apart_from_all_lanes_answer_nothing():
    request = RequestClass("one", 50.0, 1e6, 1e6, 0.010, 0.010, 0.030)
    given = problem((1e8, 1e8), request, parts=2)
    found = served(given, (0, 1, 0, 1), 4.0, 400, most_late=0.1)
    assert not found.whole
    assert 40 < found.late < 60
    assert served(given, (0, 1, 0, 1), 4.0, 400).whole
    assert served(given, (0, 1, 0, 1), 1.0, 10, paired=True).late_share == 1


def test_the_load_that_is_carried_is_where_one_in_a_hundred_is_late():
    request = RequestClass("one", 50.0, 1e6, 1e6, 0.010, 0.010, 0.030)
    given = problem((1e8, 1e8), request, parts=2, samplers=4, lanes=4)
    where = beside_lanes(given)
    load = carried_load(given, where, 400)
    assert served(given, where, load, 400).late_share <= MOST_LATE
    assert served(given, where, load * 1.03, 400).late_share > MOST_LATE
    assert carried_load(given, where, 400, above=load * 1.5) == 0


@pytest.mark.parametrize(("rows", "least", "most"), [(1.2e6, 1.25, 9), (12e3, 1, 1.1)])
def test_placement_gains_where_much_is_sent_by_unlike_machines(rows, least, most):
    request = RequestClass("ids", 200.0, rows, rows, 0.004, 0.010, 0.050)
    given = problem((1e9, 1e9, 1e8, 1e8), request, parts=4, samplers=8, lanes=16)
    found = plan_serving(given, steps=120, count=200)
    assert given.job.excess(found.best.assignment) == 0
    assert least <= found.gain <= most


def test_what_servers_that_are_alike_cannot_carry_another_placement_may():
    # Half of the rows wait for the slow interface, unless all parts are on one machine.
    request = RequestClass("ids", 1.0, 2e6, 1.0, 0.001, 0.001, 0.050)
    given = problem((1e9, 1e7), request, parts=2, samplers=2, lanes=2)
    found = plan_serving(given, steps=40, count=100)
    assert found.colocated is not None
    assert found.colocated.load == 0
    assert found.best.load > 1
    assert found.gain is None


def test_a_load_that_cannot_last_is_not_carried_by_few_requests():
    # All of 100 requests could wait for half a target, and would at ten times what lasts.
    request = RequestClass("one", 1000.0, 1e3, 1e3, 0.0, 0.001, 0.100)
    given = problem((1e9,), request, parts=1)
    assert carried_load(given, (0, 0, 0), 100) < 1.2
