"""A first placement is found whenever there is one."""

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.core.placement.feasible import first_placement
from serve.core.placement.job import DistributedJob, JobMachine, JobRole, JobTask
from serve.errors import ConfigError
from tests.core.placement.made_up import random_machines


def tight_job(rng):
    """Up to four machines with two resources, which tasks of up to three kinds about fill."""
    machines = random_machines(rng, rng.randint(1, 4), resources=2)
    alike = [
        (role, (float(rng.randint(0, 3)), float(rng.randint(0, 2))))
        for role in (JobRole.SAMPLER, JobRole.WORKER, JobRole.SERVER)
    ]
    made = [("store", JobRole.STORE, (1.0, 0.0), 0)]
    for role, demand in alike:
        made += [(role, role, demand, None)] * rng.randint(0, 3)
    tasks = tuple(
        JobTask(f"{name} {number}", role, demand, (1.0,) * len(machines), fixed)
        for number, (name, role, demand, fixed) in enumerate(made)
    )
    return DistributedJob(("memory", "cores"), machines, tasks, ())


def allowed(job, assignment):
    """Whether a placement keeps the capacities, and copies on different machines."""
    apart = not any(job.has_copy(assignment, task, assignment[task]) for task in job.movable)
    return apart and job.excess(assignment) == 0


def any_placement(job):
    """Whether one of all placements is allowed."""
    choices = product(range(len(job.machines)), repeat=len(job.movable))
    return any(
        allowed(job, job.assigned(dict(zip(job.movable, places, strict=True))))
        for places in choices
    )


def test_it_finds_one_if_and_only_if_trying_all_does():
    rng = Random(7)
    found = {True: 0, False: 0}
    while min(found.values()) < 60:
        job = tight_job(rng)
        if len(job.machines) ** len(job.movable) > 4096:
            continue
        possible = any_placement(job)
        found[possible] += 1
        if possible:
            assignment = first_placement(job, rng)
            assert job.excess(assignment) == 0
            assert assignment[0] == 0
        else:
            with pytest.raises(ConfigError):
                first_placement(job, rng)


@st.composite
def copied_jobs(draw):
    """Up to four machines, graphs whose parts have copies, and a few tasks beside them."""
    machines = draw(st.integers(1, 4))
    capacities = draw(st.lists(st.integers(0, 6), min_size=machines, max_size=machines))
    made = []
    for _ in range(draw(st.integers(1, 2))):
        demand, copies = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        parts = draw(st.integers(1, 3))
        made += [(demand, len(made) + part) for part in range(parts) for _ in range(copies)]
    made += [(draw(st.integers(0, 3)), None) for _ in range(draw(st.integers(0, 2)))]
    tasks = tuple(
        JobTask(f"t{number}", JobRole.STORE, (float(demand),), (0.0,) * machines, copy_of=what)
        for number, (demand, what) in enumerate(made[:6])
    )
    hosts = tuple(JobMachine(f"m{n}", (float(has),), 1, 1) for n, has in enumerate(capacities))
    return DistributedJob(("memory",), hosts, tasks, ())


@settings(max_examples=60, deadline=None)
@given(copied_jobs(), st.randoms(use_true_random=False))
def test_copies_are_placed_apart_if_and_only_if_trying_all_does(job, rng):
    try:
        assignment = first_placement(job, rng)
    except ConfigError:
        assert not any_placement(job)
    else:
        assert allowed(job, assignment)


def test_a_kind_may_be_left_out_of_a_machine():
    # As the paper prints its loops, every machine gets one of each kind.
    machines = tuple(JobMachine(f"m{n}", has, 1.0, 1.0) for n, has in enumerate([(1.0,), (3.0,)]))
    tasks = tuple(
        JobTask(name, role, demand, (0.0, 0.0))
        for name, role, demand in (("w", JobRole.WORKER, (3.0,)), ("s", JobRole.SAMPLER, (1.0,)))
    )
    job = DistributedJob(("memory",), machines, tasks, ())
    assert first_placement(job) == (1, 0)


def test_one_machine_is_enough_and_the_same_seed_gives_the_same():
    alone = JobMachine("m", (100.0, 100.0), 1.0, 1.0)
    tasks = tuple(JobTask(f"t{n}", JobRole.WORKER, (1.0, 1.0), (1.0,)) for n in range(4))
    job = DistributedJob(("memory", "cores"), (alone,), tasks, ())
    assert first_placement(job, Random(1)) == first_placement(job, Random(1)) == (0, 0, 0, 0)


def test_a_store_that_does_not_fit_is_named():
    task = JobTask("store", JobRole.STORE, (2.0,), (1.0,), fixed=0)
    job = DistributedJob(("memory",), (JobMachine("small", (1.0,), 1.0, 1.0),), (task,), ())
    with pytest.raises(ConfigError, match="'small' cannot hold what is fixed"):
        first_placement(job)
