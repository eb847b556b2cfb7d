"""`gnnserve cluster plan` of servers: where stores, samplers and lanes carry the most requests."""

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from rich.table import Table

from serve.commands.plan_file import Amount, MachineTable, Positive, described_machines
from serve.core.placement.job import JobRole
from serve.core.placement.serving import RequestClass, Serving, ServingKind, serving
from serve.errors import ConfigError
from serve.progress import Progress
from serve.sim.serving_plan import ServingPlan, plan_serving
from serve.terminal import Console
from serve.toml_tables import Count, Section, decode_table

_MB = 1e6
#: What a file may ask for, so that a slip of the keyboard takes no day.
_MOST_MACHINES, _MOST_TASKS, _MOST_CLASSES, _MOST_REQUESTS = 32, 400, 8, 20_000
#: Below these a placement, and the network, are not worth the bother.
_WORTH_GAIN, _WORTH_NETWORK = 1.05, 0.01


class GraphTable(Section, frozen=True, kw_only=True):
    """The graph, in parts of one size."""

    parts: Count
    #: Of each part, on as many machines.
    copies: Count = 1
    #: What each takes, by resource.
    needs: dict[str, Amount] = msgspec.field(default_factory=dict)


class PoolTable(Section, frozen=True, kw_only=True):
    """Samplers, or lanes of one kind of device."""

    name: str = "sampler"
    count: Count
    needs: dict[str, Amount] = msgspec.field(default_factory=dict)
    #: How many times as fast as described each is.
    speed: Positive = 1.0


class RequestTable(Section, frozen=True, kw_only=True):
    """Requests that are alike."""

    name: str
    per_s: Positive
    #: From all stores to the sampler, and from there to the lane; MB of a million bytes.
    rows_mb: Positive
    batch_mb: Positive
    prepare_ms: Amount
    run_ms: Positive
    target_ms: Positive


class ServingFile(Section, frozen=True, kw_only=True):
    """The whole file."""

    machines: tuple[MachineTable, ...]
    graph: GraphTable
    sampler: PoolTable
    lanes: tuple[PoolTable, ...]
    requests: tuple[RequestTable, ...]
    #: What asking another machine takes beside the bytes.
    round_ms: Amount = 0.3
    #: How many requests each simulation has at least.
    simulated: Annotated[int, msgspec.Meta(ge=100, le=_MOST_REQUESTS)] = 3000


@dataclass(frozen=True)
class PlannedServing:
    """What was described, and where it goes."""

    problem: Serving
    plan: ServingPlan

    @property
    def network_shares(self) -> dict[str, float]:
        """By class, the share of the target for which the slowest interface sends one request."""
        slowest = min(min(one.in_bytes_s, one.out_bytes_s) for one in self.problem.job.machines)
        return {
            one.name: (one.rows_bytes + one.batch_bytes) / slowest / one.target_s
            for one in self.problem.classes
        }


def plan_servers(
    table: dict[str, Any], where: str, *, steps: int, seed: int, progress: Progress
) -> PlannedServing:
    """Place what a file describes, of which `table` is the content and `where` the path.

    Raises ConfigError for a wrong file, and for what fits nowhere.
    """
    described = decode_table(table, ServingFile, where)
    problem = described_serving(described, where)
    found = plan_serving(
        problem, steps=steps, count=described.simulated, seed=seed, progress=progress
    )
    return PlannedServing(problem, found)


