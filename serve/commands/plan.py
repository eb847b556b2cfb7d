"""`gnnserve cluster plan`: a training job and its machines, as a file describes them, placed."""

import sys
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

import msgspec
from rich.table import Table

from serve.commands.plan_file import (
    Amount,
    MachineTable,
    Positive,
    described_machines,
)
from serve.core.placement.critical import competitive_ratio, critical_path_s, lower_bound_s
from serve.core.placement.job import (
    Assignment,
    DistributedJob,
    JobRole,
    Volumes,
    drawn_volumes,
)
from serve.core.placement.play import PlayedJob, played
from serve.core.placement.search import SearchParams, search
from serve.core.placement.training import (
    TaskKind,
    TrainingShape,
    TrainingVolumes,
    colocated,
    training_job,
)
from serve.errors import ConfigError
from serve.progress import Progress
from serve.terminal import Console
from serve.toml_tables import Count, Section, decode_table

_MB = 1e6
#: What a file may ask for, so that a slip of the keyboard takes no day.
_MOST_MACHINES, _MOST_TASKS, _MOST_ITERATIONS = 256, 2000, 1000


class TaskTable(Section, frozen=True, kw_only=True):
    """Tasks of one role."""

    #: What each takes, by resource.
    needs: dict[str, Amount] = msgspec.field(default_factory=dict)
    run_ms: Amount
    #: Of samplers: for each worker.
    count: Count = 1


class VolumeTable(Section, frozen=True, kw_only=True):
    """What is sent in one iteration, in MB of a million bytes."""

    #: To one sampler, from all stores; and the share of it in the sampler's own partition.
    features_mb: Positive
    locality: Annotated[float, msgspec.Meta(ge=0, le=1)]
    #: From a sampler to its worker.
    batch_mb: Positive
    model_mb: Positive
    #: What features and batches are multiplied by: each iteration draws one for each pair of tasks.
    factors: tuple[Positive, ...] = (1.0,)


class JobFile(Section, frozen=True, kw_only=True):
    """The whole file."""

    machines: tuple[MachineTable, ...]
    store: TaskTable
    sampler: TaskTable
    worker: TaskTable
    #: None: the workers are a ring.
    server: TaskTable | None = None
    volumes: VolumeTable
    #: Iterations that are simulated, and how many of them stores may be ahead of the workers.
    iterations: Annotated[int, msgspec.Meta(ge=2, le=_MOST_ITERATIONS)] = 20
    window: Count = 4


@dataclass(frozen=True)
class PlannedJob:
    """A job and where it goes."""

    job: DistributedJob
    assignment: Assignment
    #: What was sent in the simulations, and what became of the job.
    volumes: Volumes
    run: PlayedJob
    #: None when the tasks do not fit in this way.
    colocated_s: float | None

    @property
    def gain(self) -> float | None:
        """Share of the time beside DistDGL's placement that is saved."""
        if not self.colocated_s:
            return None
        return 1 - self.run.makespan_s / self.colocated_s


def plan(
    table: dict[str, Any], where: str, *, steps: int, seed: int, progress: Progress
) -> PlannedJob:
    """Place the job that a file describes, of which `table` is the content and `where` the path.

    The result follows from the file, `steps` and `seed`. Raises ConfigError for a wrong file, and
    for a job that fits nowhere.
    """
    described = decode_table(table, JobFile, where)
    job = described_job(described, where)
    progress(f"looking at {steps:,} placements", 0.0)
    params = SearchParams(
        steps=steps, seed=seed, iterations=described.iterations, window=described.window
    )
    volumes = drawn_volumes(job, described.iterations, Random(seed))
    try:
        beside: Assignment | None = colocated(job)
    except ConfigError:
        beside = None
    found = search(job, params, first=beside).assignment
    run = played(job, found, volumes, window=described.window)
    if beside is None:
        return PlannedJob(job, found, volumes, run, None)
    beside_run = played(job, beside, volumes, window=described.window)
    if beside_run.makespan_s < run.makespan_s:
        found, run = beside, beside_run
    return PlannedJob(job, found, volumes, run, beside_run.makespan_s)


def described_job(described: JobFile, where: str) -> DistributedJob:
    """Return the job; raises ConfigError that begins with `where`."""
    hosts = described_machines(described.machines, _MOST_MACHINES, where)
    shape = TrainingShape(
        described.worker.count,
        described.sampler.count,
        described.server.count if described.server else 0,
    )
    ring = 0 if shape.servers else 2 * shape.workers - 2
    tasks = len(hosts.machines) + shape.workers * (1 + shape.samplers + ring) + shape.servers
    if tasks > _MOST_TASKS:
        raise ConfigError(f"{where}: {tasks} tasks, at most {_MOST_TASKS} are planned")
    tables = {
        JobRole.STORE: described.store, JobRole.SAMPLER: described.sampler,
        JobRole.WORKER: described.worker, JobRole.SERVER: described.server,
    }  # fmt: skip
    kinds = {
        role: TaskKind(
            hosts.demand(table.needs, role.value),
            tuple(
                table.run_ms / 1000 / (speed if role is JobRole.WORKER else 1.0)
                for speed in hosts.speeds
            ),
        )
        for role, table in tables.items()
        if table is not None
    }
    sent = described.volumes
    volumes = TrainingVolumes(
        sent.features_mb * _MB, sent.locality, sent.batch_mb * _MB, sent.model_mb * _MB,
        sent.factors,
    )  # fmt: skip
    return training_job(hosts.resources, hosts.machines, shape, kinds, volumes)


def print_plan(found: PlannedJob, *, as_json: bool) -> None:
    """Print which tasks go to which machine, and what the job takes there."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(_summary(found)).decode() + "\n")
        return
    table = Table()
    for heading in ("machine", *found.job.resources, "tasks"):
        table.add_column(heading)
    loads = found.job.loads(found.assignment)
    for number, machine in enumerate(found.job.machines):
        taken = [
            f"{one:g} of {most:g}"
            for one, most in zip(loads[number], machine.capacity, strict=True)
        ]
        table.add_row(machine.name, *taken, ", ".join(_names(found, number)))
    console = Console()
    console.print(table)
    iterations = len(found.volumes[0])
    beside = ""
    if found.gain is not None:
        beside = f", {found.gain:.0%} less than with workers beside their samplers"
    console.print(
        f"{iterations} iterations take {found.run.makespan_s:.3g} s{beside}.", soft_wrap=True
    )


def _names(found: PlannedJob, machine: int) -> list[str]:
    return [
        task.name
        for task, place in zip(found.job.tasks, found.assignment, strict=True)
        if place == machine and task.role not in (JobRole.STORE, JobRole.REDUCER)
    ]


def _summary(found: PlannedJob) -> dict[str, object]:
    job, where = found.job, found.assignment
    return {
        "iterations": len(found.volumes[0]),
        "makespan_s": found.run.makespan_s,
        "colocated_s": found.colocated_s,
        "gain": found.gain,
        "at_most_s": critical_path_s(job, where, found.volumes),
        "at_least_s": lower_bound_s(job, where, found.volumes),
        "competitive_ratio": competitive_ratio(job, where),
        "machines": {
            machine.name: _names(found, number) for number, machine in enumerate(job.machines)
        },
    }
