"""Random jobs for tests of placement."""

from random import Random

from serve.core.placement.job import DistributedJob, JobLink, JobMachine, JobRole, JobTask


def random_machines(rng, count, resources=1, most=4):
    return tuple(
        JobMachine(
            f"m{number}",
            tuple(float(rng.randint(1, most)) for _ in range(resources)),
            float(rng.randint(1, 4)),
            float(rng.randint(1, 4)),
        )
        for number in range(count)
    )


def random_job(rng: Random, *, machines=None, tasks=None, room=True) -> DistributedJob:
    """A job of two to four machines and up to seven tasks, each linked to later ones.

    With `room` any placement is feasible.
    """
    machines = machines or rng.randint(2, 4)
    count = tasks or rng.randint(2, 7)
    hosts = random_machines(rng, machines)
    if room:
        hosts = tuple(JobMachine(h.name, (100.0,), h.in_bytes_s, h.out_bytes_s) for h in hosts)
    roles = [
        JobRole.STORE,
        *rng.choices([JobRole.SAMPLER, JobRole.WORKER, JobRole.SERVER], k=count - 1),
    ]
    made = tuple(
        JobTask(
            f"t{number}", role, (float(rng.randint(0, 2)),),
            tuple(rng.choice((0.0, 0.5, 1.0, 2.0)) for _ in hosts),
            fixed=rng.randrange(machines) if number == 0 else None,
        )
        for number, role in enumerate(roles)
    )  # fmt: skip
    links = []
    for source in range(count):
        for target in range(count):
            shift = 0 if source < target else 1
            if source != target and rng.random() < (0.5 if shift == 0 else 0.15):
                links.append(JobLink(source, target, shift, _volumes(rng)))
    return DistributedJob(("memory",), hosts, made, tuple(links))


def _volumes(rng):
    if rng.random() < 0.1:
        return ()
    return tuple(rng.choice((0.5, 1.0, 2.0, 3.0)) for _ in range(rng.randint(1, 3)))


def random_assignment(rng: Random, job: DistributedJob):
    return job.assigned({task: rng.randrange(len(job.machines)) for task in job.movable})
