"""Answering requests on several machines, as tasks to place: stores, samplers and lanes.

Stores hold the parts of a graph, each in one copy or more. A sampler prepares a request: it takes
the rows of its sample from a store of each part, and sends what it made of them to a lane, which
runs the model. What is on the same machine need not be sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from serve.core.placement.job import (
    Assignment,
    DistributedJob,
    JobMachine,
    JobRole,
    JobTask,
    fits,
)
from serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests that are alike."""

    name: str
    #: How many arrive in a second.
    rate_s: float
    #: What one takes from all stores together, and what its sampler sends its lane.
    rows_bytes: float
    batch_bytes: float
    #: Of one request, at a pace of 1.
    prepare_s: float
    run_s: float
    #: From its arrival to its answer; a later answer is late.
    target_s: float

    def __post_init__(self) -> None:
        least = min(self.rate_s, self.rows_bytes, self.batch_bytes, self.run_s, self.target_s)
        if least <= 0 or self.prepare_s < 0:
            raise ConfigError(
                f"requests '{self.name}': rate, bytes, run time and target must be above 0, got "
                f"{least:g}, and the time to prepare {self.prepare_s:g} s at least 0"
            )


@dataclass(frozen=True, slots=True)
class ServingKind:
    """Samplers, or lanes of one kind of device."""

    name: str
    role: JobRole
    count: int
    demand: tuple[float, ...]
    #: By machine, the time that it takes as a multiple of what the class of a request tells.
    pace: tuple[float, ...]


class TaskPool(NamedTuple):
    """Tasks of one kind on one machine: any of them takes the next request."""

    machine: int
    pace: float
    size: int


@dataclass(frozen=True)
class Serving:
    """What is to be placed, and what it is to answer."""

    job: DistributedJob
    classes: tuple[RequestClass, ...]
    #: What asking another machine and its answer take beside the bytes.
    round_s: float = 0.0

    def layout(self, assignment: Assignment, *, paired: bool = False) -> "ServingLayout":
        """Return what is where; with `paired` machines prepare for their own lanes alone."""
        holders: dict[int, list[int]] = {}
        samplers: dict[tuple[int, float], int] = {}
        lanes: dict[tuple[int, float], int] = {}
        for task, machine in zip(self.job.tasks, assignment, strict=True):
            if task.copy_of is not None:
                holders.setdefault(task.copy_of, []).append(machine)
                continue
            pools = samplers if task.role is JobRole.SAMPLER else lanes
            key = machine, task.run_s[machine]
            pools[key] = pools.get(key, 0) + 1
        return ServingLayout(
            self.job.machines,
            tuple(tuple(sorted(machines)) for machines in holders.values()),
            tuple(TaskPool(*key, count) for key, count in sorted(samplers.items())),
            tuple(TaskPool(*key, count) for key, count in sorted(lanes.items())),
            paired,
        )


@dataclass(frozen=True)
class ServingLayout:
    """What is on which machine."""

    machines: tuple[JobMachine, ...]
    #: By part of the graph, the machines that hold it.
    holders: tuple[tuple[int, ...], ...]
    samplers: tuple[TaskPool, ...]
    lanes: tuple[TaskPool, ...]
    #: Whether what a machine prepares runs on it.
    paired: bool

    @cached_property
    def lanes_of(self) -> tuple[tuple[int, ...], ...]:
        """By pool of samplers, the pools of lanes that it prepares for."""
        return tuple(
            tuple(
                number
                for number, lane in enumerate(self.lanes)
                if not self.paired or lane.machine == sampler.machine
            )
            for sampler in self.samplers
        )

    @cached_property
    def asked(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By pool of samplers, the holders of each part that is not on its machine."""
        return tuple(
            tuple(holders for holders in self.holders if sampler.machine not in holders)
            for sampler in self.samplers
        )


def serving(
    resources: Sequence[str],
    machines: Sequence[JobMachine],
    parts: int,
    copies: int,
    part_demand: tuple[float, ...],
    kinds: Sequence[ServingKind],
    classes: Sequence[RequestClass],
    round_s: float = 0.0,
) -> Serving:
    """Return what is to be placed; raises ConfigError for counts that make no server."""
    roles = {kind.role for kind in kinds if kind.count > 0}
    if parts < 1 or not 1 <= copies <= len(machines) or len(roles) < 2 or not classes:
        raise ConfigError(
            f"{parts} parts in {copies} copies on {len(machines)} machines, {len(classes)} classes "
            "of requests: parts, samplers, lanes and classes must be at least 1, and copies of a "
            "part on different machines"
        )
    nothing = (0.0,) * len(machines)
    tasks = [
        JobTask(f"part {part}", JobRole.STORE, part_demand, nothing, copy_of=part)
        for part in range(parts)
        for _ in range(copies)
    ]
    tasks += [
        JobTask(f"{kind.name} {number}", kind.role, kind.demand, kind.pace)
        for kind in kinds
        for number in range(kind.count)
    ]
    job = DistributedJob(tuple(resources), tuple(machines), tuple(tasks), ())
    return Serving(job, tuple(classes), round_s)


def beside_lanes(problem: Serving) -> Assignment:
    """Return the placement of servers that are alike: each holds parts, and prepares for its lanes.

    Parts go one by one to the machine with the fewest; a lane to the machine with the most free of
    what it takes most of; a sampler to the machine whose lanes do most for each sampler there.
    Raises ConfigError when something fits nowhere.
    """
    job = problem.job
    free = [list(machine.capacity) for machine in job.machines]
    places: dict[int, int] = {}
    stores, samplers = [0] * len(free), [0] * len(free)
    power = [0.0] * len(free)

    def able(number: int) -> list[int]:
        task = job.tasks[number]
        found = [
            machine
            for machine in range(len(free))
            if fits(task.demand, free[machine])
            and not any(places.get(one) == machine for one in job.copies.get(task.copy_of, ()))
        ]
        if not found:
            raise ConfigError(f"no machine has room for {task.name} beside the others")
        return found

    def put(number: int, machine: int) -> None:
        places[number] = machine
        demand = job.tasks[number].demand
        free[machine] = [a - b for a, b in zip(free[machine], demand, strict=True)]

    for role in (JobRole.STORE, JobRole.LANE, JobRole.SAMPLER):
        for number, task in enumerate(job.tasks):
            if task.role is not role:
                continue
            if role is JobRole.STORE:
                machine = min(able(number), key=lambda one: (stores[one], one))
                stores[machine] += 1
            elif role is JobRole.LANE:
                most = task.demand.index(max(task.demand)) if task.demand else 0
                machine = max(able(number), key=lambda one: (free[one][most], -one))
                power[machine] += 1 / task.run_s[machine]
            else:
                machine = max(
                    able(number), key=lambda one: (power[one] / (samplers[one] + 1), -one)
                )
                samplers[machine] += 1
            put(number, machine)
    return job.assigned(places)
