"""A first placement: found whenever there is one, in polynomial time (the paper's IFS).

Tasks of equal demand are alike, so a placement is how many of each kind are on each machine. For
one machine after the other, all counts that can be placed so far are kept, but for those that
others exceed.

Copies of one thing are on different machines. Things of equal demand and as many copies are alike
too: a machine takes at most one copy of each, and those first of which most copies are missing.
Then counts can be placed if and only if their sum is right (Gale and Ryser).
"""

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from serve.core.placement.job import Assignment, DistributedJob, fits
from serve.errors import ConfigError

#: How many tasks of each kind.
Counts = tuple[int, ...]


def first_placement(job: DistributedJob, rng: Random | None = None) -> Assignment:
    """Return a placement that keeps every capacity, machines filled in random order.

    Raises ConfigError when there is none. Without `rng` machines are filled in their own order.
    """
    kinds = _kinds(job)
    demands = [demand for demand, _ in kinds]
    members = list(kinds.values())
    need = tuple(sum(map(len, things)) for things in members)
    together = tuple(map(len, members))
    order = list(range(len(job.machines)))
    if rng is not None:
        rng.shuffle(order)
    free = _free(job)
    counts = _counts(demands, need, together, [free[machine] for machine in order])
    if counts is None:
        amounts = ", ".join(
            f"{name} {sum(job.whole_demand(task)[at] for task in job.movable):g} of"
            f" {sum(left[at] for left in free):g}"
            for at, name in enumerate(job.resources)
        )
        raise ConfigError(
            f"{len(job.machines)} machines cannot hold {len(job.movable)} tasks beside what is "
            f"fixed on them; they need {amounts}"
        )
    places = {
        things.pop(): machine
        for machine, row in zip(order, counts, strict=False)
        for kind, count in enumerate(row)
        for things in sorted(members[kind], key=len, reverse=True)[:count]
    }
    return job.assigned(places)


def _kinds(job: DistributedJob) -> dict[tuple[tuple[float, ...], int], list[list[int]]]:
    """Return the tasks by demand and number of copies: a list of tasks for each thing."""
    kinds: dict[tuple[tuple[float, ...], int], list[list[int]]] = {}
    things = {
        task: [task] if what is None else list(job.copies[what])
        for task in job.movable
        for what in [job.tasks[task].copy_of]
    }
    for task, copies in things.items():
        if task == copies[0]:
            kinds.setdefault((job.whole_demand(task), len(copies)), []).append(copies)
    return kinds


def _free(job: DistributedJob) -> list[list[float]]:
    """Return what fixed tasks leave of each machine; raises ConfigError when they do not fit."""
    free = [list(machine.capacity) for machine in job.machines]
    for number, task in enumerate(job.tasks):
        if task.fixed is not None:
            demand = job.whole_demand(number)
            free[task.fixed] = [a - b for a, b in zip(free[task.fixed], demand, strict=True)]
    for machine, left in zip(job.machines, free, strict=True):
        if not fits([-one for one in left], [0.0] * len(left)):
            raise ConfigError(f"machine '{machine.name}' cannot hold what is fixed on it")
    return free


def _counts(
    demands: Sequence[Sequence[float]],
    need: Counts,
    together: Counts,
    free: Sequence[Sequence[float]],
) -> list[Counts] | None:
    """Return how many of each kind go to each machine, until none is left; None for never.

    No machine gets more than `together` of a kind.
    """
    known: dict[Counts, list[Counts]] = {(0,) * len(need): []}
    for left in free:
        reached: dict[Counts, list[Counts]] = {}
        for placed, rows in known.items():
            missing = tuple(a - b for a, b in zip(need, placed, strict=True))
            wanted = tuple(map(min, missing, together))
            if wanted == missing and _holds(left, demands, missing):
                return [*rows, missing]
            for more in _most(left, demands, wanted):
                sums = tuple(a + b for a, b in zip(placed, more, strict=True))
                reached.setdefault(sums, [*rows, more])
        known = _undominated(reached)
    return None


def _holds(free: Sequence[float], demands: Sequence[Sequence[float]], counts: Counts) -> bool:
    taken = [
        sum(count * demand[resource] for count, demand in zip(counts, demands, strict=True))
        for resource in range(len(free))
    ]
    return fits(taken, free)


def _most(
    free: Sequence[float], demands: Sequence[Sequence[float]], missing: Counts
) -> Iterator[Counts]:
    """Yield counts, none included, that the machine holds together, and up to what is missing."""
    alone = [
        max(n for n in range(count + 1) if fits([n * one for one in demand], free))
        for demand, count in zip(demands, missing, strict=True)
    ]
    for counts in product(*(range(most, -1, -1) for most in alone)):
        if _holds(free, demands, counts):
            yield counts


def _undominated(reached: dict[Counts, list[Counts]]) -> dict[Counts, list[Counts]]:
    """Drop counts when others have placed as many or more of every kind."""
    kept: dict[Counts, list[Counts]] = {}
    for counts in sorted(reached, key=lambda one: (-sum(one), one)):
        if not any(all(a >= b for a, b in zip(one, counts, strict=True)) for one in kept):
            kept[counts] = reached[counts]
    return kept
