"""The search for a better placement (the paper's ETP).

A walk through placements that visits one more often the less it costs: exp(-β × cost). It may pass
through placements that take more than there is. Those of low cost that fit are run, and the one of
the shortest run is the result.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from typing import Literal

from serve.core.placement.critical import (
    SETTLED,
    lower_bound_s,
    settled_bound_s,
    settled_path_s,
)
from serve.core.placement.feasible import first_placement
from serve.core.placement.job import (
    Assignment,
    DistributedJob,
    JobRole,
    drawn_volumes,
    fits,
    mean_volumes,
)
from serve.core.placement.play import played
from serve.core.placement.sharing import Sharing, equal
from serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SearchParams:
    """How long and how widely to search; raises ConfigError for what makes no search."""

    steps: int = 10_000
    seed: int = 0
    #: Iterations that a placement is run for.
    iterations: int = 20
    #: How much more a cost of that of the first placement is avoided.
    beta: float = 50.0
    #: What a placement costs: ``bound``, a time that no run is below, or ``path``, the paper's: one
    #: that no run is above. That is several times too long, and says less of the run.
    cost: Literal["bound", "path"] = "bound"
    #: Share of a capacity by which a placement on the way may exceed it.
    tolerance: float = 1.0
    #: A placement is run when it costs at most this share more than the cheapest that fits.
    margin: float = 0.1
    #: Iterations that stores may be ahead of workers; None for any number.
    window: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 0 or self.iterations < 2 or min(self.beta, self.tolerance, self.margin) < 0:
            raise ConfigError(
                f"search: {self.steps} steps must be at least 0, {self.iterations} iterations at "
                f"least 2, and β {self.beta:g}, tolerance {self.tolerance:g} and margin "
                f"{self.margin:g} at least 0"
            )


@dataclass(frozen=True, slots=True)
class FoundPlacement:
    """What a search found."""

    assignment: Assignment
    #: Of as many iterations as were run.
    makespan_s: float
    #: The placement it began with, and its run.
    first: Assignment
    first_s: float
    #: Placements that were run.
    run_count: int
    #: Steps that led to another placement.
    accepted: int


#: Told of each placement the walk is at, after each step.
Visit = Callable[[Assignment], None]


def search(
    job: DistributedJob,
    params: SearchParams | None = None,
    *,
    first: Assignment | None = None,
    sharing: Sharing = equal,
    visit: Visit = lambda assignment: None,
) -> FoundPlacement:
    """Return the placement of the shortest run that the search meets; the same for the same seed.

    Args:
        job: What to place.
        params: How to search.
        first: Where to begin; None for what ``first_placement`` finds.
        sharing: How flows share the network.
        visit: Told of each placement, for those who look at the walk.

    Raises ConfigError when there is no placement.
    """
    params = params or SearchParams()
    rng = Random(params.seed)
    if first is None:
        first = first_placement(job, rng)
    # Drawn once, so that a placement always costs the same.
    volumes = drawn_volumes(job, params.iterations, rng)
    typical = mean_volumes(job, min(SETTLED, params.iterations))
    estimate_s = settled_bound_s if params.cost == "bound" else settled_path_s
    walk = _Walk(
        job, params, first, lambda where: estimate_s(job, where, typical, params.iterations)
    )

    def run_s(where: Assignment) -> float:
        return played(job, where, volumes, sharing, params.window).makespan_s

    first_s = run_s(first)
    best, best_s, shortest_s = first, first_s, walk.cost_s
    accepted, run_count, seen = 0, 1, {first}
    for _ in range(params.steps):
        if walk.step(rng, job.movable):
            accepted += 1
            where, cost_s = walk.assignment, walk.cost_s
            if walk.excess == 0 and cost_s < (1 + params.margin) * shortest_s:
                shortest_s = min(shortest_s, cost_s)
                # A run takes much longer than its bound, which tells most that are no better.
                if where not in seen and lower_bound_s(job, where, volumes) < best_s:
                    run_count += 1
                    if (makespan_s := run_s(where)) < best_s:
                        best, best_s = where, makespan_s
                seen.add(where)
        visit(walk.assignment)
    return FoundPlacement(best, best_s, first, first_s, run_count, accepted)


def cheapest(
    job: DistributedJob,
    cost: Callable[[Assignment], float],
    params: SearchParams,
    first: Assignment,
    count: int,
) -> list[Assignment]:
    """Return up to `count` placements that fit, those that cost least of all that the search meets.

    `cost` is above 0, in any unit. Tasks of each role are moved as often, however many there are.
    """
    rng = Random(params.seed)
    walk = _Walk(job, params, first, cost)
    by_role: dict[JobRole, list[int]] = {}
    for task in job.movable:
        by_role.setdefault(job.tasks[task].role, []).append(task)
    roles = list(by_role.values())
    found = {first: walk.cost_s} if walk.excess == 0 else {}
    for _ in range(params.steps):
        if walk.step(rng, rng.choice(roles)) and walk.excess == 0:
            found[walk.assignment] = walk.cost_s
    return heapq.nsmallest(count, found, key=lambda one: (found[one], one))


class _Walk:
    """A placement that changes by one task at a time."""

    def __init__(
        self,
        job: DistributedJob,
        params: SearchParams,
        first: Assignment,
        cost_s: Callable[[Assignment], float],
    ) -> None:
        self._job, self._params, self._cost_s = job, params, cost_s
        self._most = [
            [(1 + params.tolerance) * one for one in machine.capacity] for machine in job.machines
        ]
        self.assignment = first
        self.cost_s = cost_s(first)
        #: Costs are in units of the first path, so that β has none.
        self._unit_s = self.cost_s or 1.0
        self.excess = job.excess(first)
        self._loads = job.loads(first)
        self._known: dict[Assignment, tuple[float, float]] = {first: (self.cost_s, self.excess)}

    def step(self, rng: Random, movable: Sequence[int]) -> bool:
        """Propose to move a task to another machine that may hold it; returns True when it moved.

        From either of two placements the other is proposed as often.
        """
        job, here = self._job, self.assignment
        if not movable:
            return False
        task = rng.choice(movable)
        others = [machine for machine in range(len(job.machines)) if self._may_hold(task, machine)]
        if not others:
            return False
        there = job.moved(here, task, rng.choice(others))
        if there not in self._known:
            self._known[there] = self._cost_s(there), job.excess(there)
        cost_s, excess = self._known[there]
        gain = (
            self._params.beta
            * (self.cost_s * (1 + self.excess) - cost_s * (1 + excess))
            / self._unit_s
        )
        if gain < 0 and rng.random() > exp(gain):
            return False
        self.assignment, self.cost_s, self.excess = there, cost_s, excess
        self._loads = job.loads(there)
        return True

    def _may_hold(self, task: int, machine: int) -> bool:
        """Return True for a machine, not the task's own, that holds it within the tolerance."""
        if self.assignment[task] == machine or self._job.has_copy(self.assignment, task, machine):
            return False
        demand = self._job.whole_demand(task)
        taken = [a + b for a, b in zip(self._loads[machine], demand, strict=True)]
        return fits(taken, self._most[machine])
