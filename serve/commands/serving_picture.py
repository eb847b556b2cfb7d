"""The picture of placed servers: what is on each machine, and how busy it is."""

from collections.abc import Iterator

from serve.commands.plan_picture import (
    LEFT,
    MARGIN,
    framed,
    least_height,
    legend,
    machine_facts,
    share_bar,
    task_boxes,
)
from serve.commands.serving_plan import PlannedServing, sentences
from serve.core.placement.queueing import foreseen
from serve.svg import text

_COLUMN = 240.0


def serving_picture(found: PlannedServing) -> str:
    """Return the SVG: a row for each machine, tasks left, how busy it is to the right."""
    job, best = found.problem.job, found.plan.best
    told = sentences(found)
    parts = [text(MARGIN, 26, told[0], "head")]
    parts += [text(MARGIN, 46 + 16 * number, one) for number, one in enumerate(told[1:])]
    y = 46.0 + 16 * len(told)
    parts += legend(job, [], y)
    y += 20
    busy = _busy(found)
    for machine in range(len(job.machines)):
        here = [number for number, place in enumerate(best.assignment) if place == machine]
        parts += machine_facts(job, best.assignment, machine, y)
        parts += task_boxes(job, here, y)
        parts += _bars(busy[machine], y)
        rows = max(len(job.resources), len(busy[machine]), (len(here) + 11) // 12)
        y += least_height(job) + 18 * max(0, rows - len(job.resources))
    return framed(parts, y + 12, "Placement of servers")


def _busy(found: PlannedServing) -> list[list[tuple[str, float]]]:
    """Return, by machine, what is busy for which share of the time at the load that is carried."""
    problem, best = found.problem, found.plan.best
    layout = problem.layout(best.assignment, paired=best.paired)
    seen = foreseen(problem, best.assignment, best.load or 1.0, paired=best.paired)
    rows = [
        [("sends", out), ("receives", into)]
        for out, into in zip(seen.out_busy, seen.in_busy, strict=True)
    ]
    for pool, share in zip(layout.samplers, seen.sampler_busy, strict=True):
        rows[pool.machine].append(("samplers", share))
    for pool, share in zip(layout.lanes, seen.lane_busy, strict=True):
        rows[pool.machine].append(("lanes", share))
    return rows


def _bars(busy: list[tuple[str, float]], top: float) -> Iterator[str]:
    for number, (what, share) in enumerate(busy):
        yield from share_bar(
            LEFT + _COLUMN, top + 12 + 14 * number, share, f"{what}: busy {share:.0%}"
        )
