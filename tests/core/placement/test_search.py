"""The search finds the best placement of small jobs, and walks as its law says."""

from collections import Counter
from itertools import product
from math import exp
from random import Random

import pytest

from serve.core.placement.critical import settled_path_s
from serve.core.placement.feasible import first_placement
from serve.core.placement.job import (
    DistributedJob,
    JobMachine,
    drawn_volumes,
    mean_volumes,
)
from serve.core.placement.play import played
from serve.core.placement.search import SearchParams, search
from serve.errors import ConfigError
from tests.core.placement.made_up import random_job


def with_room(job, room):
    machines = tuple(JobMachine(m.name, (room,), m.in_bytes_s, m.out_bytes_s) for m in job.machines)
    return DistributedJob(job.resources, machines, job.tasks, job.links)


def placements(job):
    for places in product(range(len(job.machines)), repeat=len(job.movable)):
        yield job.assigned(dict(zip(job.movable, places, strict=True)))


def small_jobs(count, seed):
    """Jobs of three machines of which not every placement fits."""
    found = 0
    number = 0
    while found < count:
        number += 1
        rng = Random(f"{seed} {number}")
        job = with_room(random_job(rng, machines=3, tasks=5), 3.0)
        if any(job.excess(where) == 0 for where in placements(job)):
            found += 1
            yield job


def test_it_finds_what_trying_all_finds():
    params = SearchParams(steps=1500, iterations=4, seed=5, beta=10, margin=100.0)
    for job in small_jobs(12, "best"):
        rng = Random(params.seed)
        first_placement(job, rng)  # as the search draws
        volumes = drawn_volumes(job, params.iterations, rng)
        best_s = min(
            played(job, where, volumes).makespan_s
            for where in placements(job)
            if job.excess(where) == 0
        )
        found = search(job, params)
        assert found.makespan_s == pytest.approx(best_s)
        assert job.excess(found.assignment) == 0


def test_it_is_never_worse_than_the_first_and_the_same_for_the_same_seed():
    for job in small_jobs(10, "first"):
        params = SearchParams(steps=200, iterations=4, seed=1)
        found = search(job, params)
        assert found.makespan_s <= found.first_s
        assert job.excess(found.assignment) == 0
        assert found == search(job, params)
    assert search(job, SearchParams(steps=0, iterations=4, seed=1)).assignment == found.first


def visits(job, params):
    counted = Counter()
    search(job, params, visit=lambda where: counted.update([where]))
    return counted


@pytest.mark.slow
def test_it_visits_each_placement_as_often_as_its_cost_says():
    job = with_room(random_job(Random("law"), machines=3, tasks=5), 4.0)
    params = SearchParams(steps=100_000, iterations=4, beta=3.0, margin=0.0, cost="path")
    first = search(job, SearchParams(steps=0, iterations=4)).first
    volumes = mean_volumes(job, 4)
    unit_s = settled_path_s(job, first, volumes, 4)
    weights = {
        where: exp(-3.0 * settled_path_s(job, where, volumes, 4) * (1 + job.excess(where)) / unit_s)
        for where in placements(job)
        if within(job, where, 2 * 4.0)
    }
    total = sum(weights.values())
    counted = visits(job, params)
    assert set(counted) <= set(weights)
    apart = sum(abs(counted[one] / params.steps - weights[one] / total) for one in weights) / 2
    assert apart < 0.03


def within(job, where, most):
    return all(taken <= most for (taken,) in job.loads(where))


def test_without_regard_to_cost_all_placements_are_alike():
    job = with_room(random_job(Random("uniform"), machines=3, tasks=4), 50.0)
    steps = 20_000
    counted = visits(job, SearchParams(steps=steps, iterations=2, beta=0.0, margin=0.0))
    all_of_them = list(placements(job))
    assert set(counted) == set(all_of_them)
    apart = sum(abs(counted[one] / steps - 1 / len(all_of_them)) for one in all_of_them) / 2
    assert apart < 0.05


def test_params_that_make_no_search_are_refused():
    with pytest.raises(ConfigError, match="steps"):
        SearchParams(steps=-1)
    with pytest.raises(ConfigError, match="iterations"):
        SearchParams(iterations=1)