def described_serving(described: ServingFile, where: str) -> Serving:
    """Return what is to be placed; raises ConfigError that begins with `where`."""
    hosts = described_machines(described.machines, _MOST_MACHINES, where)
    graph = described.graph
    pools = (described.sampler, *described.lanes)
    tasks = graph.parts * graph.copies + sum(pool.count for pool in pools)
    classes = len(described.requests)
    if tasks > _MOST_TASKS or classes > _MOST_CLASSES:
        raise ConfigError(
            f"{where}: {tasks} tasks and {classes} classes of requests; at most {_MOST_TASKS} and "
            f"{_MOST_CLASSES} are planned"
        )
    kinds = [
        ServingKind(
            pool.name, JobRole.LANE if number else JobRole.SAMPLER, pool.count,
            hosts.demand(pool.needs, "lanes" if number else "sampler"),
            tuple(1 / pool.speed / (speed if number else 1.0) for speed in hosts.speeds),
        )
        for number, pool in enumerate(pools)
    ]  # fmt: skip
    requests = [
        RequestClass(
            one.name, one.per_s, one.rows_mb * _MB, one.batch_mb * _MB,
            one.prepare_ms / 1000, one.run_ms / 1000, one.target_ms / 1000,
        )
        for one in described.requests
    ]  # fmt: skip
    try:
        return serving(
            hosts.resources, hosts.machines, graph.parts, graph.copies,
            hosts.demand(graph.needs, "graph"), kinds, requests, described.round_ms / 1000,
        )  # fmt: skip
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def print_servers(found: PlannedServing, *, as_json: bool) -> None:
    """Print what goes to which machine, what load it carries, and whether it is worth it."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(_summary(found)).decode() + "\n")
        return
    job, where = found.problem.job, found.plan.best.assignment
    table = Table()
    for heading in ("machine", *job.resources, "tasks"):
        table.add_column(heading)
    loads = job.loads(where)
    for number, machine in enumerate(job.machines):
        taken = [
            f"{one:g} of {most:g}"
            for one, most in zip(loads[number], machine.capacity, strict=True)
        ]
        table.add_row(machine.name, *taken, ", ".join(_names(found, number)))
    console = Console()
    console.print(table)
    for sentence in sentences(found):
        console.print(sentence, soft_wrap=True)


def sentences(found: PlannedServing) -> list[str]:
    """Return what the plan says in words."""
    plan, load = found.plan, found.plan.best.load
    if load:
        told = [f"At most 1 % of the requests are late up to {load:.3g} times their rates."]
    else:
        told = ["The targets cannot be met: more than 1 % of the requests are late at any load."]
    if plan.colocated is None or plan.unpaired is None:
        told.append("Servers that are alike do not fit.")
    elif load:
        told += [
            "Servers that are alike, each with parts and samplers for its own lanes, carry "
            f"{plan.colocated.load:.3g} times the rates.",
            "With samplers that prepare for lanes of other machines, too, they carry "
            f"{plan.unpaired.load:.3g} times the rates.",
        ]
    if plan.gain is not None and plan.gain < _WORTH_GAIN:
        told.append("Do not bother: servers that are alike carry as much.")
    name, share = max(found.network_shares.items(), key=lambda one: one[1])
    if share < _WORTH_NETWORK:
        told.append(
            f"What a request sends takes {share:.2g} of its target at most ('{name}'): the network "
            "is no reason to place anything."
        )
    return told


def _names(found: PlannedServing, machine: int) -> list[str]:
    """Return what is on a machine: parts by name, the others by number."""
    names: Counter[str] = Counter()
    for task, place in zip(found.problem.job.tasks, found.plan.best.assignment, strict=True):
        if place == machine:
            kind = task.name if task.role is JobRole.STORE else task.name.rpartition(" ")[0]
            names[kind] += 1
    return [
        name if name.startswith("part ") else f"{count} × {name}" for name, count in names.items()
    ]


def _summary(found: PlannedServing) -> dict[str, object]:
    plan = found.plan
    return {
        "load": plan.best.load,
        "colocated_load": plan.colocated.load if plan.colocated else None,
        "unpaired_load": plan.unpaired.load if plan.unpaired else None,
        "gain": plan.gain,
        "paired": plan.best.paired,
        "network_shares": found.network_shares,
        "machines": {
            machine.name: _names(found, number)
            for number, machine in enumerate(found.problem.job.machines)
        },
    }
