"""Training of a GNN on several machines, as a job; and the placement of DistDGL beside it.

Each machine has a graph store with its partition. A sampler takes the features of its samples from
all stores, most of them from the store of its own partition, and sends them to its worker. Workers
bring their gradients together by parameter servers or by a ring.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve.core.placement.job import (
    Assignment,
    DistributedJob,
    JobLink,
    JobMachine,
    JobRole,
    JobTask,
    fits,
)
from serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TaskKind:
    """What every task of a role needs and takes."""

    #: Of each resource.
    demand: tuple[float, ...]
    #: Of one run, by machine.
    run_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TrainingVolumes:
    """What is sent in one iteration, in bytes."""

    #: Features of the samples of one sampler, and the share of them in its own partition.
    features: float
    locality: float
    #: What a sampler sends its worker: features and edges.
    batch: float
    #: All parameters, which is as much as all gradients.
    model: float
    #: What the first two are multiplied by, as they were measured; 1 on average.
    factors: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        least = min(self.features, self.batch, self.model, *self.factors)
        if least <= 0 or not 0 <= self.locality <= 1:
            raise ConfigError(
                f"volumes must be above 0, got {least:g}, and locality {self.locality:g} between "
                "0 and 1"
            )


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """How many tasks there are."""

    workers: int
    #: Of each worker.
    samplers: int
    #: Parameter servers; 0 for a ring of the workers.
    servers: int = 0

    def __post_init__(self) -> None:
        if min(self.workers, self.samplers) < 1 or self.servers < 0:
            raise ConfigError(
                f"workers {self.workers} and samplers {self.samplers} must be at least 1, servers "
                f"{self.servers} at least 0"
            )


def training_job(
    resources: Sequence[str],
    machines: Sequence[JobMachine],
    shape: TrainingShape,
    kinds: Mapping[JobRole, TaskKind],
    volumes: TrainingVolumes,
) -> DistributedJob:
    """Return the job, with a graph store on every machine."""
    builder = _Builder(machines, kinds)
    stores = [
        builder.add(JobRole.STORE, f"store {machine.name}", fixed=number)
        for number, machine in enumerate(machines)
    ]
    workers = []
    for number in range(shape.workers):
        worker = builder.add(JobRole.WORKER, f"worker {number}")
        workers.append(worker)
        for place in range(shape.samplers):
            sampler = builder.add(JobRole.SAMPLER, f"sampler {number}.{place}")
            own = number % len(stores)
            for at, store in enumerate(stores):
                share = _share(volumes.locality, len(stores), own=at == own)
                builder.link(store, sampler, 0, volumes.features * share, volumes.factors)
            builder.link(sampler, worker, 0, volumes.batch, volumes.factors)
    if shape.servers:
        for number in range(shape.servers):
            server = builder.add(JobRole.SERVER, f"server {number}")
            for worker in workers:
                builder.link(worker, server, 0, volumes.model / shape.servers)
                builder.link(server, worker, 1, volumes.model / shape.servers)
    else:
        _add_ring(builder, workers, volumes.model)
    return DistributedJob(
        tuple(resources), tuple(machines), tuple(builder.tasks), tuple(builder.links)
    )


def _share(locality: float, stores: int, *, own: bool) -> float:
    """Return the share of a sampler's features that one store has."""
    if stores == 1:
        return 1.0
    return locality if own else (1 - locality) / (stores - 1)


class _Builder:
    """Collects tasks and links."""

    def __init__(self, machines: Sequence[JobMachine], kinds: Mapping[JobRole, TaskKind]) -> None:
        nothing = TaskKind((0.0,) * len(machines[0].capacity), (0.0,) * len(machines))
        self._kinds = {JobRole.REDUCER: nothing, **kinds}
        self.tasks: list[JobTask] = []
        self.links: list[JobLink] = []

    def add(
        self, role: JobRole, name: str, fixed: int | None = None, beside: int | None = None
    ) -> int:
        """Add a task; returns its place."""
        kind = self._kinds[role]
        self.tasks.append(JobTask(name, role, kind.demand, kind.run_s, fixed, beside))
        return len(self.tasks) - 1

    def link(
        self, source: int, target: int, shift: int, volume: float, factors: Sequence[float] = (1.0,)
    ) -> None:
        """Have the source send the target `volume` bytes; 0 to have it only wait."""
        volumes = tuple(volume * factor for factor in factors) if volume else ()
        self.links.append(JobLink(source, target, shift, volumes))


def _add_ring(builder: _Builder, workers: Sequence[int], model: float) -> None:
    """Add a ring AllReduce: each of 2K - 2 steps sends a K-th of the model to the next worker."""
    count = len(workers)
    before: list[int] = []
    for step in range(2 * count - 2):
        now = [
            builder.add(JobRole.REDUCER, f"step {step} of worker {place}", beside=worker)
            for place, worker in enumerate(workers)
        ]
        for place, reducer in enumerate(now):
            if before:
                builder.link(before[place], reducer, 0, 0)
                builder.link(before[place - 1], reducer, 0, model / count)
            else:
                for worker in workers:
                    builder.link(worker, reducer, 0, 0)
        before = now
    for reducer, worker in zip(before, workers, strict=False):
        builder.link(reducer, worker, 1, 0)


def colocated(job: DistributedJob) -> Assignment:
    """Return DistDGL's placement: each worker with as many of its samplers as fit beside it.

    A worker goes to the machine with the most free of what workers alone take (GPUs); what does not
    fit beside its worker goes where the most memory, or whatever is the first resource, is free.
    Raises ConfigError when something fits nowhere.
    """
    scarce = _of_workers_alone(job)
    free = [list(machine.capacity) for machine in job.machines]
    places: dict[int, int] = {}

    def put(task: int, machine: int) -> None:
        demand = job.whole_demand(task)
        free[machine] = [a - b for a, b in zip(free[machine], demand, strict=True)]
        if job.tasks[task].fixed is None:
            places[task] = machine

    def holds(task: int, machine: int) -> bool:
        return fits(job.whole_demand(task), free[machine])

    def most_free(task: int, resource: int) -> int:
        able = [machine for machine in range(len(free)) if holds(task, machine)]
        if not able:
            raise ConfigError(f"no machine has room for {job.tasks[task].name} beside the others")
        return max(able, key=lambda machine: (free[machine][resource], -machine))

    for number, task in enumerate(job.tasks):
        if task.fixed is not None:
            put(number, task.fixed)
    later = [n for n in job.movable if job.tasks[n].role is JobRole.SERVER]
    for worker in [n for n in job.movable if job.tasks[n].role is JobRole.WORKER]:
        put(worker, most_free(worker, scarce))
        for sampler in _samplers(job, worker):
            if holds(sampler, places[worker]):
                put(sampler, places[worker])
            else:
                later.append(sampler)
    for task_number in later:
        put(task_number, most_free(task_number, 0))
    return job.assigned(places)


def _samplers(job: DistributedJob, worker: int) -> list[int]:
    sources = [job.links[number].source for number in job.incoming[worker]]
    return [source for source in sources if job.tasks[source].role is JobRole.SAMPLER]


def _of_workers_alone(job: DistributedJob) -> int:
    """Return the resource that workers take and samplers do not; the first if there is none."""
    takes = {task.role: task.demand for task in job.tasks}
    sampler = takes.get(JobRole.SAMPLER)
    for resource, amount in enumerate(takes.get(JobRole.WORKER, ())):
        if amount and sampler is not None and not sampler[resource]:
            return resource
    return 0
