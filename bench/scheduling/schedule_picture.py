"""Draw nine tasks under every policy and discipline, as docs/schedules-*.svg.

    python -m bench.scheduling.schedule_picture

The server's scheduler serves the same tasks in the simulator under each policy, as each baseline
and under each discipline. The drawing shows its commands; nothing is placed by hand.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.kit.drawing import DARK, heading, sheet
from bench.kit.drawing import RULE as LINE
from bench.kit.result import DOCS_PATH as DOCS
from serve.core.commands import AnswerTask, Command, LaunchTask, ResumeTask, SuspendTask
from serve.core.fleet.fleet import make_scheduler
from serve.core.types import Bytes, Nanos, QoS, Task, TaskEstimate, TaskId
from serve.obs.svg import Scale, tag, text
from serve.sim.device import Offered
from serve.sim.engine import Simulation
from serve.sim.workload import make_system

MS, MIB = 1_000_000, 1 << 20
SLOTS, BUDGET_BYTES, QOS_FACTOR = 2, 96 * MIB, 2
PREPARE_NS = 20_000


@dataclass(frozen=True)
class Size:
    """Run time and memory of all tasks of one size."""

    name: str
    run_ms: int
    memory_mib: int
    colour: str


SHORT = Size("short", 1, 10, "#1f6feb")
WIDE = Size("wide", 2, 60, "#d4a72c")
LONG = Size("long", 4, 34, "#2c8a3d")
#: Size and arrival, ms; the tasks are called a, b, … Chosen so that no two schedules are the same.
TASKS = (
    (LONG, 0.0), (LONG, 0.5), (SHORT, 1.1), (SHORT, 2.1), (SHORT, 3.4),
    (WIDE, 3.9), (LONG, 4.4), (WIDE, 5.7), (SHORT, 6.5),
)  # fmt: skip

#: Name, discipline, description.
POLICIES = (
    ("fifo", "barrier", "in order of arrival"),
    ("sqtf", "barrier", "shortest target first"),
    ("bqt", "barrier", "shortest and longest target in turn"),
    ("lmcf", "barrier", "least memory first"),
    ("bmc", "barrier", "least and most memory in turn"),
    ("slack", "barrier", "earliest due first, hopeless last"),
    ("default", "rolling", "one at a time"),
    ("mps_base", "rolling", "four at a time share two cores"),
    ("mps_aggr", "rolling", "all at once share two cores"),
)
DISCIPLINES = (
    ("slack", "barrier", "one group after the other"),
    ("slack", "rolling", "a slot takes the next that fits"),
    ("slack", "preemptive", "the more urgent suspends"),
)
BASELINES = ("default", "mps_base", "mps_aggr")

COLUMN, LEFT, TOP, PLOT_WIDTH, WIDTH = 480.0, 66.0, 26.0, 388.0, 960.0
LANE, MEMORY, LAST_MS, LETTER = 19.0, 30.0, 21.0, 9.0
LATE = "#cf222e"


@dataclass
class Run:
    """The history of one task, in ns."""

    lane: int = -1
    group: int = -1
    #: Beginnings of executing or being suspended: (time, executes).
    changes: list[tuple[int, bool]] = field(default_factory=list)
    end_ns: int = 0


class Watched(Simulation):
    """Records every run."""

    runs: list[Run]

    def _obey(self, command: Command) -> None:
        if isinstance(command, LaunchTask):
            run = self.runs[command.task_id]
            run.lane, run.group = command.lane_id, command.group_id
        if isinstance(command, LaunchTask | ResumeTask | SuspendTask):
            executes = not isinstance(command, SuspendTask)
            self.runs[command.task_id].changes.append((self.now_ns, executes))
        elif isinstance(command, AnswerTask):
            self.runs[command.task_id].end_ns = self.now_ns
        super()._obey(command)


def requests() -> list[Offered]:
    """Return the nine tasks; estimates are exact."""
    return [
        Offered(_task(i, size, arrived_ms), Nanos(size.run_ms * MS), Nanos(PREPARE_NS))
        for i, (size, arrived_ms) in enumerate(TASKS)
    ]


def _task(number: int, size: Size, arrived_ms: float) -> Task:
    memory, run_ns = Bytes(size.memory_mib * MIB), Nanos(size.run_ms * MS)
    return Task(
        TaskId(number), "example:1", 1, 1, Nanos(round(arrived_ms * MS)),
        TaskEstimate(memory, memory, run_ns, Nanos(run_ns + PREPARE_NS)),
        QoS(Nanos(QOS_FACTOR * (run_ns + PREPARE_NS))),
    )  # fmt: skip


def play(policy: str, discipline: str) -> list[Run]:
    """Return the history of each task."""
    system = make_system(policy, discipline, cores=SLOTS, budget_bytes=BUDGET_BYTES)
    simulation = Watched(make_scheduler(system.params), system.device)
    simulation.runs = [Run() for _ in TASKS]
    simulation.run(requests())
    return simulation.runs


def late(runs: Sequence[Run]) -> list[bool]:
    """Return for each task whether it missed its target."""
    return [run.end_ns > offered.task.due_ns for run, offered in zip(runs, requests(), strict=True)]


def picture(panels: Sequence[tuple[str, str, str]]) -> str:
    """Return the SVG: two panels in a row, the legend last."""
    parts: list[str] = []
    y = TOP
    for row in range(0, len(panels) + 1, 2):
        heights = [0.0]
        for column, (policy, discipline, what) in enumerate(panels[row : row + 2]):
            runs = play(policy, discipline)
            name = policy if policy in BASELINES else f"{policy} + {discipline}"
            grouped = discipline == "barrier"
            height, drawn = _panel(column * COLUMN + LEFT, y, f"{name}: {what}", runs, grouped)
            parts += drawn
            heights.append(height)
        if row + 2 > len(panels):
            parts += _legend((len(panels) - row) * COLUMN + LEFT, y)
            heights.append(164)
        y += max(heights)
    return sheet(WIDTH, y, parts)


def _panel(
    left: float, top: float, title: str, runs: Sequence[Run], grouped: bool
) -> tuple[float, list[str]]:
    """Return the height, and arrivals, lanes, targets and memory from top to bottom."""
    x = Scale(0, LAST_MS * MS, left, left + PLOT_WIDTH)
    missed = late(runs)
    lanes = sorted({run.lane for run in runs})
    lanes_y = top + 34
    due_y = lanes_y + LANE * len(lanes)
    memory_y = due_y + 24
    parts = [heading(left, top, title)]
    count = text(left + PLOT_WIDTH, top, f"{sum(missed)} late", anchor="end")
    count = tag("g", count, fill=LATE if any(missed) else DARK)
    parts.append(count)
    parts.append(text(left - 8, top + 22, "arrives", anchor="end"))
    parts.append(text(left - 8, due_y + 15, "due", anchor="end"))
    parts.append(text(left - 8, memory_y + 18, "memory", anchor="end"))
    for number in range(len(lanes)):
        y = lanes_y + LANE * number
        parts.append(tag("path", d=f"M{left:g} {y + LANE - 1:g}h{PLOT_WIDTH:g}", stroke=LINE))
        if number == 0:
            parts.append(text(left - 8, y + 13, "lanes", anchor="end"))
    if grouped:
        first: dict[int, int] = {}
        for run in runs:
            first[run.group] = min(first.get(run.group, run.changes[0][0]), run.changes[0][0])
        for start_ns in sorted(first.values())[1:]:
            d = f"M{x(start_ns) - 0.5:.1f} {lanes_y - 4:.1f}V{due_y + 2:.1f}"
            parts.append(tag("path", d=d, stroke=DARK, stroke_dasharray="2 2"))
    due_label_x = _apart([x(offered.task.due_ns) for offered in requests()])
    for i, (offered, run) in enumerate(zip(requests(), runs, strict=True)):
        name = chr(ord("a") + i)
        arrived_x, due_x = x(offered.task.arrived_ns), x(offered.task.due_ns)
        parts.append(text(arrived_x, top + 22, name, anchor="middle"))
        d = f"M{arrived_x:.1f} {top + 25:g}v5M{due_x:.1f} {due_y - 1:g}v5"
        parts.append(tag("path", d=d, stroke=LATE if missed[i] else DARK))
        label = text(due_label_x[i], due_y + 15, name, anchor="middle")
        bold = {"fill": LATE, "font_weight": "700"} if missed[i] else {"fill": DARK}
        parts.append(tag("g", label, **bold))
        y = lanes_y + LANE * lanes.index(run.lane)
        parts += _bar(x, y, name, TASKS[i][0].colour, run, offered.task.due_ns)
    parts += _memory(x, memory_y, runs)
    bottom = memory_y + MEMORY
    parts += [
        text(x(ms * MS), bottom + 15, f"{ms} ms" if ms == 20 else f"{ms}", anchor="middle")
        for ms in range(0, int(LAST_MS) + 1, 5)
    ]
    return bottom + 52 - top, parts


def _apart(places: Sequence[float]) -> dict[int, float]:
    """Return positions of letters by index, moved so that none covers another."""
    found: dict[int, float] = {}
    last = 0.0
    for i in sorted(range(len(places)), key=places.__getitem__):
        found[i] = last = max(places[i], last + LETTER)
    return found


def _bar(x: Scale, y: float, name: str, colour: str, run: Run, due_ns: int) -> Iterator[str]:
    """Yield a bar: solid while executing, pale while suspended, with a red foot when late."""
    ends = [*(at for at, _ in run.changes[1:]), run.end_ns]
    for (start_ns, executes), end_ns in zip(run.changes, ends, strict=True):
        width = x(end_ns) - x(start_ns)
        yield tag("rect", x=x(start_ns), y=y, width=max(0.5, width - 1), height=LANE - 3,
                  fill=colour, opacity=None if executes else "0.25")  # fmt: skip
        if width > 8 and executes:
            middle = (x(start_ns) + x(end_ns)) / 2
            yield tag("g", text(middle, y + 12, name, anchor="middle"), fill="white",
                      font_weight="600")  # fmt: skip
    if run.end_ns > due_ns:
        start = x(max(due_ns, run.changes[0][0]))
        yield tag("rect", x=start, y=y + LANE - 5, width=x(run.end_ns) - start - 1, height=3,
                  fill=LATE)  # fmt: skip


def _memory(x: Scale, top: float, runs: Sequence[Run]) -> Iterator[str]:
    """Yield the reserved memory against the budget; red above it, on a third of the scale."""
    changes: dict[int, int] = {}
    for run, (size, _) in zip(runs, TASKS, strict=True):
        for at_ns, sign in ((run.changes[0][0], 1), (run.end_ns, -1)):
            changes[at_ns] = changes.get(at_ns, 0) + sign * size.memory_mib * MIB
    over = any(used > BUDGET_BYTES for used in _running(changes))
    bottom = top + MEMORY
    scale = Scale(0, (3 if over else 1) * BUDGET_BYTES, bottom, top + 4)
    moments = sorted(changes)
    used = list(_running(changes))
    for start_ns, end_ns, now_bytes in zip(moments, moments[1:], used, strict=False):
        for low, high, colour in (
            (0, min(now_bytes, BUDGET_BYTES), "#8a8f98"),
            (BUDGET_BYTES, now_bytes, LATE),
        ):
            if high > low:
                yield tag("rect", x=x(start_ns), y=scale(high), width=x(end_ns) - x(start_ns),
                          height=scale(low) - scale(high), fill=colour)  # fmt: skip
    line = f"M{x.start:g} {scale(BUDGET_BYTES):.1f}H{x.end:g}"
    yield tag("path", d=line, stroke=DARK, stroke_dasharray="5 3")
    yield tag("path", d=f"M{x.start:g} {bottom:g}H{x.end:g}", stroke=LINE)


def _running(changes: dict[int, int]) -> Iterator[int]:
    """Yield the bytes reserved from each moment on."""
    total = 0
    for at_ns in sorted(changes):
        total += changes[at_ns]
        yield total


def _legend(left: float, top: float) -> Iterator[str]:
    title = f"Two slots, {BUDGET_BYTES // MIB} MiB, targets {QOS_FACTOR} × the solo time"
    yield heading(left, top, title)
    for number, size in enumerate((SHORT, WIDE, LONG)):
        y = top + 14 + 20 * number
        yield tag("rect", x=left, y=y, width=20 * size.run_ms, height=14, fill=size.colour)
        yield text(left + 92, y + 11, f"{size.name}: {size.run_ms} ms, {size.memory_mib} MiB")
    y = top + 74
    yield tag("rect", x=left, y=y, width=80, height=14, fill=LONG.colour, opacity="0.25")
    yield text(left + 92, y + 11, "suspended: keeps its lane and memory")
    yield tag("rect", x=left, y=y + 26, width=80, height=3, fill=LATE)
    yield text(left + 92, y + 31, "past its target; red letter: missed")
    yield tag("path", d=f"M{left + 40:g} {y + 38:g}v14", stroke=DARK, stroke_dasharray="2 2")
    yield text(left + 92, y + 51, "the next group starts")
    yield tag("path", d=f"M{left:g} {y + 66:g}h80", stroke=DARK, stroke_dasharray="5 3")
    yield text(left + 92, y + 71, "memory: the budget; red: over it")


PICTURES = {"schedules-policies.svg": POLICIES, "schedules-disciplines.svg": DISCIPLINES}


def main() -> None:
    """Write both drawings."""
    for name, panels in PICTURES.items():
        (DOCS / name).write_text(picture(panels), encoding="utf-8")


if __name__ == "__main__":
    main()
