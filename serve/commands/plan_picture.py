"""The picture of a planned job: what is on each machine, its network, and the runs of a while."""

from collections.abc import Iterator
from html import escape

from serve.commands.plan import PlannedJob
from serve.core.placement.job import JobRole
from serve.svg import Scale, linear_ticks, tag, text

_INK, _MUTED, _RULE = "#24292f", "#57606a", "#d8dee4"
_COLOURS = {
    JobRole.STORE: "#8a8f98",
    JobRole.SAMPLER: "#2c8a3d",
    JobRole.WORKER: "#1f6feb",
    JobRole.SERVER: "#d4a72c",
    JobRole.REDUCER: "#d4a72c",
}
_NAMES = {
    JobRole.STORE: "graph store", JobRole.SAMPLER: "sampler", JobRole.WORKER: "worker",
    JobRole.SERVER: "parameter server", JobRole.REDUCER: "step of the ring",
}  # fmt: skip
_OUT, _IN = "#bc4c00", "#8250df"
_WIDTH, _MARGIN, _LEFT = 1000.0, 16.0, 200.0
_BOX, _GAP, _LANE = 15.0, 3.0, 7.0
#: Iterations that are drawn at most, the last ones.
_DRAWN = 4


def plan_picture(found: PlannedJob) -> str:
    """Return the SVG: a row for each machine, tasks left, time to the right."""
    job, run = found.job, found.run
    first = max(0, len(found.volumes[0]) - _DRAWN)
    began_s = min(one.began_s for one in run.runs if one.iteration >= first)
    time = Scale(began_s, max(run.makespan_s, began_s + 1e-9), _LEFT + 260, _WIDTH - _MARGIN)
    parts = [
        text(_MARGIN, 26, f"{len(job.machines)} machines, {_time(found)}", "head"),
        *_legend(found, 48),
    ]
    y = 76.0
    for machine in range(len(job.machines)):
        height, drawn = _row(found, machine, y, time)
        parts += drawn
        y += height
    for value, label in linear_ticks(began_s, run.makespan_s, 6, lambda s: f"{s:.3g} s"):
        parts.append(text(time(value), y + 14, label, anchor="middle"))
    style = (
        f".head{{font-weight:600;fill:{_INK};font-size:15px}}.name{{font-weight:600;fill:{_INK}}}"
    )
    return tag(
        "svg", tag("style", style), tag("rect", width=_WIDTH, height=y + 28, fill="white"), *parts,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_WIDTH:g} {y + 28:g}", role="img",
        aria_label="Placement of a training job", font_family="system-ui, sans-serif",
        font_size=12, fill=_MUTED,
    ) + "\n"  # fmt: skip


def _time(found: PlannedJob) -> str:
    told = f"{len(found.volumes[0])} iterations in {found.run.makespan_s:.3g} s"
    if found.gain is None:
        return told
    return f"{told}, {found.gain:.0%} less than with workers beside their samplers"


def _legend(found: PlannedJob, y: float) -> Iterator[str]:
    x = _MARGIN
    roles = dict.fromkeys(task.role for task in found.job.tasks)
    entries = [(_COLOURS[role], _NAMES[role]) for role in roles]
    for colour, name in [*entries, (_OUT, "sends"), (_IN, "receives")]:
        yield tag("rect", x=x, y=y - 10, width=11, height=11, fill=colour, rx=2)
        yield text(x + 16, y, name)
        x += 30 + 6.6 * len(name)


def _row(found: PlannedJob, machine: int, top: float, time: Scale) -> tuple[float, list[str]]:
    """Return the height and the parts of one machine's row."""
    job = found.job
    facts, taken = job.machines[machine], job.loads(found.assignment)[machine]
    here = [number for number, place in enumerate(found.assignment) if place == machine]
    runners = [number for number in here if any(job.tasks[number].run_s)]
    height = max(54.0 + 14 * len(job.resources), 34 + (_LANE + 2) * (len(runners) + 2))
    parts = [
        tag("path", d=f"M{_MARGIN:g} {top:g}H{_WIDTH - _MARGIN:g}", stroke=_RULE),
        text(_MARGIN, top + 20, facts.name, "name"),
    ]
    for number, resource in enumerate(job.resources):
        y = top + 34 + 14 * number
        share = taken[number] / facts.capacity[number] if facts.capacity[number] else 0.0
        told = f"{resource} {taken[number]:g} of {facts.capacity[number]:g}"
        parts += [
            tag("rect", x=_MARGIN, y=y, width=170, height=11, fill="#eaeef2"),
            tag("rect", x=_MARGIN, y=y, width=170 * min(1.0, share), height=11, fill="#afb8c1"),
            text(_MARGIN + 4, y + 9.5, told),
        ]
    parts += _tasks(found, [n for n in here if job.tasks[n].role is not JobRole.REDUCER], top)
    parts += _runs(found, machine, runners, top + 12, time)
    return height, parts


def _tasks(found: PlannedJob, here: list[int], top: float) -> Iterator[str]:
    """Yield a box for each task on a machine, twelve in a line."""
    for place, number in enumerate(here):
        task = found.job.tasks[number]
        x = _LEFT + (_BOX + _GAP) * (place % 12)
        y = top + 12 + (_BOX + _GAP) * (place // 12)
        title = tag("title", escape(task.name))
        yield tag("rect", title, x=x, y=y, width=_BOX, height=_BOX, rx=3, fill=_COLOURS[task.role])


def _runs(
    found: PlannedJob, machine: int, runners: list[int], top: float, time: Scale
) -> Iterator[str]:
    """Yield a line for each task with its runs, then what is sent and received."""
    lines = {number: top + (_LANE + 2) * at for at, number in enumerate(runners)}
    for run in found.run.runs:
        if run.task in lines and run.ended_s > time.lo:
            role = found.job.tasks[run.task].role
            yield _bar(time, lines[run.task], run.began_s, run.ended_s, _COLOURS[role])
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
