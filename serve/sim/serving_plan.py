"""Where stores, samplers and lanes carry the most requests: foreseen, then simulated."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from serve.core.placement.feasible import first_placement
from serve.core.placement.job import Assignment
from serve.core.placement.queueing import foreseen
from serve.core.placement.search import SearchParams, cheapest
from serve.core.placement.serving import Serving, beside_lanes
from serve.errors import ConfigError
from serve.sim.flows import served

#: The share of late requests at which a load still counts as carried.
MOST_LATE = 0.01
#: A load is found to this share of itself.
_CLOSE = 0.02
#: How much more than the best so far each search is for. Where several machines have too much to
#: do, costs tell a placement that helps one of them.
_MORE = (2.0, 1.5, 1.25, 1.25)
#: Share of a capacity by which a placement on the way may exceed it.
_TOLERANCE = 0.5
#: How many of the placements that cost least are simulated.
_CANDIDATES = 4
#: Arrivals last as long as this many targets at least, else what cannot last seems carried; but for
#: no more than so many requests, unless more are asked for.
_LEAST_TARGETS, _MOST_REQUESTS = 10, 20_000
#: Loads are looked for between these multiples of the described one.
_LEAST_LOAD, _MOST_LOAD = 1e-3, 1e4


@dataclass(frozen=True)
class PlacedServing:
    """A placement and the load that it carries, as a multiple of the described one."""

    assignment: Assignment
    #: Whether machines prepare for their own lanes alone.
    paired: bool
    load: float


@dataclass(frozen=True)
class ServingPlan:
    """The best placement found, and what others carry."""

    best: PlacedServing
    #: Servers that are alike, and the same with samplers that prepare for any lane; None when they
    #: do not fit.
    colocated: PlacedServing | None
    unpaired: PlacedServing | None

    @property
    def gain(self) -> float | None:
        """The load that the best carries ÷ that of servers that are alike; None if that is none."""
        alike = self.colocated.load if self.colocated else 0.0
        return self.best.load / alike if alike else None


def carried_load(
    problem: Serving,
    assignment: Assignment,
    count: int,
    *,
    seed: int = 0,
    paired: bool = False,
    above: float = 0.0,
    begin: float = 1.0,
) -> float:
    """Return the highest multiple of the described rates of which at most 1 % are late.

    Each load is simulated with `count` requests, or more where these come within a few targets. 0
    when the load is not above `above`. The search begins at `begin`.
    """
    rate_s = sum(one.rate_s for one in problem.classes)
    target_s = max(one.target_s for one in problem.classes)

    def carries(load: float) -> bool:
        lasting = min(_MOST_REQUESTS, ceil(_LEAST_TARGETS * target_s * rate_s * load))
        found = served(
            problem, assignment, load, max(count, lasting), seed=seed, paired=paired,
            most_late=MOST_LATE,
        )  # fmt: skip
        return found.late_share <= MOST_LATE

    low = above
    if above:
        if not carries(above * (1 + _CLOSE)):
            return 0.0
        low = above * (1 + _CLOSE)
    high = max(begin, low * 1.25)
    while high < _MOST_LOAD and carries(high):
        low, high = high, high * 1.5
    while not low and high > _LEAST_LOAD:
        trial = high / 1.5
        if carries(trial):
            low = trial
        else:
            high = trial
    while low and high > low * (1 + _CLOSE):
        middle = (low * high) ** 0.5
        if carries(middle):
            low = middle
        else:
            high = middle
    return low


def plan_serving(
    problem: Serving,
    *,
    steps: int,
    count: int,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> ServingPlan:
    """Return the placement that carries most, of those that the searches find cheapest.

    The result follows from the arguments.

    Args:
        problem: What to place.
        steps: Placements that are looked at.
        count: Requests of each simulation.
        seed: Of searches and arrivals.
        progress: Told what is done, and the share that is done.

    Raises ConfigError when there is no placement.
    """
    progress("simulating servers that are alike", 0.0)
    colocated, unpaired = _alike(problem, count, seed)
    best = unpaired if unpaired and colocated and unpaired.load > colocated.load else colocated
    if best is None:
        first = first_placement(problem.job)
        best = PlacedServing(first, False, carried_load(problem, first, count, seed=seed))
    for number, more in enumerate(_MORE):
        progress(f"looking at {steps:,} placements", number / len(_MORE))
        params = SearchParams(steps=steps // len(_MORE), seed=seed + number, tolerance=_TOLERANCE)
        best = _better(problem, best, params, more, count, seed)
    return ServingPlan(best, colocated, unpaired)


def _alike(
    problem: Serving, count: int, seed: int
) -> tuple[PlacedServing, PlacedServing] | tuple[None, None]:
    try:
        beside = beside_lanes(problem)
    except ConfigError:
        return None, None
    loads = [
        carried_load(problem, beside, count, seed=seed, paired=paired) for paired in (True, False)
    ]
    return PlacedServing(beside, True, loads[0]), PlacedServing(beside, False, loads[1])


def _better(
    problem: Serving, best: PlacedServing, params: SearchParams, more: float, count: int, seed: int
) -> PlacedServing:
    """Return the best, or what carries more: from a search for `more` times the best's load."""
    load = best.load * more or 1.0
    found = cheapest(
        problem.job,
        lambda where: foreseen(problem, where, load).cost,
        params, best.assignment, _CANDIDATES,
    )  # fmt: skip
    for where in found:
        carried = carried_load(
            problem, where, count, seed=seed, above=best.load, begin=best.load * 1.25 or 1.0
        )
        if carried > best.load:
            best = PlacedServing(where, False, carried)
    return best
