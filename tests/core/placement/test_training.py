"""Training jobs, and where DistDGL places them."""

from random import Random

import pytest

from serve.core.placement.critical import competitive_ratio
from serve.core.placement.feasible import first_placement
from serve.core.placement.job import (
    DistributedJob,
    JobLink,
    JobMachine,
    JobRole,
    JobTask,
    mean_volumes,
)
from serve.core.placement.play import played
from serve.core.placement.training import (
    TaskKind,
    TrainingShape,
    TrainingVolumes,
    colocated,
    training_job,
)
from serve.errors import ConfigError

GBIT = 1e9 / 8


def paper_job(servers=1, gpus=2.0):
    """The paper's: four machines of 48 GB and two GPUs, six workers of two samplers each."""
    machines = [
        JobMachine(f"m{n}", (48.0, 16.0, gpus), rate * GBIT, rate * GBIT)
        for n, rate in enumerate((50, 50, 10, 10))
    ]
    kinds = {
        role: TaskKind(demand, (run_s,) * 4)
        for role, demand, run_s in (
            (JobRole.STORE, (16.0, 0.0, 0.0), 0.05),
            (JobRole.SAMPLER, (7.0, 2.0, 0.0), 0.1),
            (JobRole.WORKER, (3.0, 1.0, 1.0), 0.2),
            (JobRole.SERVER, (5.0, 1.0, 0.0), 0.01),
        )
    }
    volumes = TrainingVolumes(60e6, 0.5, 65e6, 0.83e6)
    return training_job(
        ("memory", "cores", "gpus"), machines, TrainingShape(6, 2, servers), kinds, volumes
    )


def test_the_shape_of_a_job_with_a_parameter_server():
    job = paper_job()
    assert len(job.tasks) == 4 + 6 * 3 + 1
    # Each sampler from each store and to its worker; each worker to the server and back.
    assert len(job.links) == 12 * 4 + 12 + 6 * 2
    sampler = next(n for n, task in enumerate(job.tasks) if task.role is JobRole.SAMPLER)
    sent = [job.links[n].volumes[0] for n in job.incoming[sampler]]
    assert sum(sent) == pytest.approx(60e6)
    assert max(sent) == pytest.approx(30e6)


def test_the_ring_brings_every_part_to_every_worker():
    job = paper_job(servers=0)
    reducers = [n for n, task in enumerate(job.tasks) if task.role is JobRole.REDUCER]
    assert len(reducers) == 6 * (2 * 6 - 2)
    # What a worker's next run waits for comes, over the ring, from all workers.
    worker = next(n for n, task in enumerate(job.tasks) if task.role is JobRole.WORKER)
    (last,) = [job.links[n].source for n in job.incoming[worker] if job.links[n].shift == 1]
    seen, todo = set(), [last]
    while todo:
        task = todo.pop()
        if task not in seen:
            seen.add(task)
            todo += [job.links[n].source for n in job.incoming[task] if job.links[n].shift == 0]
    assert {n for n, task in enumerate(job.tasks) if task.role is JobRole.WORKER} <= seen
    # Its steps go where their worker goes.
    where = first_placement(job, Random(1))
    assert all(where[n] == where[job.tasks[n].beside] for n in reducers)
    assert played(job, where, mean_volumes(job, 3)).makespan_s > 0
    assert competitive_ratio(job, where) > 1


def test_two_workers_of_the_testbed_are_apart_from_a_sampler():
    """As the paper says of its testbed."""
    job = paper_job()
    where = colocated(job)
    assert job.excess(where) == 0
    apart = 0
    for link in job.links:
        ends = {job.tasks[link.source].role, job.tasks[link.target].role}
        if ends == {JobRole.SAMPLER, JobRole.WORKER}:
            apart += where[link.source] != where[link.target]
    assert apart == 2


def test_what_fits_nowhere_is_named():
    with pytest.raises(ConfigError, match="no machine has room for worker 4"):
        colocated(paper_job(gpus=1.0))
    with pytest.raises(ConfigError, match=r"4 machines cannot hold 19 tasks .* they need \w+ \d"):
        first_placement(paper_job(gpus=1.0))


def test_what_makes_no_job_is_refused():
    machine = JobMachine("m", (1.0,), 1.0, 1.0)
    first, second = (JobTask(name, JobRole.WORKER, (1.0,), (1.0,)) for name in "ab")
    for links, error in (
        ((JobLink(0, 1), JobLink(1, 0)), "waits for itself"),
        ((JobLink(0, 1, 0, (-1.0,)),), "a → b"),
    ):
        with pytest.raises(ConfigError, match=error):
            DistributedJob(("memory",), (machine,), (first, second), links)
    task = JobTask("a", JobRole.WORKER, (1.0, 1.0), (1.0,))
    with pytest.raises(ConfigError, match="2 demands of 1 resources"):
        DistributedJob(("memory",), (machine,), (task,), ())
    with pytest.raises(ConfigError, match="locality 2"):
        TrainingVolumes(1.0, 2.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="workers 0"):
        TrainingShape(0, 1)
