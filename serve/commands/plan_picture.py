"""The picture of a planned job: what is on each machine, its network, and the runs of a while."""

from collections.abc import Iterator, Sequence
from html import escape

from serve.commands.plan import PlannedJob
from serve.core.placement.job import Assignment, DistributedJob, JobRole
from serve.svg import Scale, linear_ticks, tag, text

_INK, _MUTED, _RULE = "#24292f", "#57606a", "#d8dee4"
COLOURS = {
    JobRole.STORE: "#8a8f98",
    JobRole.SAMPLER: "#2c8a3d",
    JobRole.WORKER: "#1f6feb",
    JobRole.SERVER: "#d4a72c",
    JobRole.REDUCER: "#d4a72c",
    JobRole.LANE: "#1f6feb",
}
_NAMES = {
    JobRole.STORE: "graph store", JobRole.SAMPLER: "sampler", JobRole.WORKER: "worker",
    JobRole.SERVER: "parameter server", JobRole.REDUCER: "step of the ring", JobRole.LANE: "lane",
}  # fmt: skip
_OUT, _IN = "#bc4c00", "#8250df"
WIDTH, MARGIN, LEFT = 1000.0, 16.0, 200.0
_BOX, _GAP, _LANE, _BAR = 15.0, 3.0, 7.0, 170.0
#: Iterations that are drawn at most, the last ones.
_DRAWN = 4


def plan_picture(found: PlannedJob) -> str:
    """Return the SVG: a row for each machine, tasks left, time to the right."""
    job, run = found.job, found.run
    first = max(0, len(found.volumes[0]) - _DRAWN)
    began_s = min(one.began_s for one in run.runs if one.iteration >= first)
    time = Scale(began_s, max(run.makespan_s, began_s + 1e-9), LEFT + 260, WIDTH - MARGIN)
    parts = [
        text(MARGIN, 26, f"{len(job.machines)} machines, {_time(found)}", "head"),
        *legend(job, [(_OUT, "sends"), (_IN, "receives")], 48),
    ]
    y = 76.0
    for machine in range(len(job.machines)):
        height, drawn = _row(found, machine, y, time)
        parts += drawn
        y += height
    for value, label in linear_ticks(began_s, run.makespan_s, 6, lambda s: f"{s:.3g} s"):
        parts.append(text(time(value), y + 14, label, anchor="middle"))
    return framed(parts, y + 28, "Placement of a training job")


def _time(found: PlannedJob) -> str:
    told = f"{len(found.volumes[0])} iterations in {found.run.makespan_s:.3g} s"
    if found.gain is None:
        return told
    return f"{told}, {found.gain:.0%} less than with workers beside their samplers"


def legend(job: DistributedJob, more: Sequence[tuple[str, str]], y: float) -> Iterator[str]:
    """Yield a box and a name for each role in the job, and for each colour and name of `more`."""
    x = MARGIN
    roles = dict.fromkeys(task.role for task in job.tasks)
    for colour, name in [*((COLOURS[role], _NAMES[role]) for role in roles), *more]:
        yield tag("rect", x=x, y=y - 10, width=11, height=11, fill=colour, rx=2)
        yield text(x + 16, y, name)
        x += 30 + 6.6 * len(name)


def _row(found: PlannedJob, machine: int, top: float, time: Scale) -> tuple[float, list[str]]:
    """Return the height and the parts of one machine's row."""
    job = found.job
    here = [number for number, place in enumerate(found.assignment) if place == machine]
    runners = [number for number in here if any(job.tasks[number].run_s)]
    height = max(least_height(job), 34 + (_LANE + 2) * (len(runners) + 2))
    parts = [*machine_facts(job, found.assignment, machine, top)]
    parts += task_boxes(job, [n for n in here if job.tasks[n].role is not JobRole.REDUCER], top)
    parts += _runs(found, machine, runners, top + 12, time)
    return height, parts


def least_height(job: DistributedJob) -> float:
    """Return the height that a machine's row needs for what it has."""
    return 54.0 + 14 * len(job.resources)


def machine_facts(
    job: DistributedJob, assignment: Assignment, machine: int, top: float
) -> Iterator[str]:
    """Yield a machine's name, and for each resource how much of it is taken."""
    facts, taken = job.machines[machine], job.loads(assignment)[machine]
    yield tag("path", d=f"M{MARGIN:g} {top:g}H{WIDTH - MARGIN:g}", stroke=_RULE)
    yield text(MARGIN, top + 20, facts.name, "name")
    for number, resource in enumerate(job.resources):
        share = taken[number] / facts.capacity[number] if facts.capacity[number] else 0.0
        told = f"{resource} {taken[number]:g} of {facts.capacity[number]:g}"
        yield from share_bar(MARGIN, top + 34 + 14 * number, share, told)


def share_bar(x: float, y: float, share: float, told: str) -> Iterator[str]:
    """Yield a bar that is filled to a share, and what it tells."""
    yield tag("rect", x=x, y=y, width=_BAR, height=11, fill="#eaeef2")
    yield tag("rect", x=x, y=y, width=_BAR * min(1.0, share), height=11, fill="#afb8c1")
    yield text(x + 4, y + 9.5, told)


def task_boxes(job: DistributedJob, here: Sequence[int], top: float) -> Iterator[str]:
    """Yield a box for each task on a machine, twelve in a line."""
    for place, number in enumerate(here):
        task = job.tasks[number]
        x = LEFT + (_BOX + _GAP) * (place % 12)
        y = top + 12 + (_BOX + _GAP) * (place // 12)
        title = tag("title", escape(task.name))
        yield tag("rect", title, x=x, y=y, width=_BOX, height=_BOX, rx=3, fill=COLOURS[task.role])


def framed(parts: Sequence[str], height: float, label: str) -> str:
    """Return the SVG of these parts."""
    style = (
        f".head{{font-weight:600;fill:{_INK};font-size:15px}}.name{{font-weight:600;fill:{_INK}}}"
    )
    return tag(
        "svg", tag("style", style), tag("rect", width=WIDTH, height=height, fill="white"), *parts,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH:g} {height:g}", role="img",
        aria_label=label, font_family="system-ui, sans-serif", font_size=12, fill=_MUTED,
    ) + "\n"  # fmt: skip


def _runs(
    found: PlannedJob, machine: int, runners: list[int], top: float, time: Scale
) -> Iterator[str]:
    """Yield a line for each task with its runs, then what is sent and received."""
    lines = {number: top + (_LANE + 2) * at for at, number in enumerate(runners)}
    for run in found.run.runs:
        if run.task in lines and run.ended_s > time.lo:
            role = found.job.tasks[run.task].role
            yield _bar(time, lines[run.task], run.began_s, run.ended_s, COLOURS[role])
    network = top + (_LANE + 2) * len(runners)
    for flow in found.run.flows:
        link = found.job.links[flow.link]
        if flow.ended_s <= time.lo:
            continue
        if found.assignment[link.source] == machine:
            yield _bar(time, network, flow.began_s, flow.ended_s, _OUT, "0.35")
        if found.assignment[link.target] == machine:
            yield _bar(time, network + _LANE + 2, flow.began_s, flow.ended_s, _IN, "0.35")


def _bar(
    time: Scale, y: float, began_s: float, ended_s: float, colour: str, opacity: str | None = None
) -> str:
    x = time(began_s)
    return tag("rect", x=x, y=y, width=max(0.5, time(ended_s) - x), height=_LANE, fill=colour,
               opacity=opacity)  # fmt: skip
