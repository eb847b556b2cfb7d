"""A job whose tasks repeat: what each needs and takes, what it sends to which, and on what it runs.

The training of a GNN on several machines is one: graph stores send features to samplers, samplers
send batches to workers, workers send gradients. Every task runs once an iteration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from random import Random
from statistics import fmean

from serve.errors import ConfigError

#: The machine of each task, by place in ``DistributedJob.machines``.
Assignment = tuple[int, ...]
#: By link, the bytes that it sends in each iteration of its source.
Volumes = tuple[tuple[float, ...], ...]
#: Shares of a capacity that are too small to count: sums of fractions are not exact.
_ROUNDING = 1e-9


class JobRole(StrEnum):
    """What a task does: of a training job, or, as stores, samplers and lanes, for requests."""

    STORE = "store"
    SAMPLER = "sampler"
    WORKER = "worker"
    #: Parameter server: adds gradients up and sends parameters.
    SERVER = "server"
    #: One step of a ring AllReduce, on the machine of its worker.
    REDUCER = "reducer"
    #: Runs the model for one request at a time.
    LANE = "lane"


@dataclass(frozen=True, slots=True)
class JobMachine:
    """What a machine has for tasks."""

    name: str
    #: Of each resource of the job.
    capacity: tuple[float, ...]
    #: Of its network interface.
    in_bytes_s: float
    out_bytes_s: float


@dataclass(frozen=True, slots=True)
class JobTask:
    """A task, which runs once an iteration."""

    name: str
    role: JobRole
    #: Of each resource of the job.
    demand: tuple[float, ...]
    #: Of one run, by machine.
    run_s: tuple[float, ...]
    #: The machine that it is on; None when that is to be decided.
    fixed: int | None = None
    #: The task on whose machine it is; None for any.
    beside: int | None = None
    #: What it is a copy of, by any number: copies of one thing are on different machines.
    copy_of: int | None = None


@dataclass(frozen=True, slots=True)
class JobLink:
    """What one task sends another: a run of the target waits for a run of the source."""

    source: int
    target: int
    #: The target's run of iteration n + shift waits for the source's of iteration n.
    shift: int = 0
    #: Bytes as they were measured, of which each iteration draws one. Empty: the target waits, and
    #: nothing is sent.
    volumes: tuple[float, ...] = ()


@dataclass(frozen=True)
class DistributedJob:
    """Tasks with their links, and the machines; raises ConfigError when they do not fit."""

    resources: tuple[str, ...]
    machines: tuple[JobMachine, ...]
    tasks: tuple[JobTask, ...]
    links: tuple[JobLink, ...]

    def __post_init__(self) -> None:
        for machine in self.machines:
            if len(machine.capacity) != len(self.resources):
                raise ConfigError(
                    f"machine '{machine.name}': {len(machine.capacity)} capacities of "
                    f"{len(self.resources)} resources"
                )
            if min(machine.in_bytes_s, machine.out_bytes_s) <= 0:
                raise ConfigError(f"machine '{machine.name}': its network must be above 0 bytes/s")
        for number, task in enumerate(self.tasks):
            self._check_task(number, task)
        for link in self.links:
            if min(link.shift, *link.volumes, 0) < 0 or 0 in link.volumes:
                raise ConfigError(
                    f"link {self._named(link)}: shift {link.shift} must be at least 0 and volumes "
                    "above 0"
                )
        if len(self.order) < len(self.tasks):
            late = next(t.name for n, t in enumerate(self.tasks) if n not in self.order)
            raise ConfigError(f"task '{late}' waits for itself within one iteration")

    def _check_task(self, number: int, task: JobTask) -> None:
        if len(task.demand) != len(self.resources) or len(task.run_s) != len(self.machines):
            raise ConfigError(
                f"task '{task.name}': {len(task.demand)} demands of {len(self.resources)} "
                f"resources, {len(task.run_s)} run times on {len(self.machines)} machines"
            )
        if min(*task.demand, *task.run_s, 0) < 0:
            raise ConfigError(f"task '{task.name}': demands and run times must be at least 0")
        if task.beside is not None and self.tasks[task.beside].beside is not None:
            raise ConfigError(f"task '{task.name}' is beside a task that is beside another")
        if task.copy_of is not None and (task.fixed, task.beside) != (None, None):
            raise ConfigError(f"task '{task.name}' is a copy, so that its machine must be open")

    def _named(self, link: JobLink) -> str:
        return f"{self.tasks[link.source].name} → {self.tasks[link.target].name}"

    @cached_property
    def incoming(self) -> tuple[tuple[int, ...], ...]:
        """By task, the links to it."""
        return self._links_by(lambda link: link.target)

    @cached_property
    def outgoing(self) -> tuple[tuple[int, ...], ...]:
        """By task, the links from it."""
        return self._links_by(lambda link: link.source)

    def _links_by(self, end: Callable[[JobLink], int]) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.tasks]
        for number, link in enumerate(self.links):
            found[end(link)].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Tasks so that each is after those it waits for in its own iteration."""
        missing = [0] * len(self.tasks)
        for link in self.links:
            missing[link.target] += link.shift == 0
        found = [task for task, count in enumerate(missing) if not count]
        for task in found:  # which grows
            for number in self.outgoing[task]:
                link = self.links[number]
                missing[link.target] -= link.shift == 0
                if link.shift == 0 and not missing[link.target]:
                    found.append(link.target)
        return tuple(found)

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """Tasks whose machine is to be decided."""
        return tuple(
            number
            for number, task in enumerate(self.tasks)
            if task.fixed is None and task.beside is None
        )

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """By task, those beside it."""
        found: list[list[int]] = [[] for _ in self.tasks]
        for number, task in enumerate(self.tasks):
            if task.beside is not None:
                found[task.beside].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def copies(self) -> dict[int | None, tuple[int, ...]]:
        """The tasks that are copies, by what of."""
        found: dict[int | None, list[int]] = {}
        for number, task in enumerate(self.tasks):
            if task.copy_of is not None:
                found.setdefault(task.copy_of, []).append(number)
        return {what: tuple(numbers) for what, numbers in found.items()}

    def has_copy(self, assignment: Assignment, task: int, machine: int) -> bool:
        """Return True when another copy of what `task` is a copy of is on the machine."""
        what = self.tasks[task].copy_of
        if what is None:
            return False
        return any(assignment[one] == machine for one in self.copies[what] if one != task)

    def assigned(self, machine_of: dict[int, int]) -> Assignment:
        """Return the assignment in which the movable tasks are where `machine_of` says."""
        places: list[int | None] = [
            machine_of.get(number, task.fixed) for number, task in enumerate(self.tasks)
        ]
        for number, task in enumerate(self.tasks):
            if task.beside is not None:
                places[number] = places[task.beside]
        return tuple(place for place in places if place is not None)

    def moved(self, assignment: Assignment, task: int, machine: int) -> Assignment:
        """Return the assignment with `task`, and those beside it, on `machine`."""
        places = list(assignment)
        for one in (task, *self.followers[task]):
            places[one] = machine
        return tuple(places)

    def whole_demand(self, task: int) -> tuple[float, ...]:
        """Return what the task takes together with those beside it."""
        return self._whole_demands[task]

    @cached_property
    def _whole_demands(self) -> list[tuple[float, ...]]:
        return [
            tuple(map(sum, zip(*(self.tasks[n].demand for n in (task, *beside)), strict=True)))
            for task, beside in enumerate(self.followers)
        ]

    def loads(self, assignment: Assignment) -> list[list[float]]:
        """Return what is taken of each resource, by machine."""
        taken = [[0.0] * len(self.resources) for _ in self.machines]
        for task, place in zip(self.tasks, assignment, strict=True):
            for resource, amount in enumerate(task.demand):
                taken[place][resource] += amount
        return taken

    def excess(self, assignment: Assignment) -> float:
        """Return what is taken above the capacities, in shares of them; 0 when all fits.

        Infinite when something is taken of what a machine does not have.
        """
        return sum(
            share
            for machine, taken in zip(self.machines, self.loads(assignment), strict=True)
            for share in map(_share_above, taken, machine.capacity)
        )

    def crosses(self, link: JobLink, assignment: Assignment) -> bool:
        """Return True when the link sends something from one machine to another."""
        return bool(link.volumes) and assignment[link.source] != assignment[link.target]


def fits(taken: Sequence[float], capacity: Sequence[float]) -> bool:
    """Return True when no more is taken of any resource than there is."""
    return all(_share_above(one, most) == 0 for one, most in zip(taken, capacity, strict=True))


def _share_above(taken: float, capacity: float) -> float:
    if taken <= capacity * (1 + _ROUNDING) + _ROUNDING:
        return 0.0
    return taken / capacity - 1 if capacity > 0 else float("inf")


def drawn_volumes(job: DistributedJob, iterations: int, rng: Random) -> Volumes:
    """Draw what each link sends in each iteration from what was measured."""
    return tuple(
        tuple(rng.choice(link.volumes) if link.volumes else 0.0 for _ in range(iterations))
        for link in job.links
    )


def mean_volumes(job: DistributedJob, iterations: int) -> Volumes:
    """Return what each link sends on average, in every iteration."""
    return tuple((fmean(link.volumes) if link.volumes else 0.0,) * iterations for link in job.links)
