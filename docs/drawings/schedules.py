"""Nine tasks that the server's scheduler serves in the simulator; nothing is placed by hand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from docs.drawings.frame import DARK, GREY, LATE, RULE, WIDTH, heading, path, sheet
from serve.core.commands import AnswerTask, Command, LaunchTask, ResumeTask, SuspendTask
from serve.core.fleet.fleet import make_scheduler
from serve.core.types import Bytes, Nanos, QoS, Task, TaskEstimate, TaskId
from serve.sim.device import Offered
from serve.sim.engine import Simulation
from serve.sim.workload import make_system
from serve.svg import Scale, tag, text

MS, MIB = 1_000_000, 1 << 20

SLOTS, BUDGET_BYTES, QOS_FACTOR, PREPARE_NS = 2, 96 * MIB, 2, 20_000


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
#: Policy, discipline and title of each panel, by file.
PICTURES = {
    "schedules-policies.svg": (
        ("fifo", "barrier", "fifo + barrier: in order of arrival"),
        ("sqtf", "barrier", "sqtf + barrier: shortest target first"),
        ("bqt", "barrier", "bqt + barrier: shortest and longest target in turn"),
        ("lmcf", "barrier", "lmcf + barrier: least memory first"),
        ("bmc", "barrier", "bmc + barrier: least and most memory in turn"),
        ("slack", "barrier", "slack + barrier: earliest due first, hopeless last"),
        ("default", "rolling", "default: one at a time"),
        ("mps_base", "rolling", "mps_base: four at a time share two cores"),
        ("mps_aggr", "rolling", "mps_aggr: all at once share two cores"),
    ),
    "schedules-disciplines.svg": (
        ("slack", "barrier", "slack + barrier: one group after the other"),
        ("slack", "rolling", "slack + rolling: a slot takes the next that fits"),
        ("slack", "preemptive", "slack + preemptive: the more urgent suspends"),
    ),
}
COLUMN, LEFT, TOP, PLOT_WIDTH = 480.0, 66.0, 26.0, 388.0
LANE, MEMORY, LAST_MS, LETTER = 19.0, 30.0, 21.0, 9.0


@dataclass
class Run:
    """The history of one task, in ns."""

    lane: int = -1
    group: int = -1
    #: Beginnings of executing or being suspended: (time, executes).
    changes: list[tuple[int, bool]] = field(default_factory=list)
    end_ns: int = 0

    @property
    def start_ns(self) -> int:
        return self.changes[0][0]


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


def offered(number: int, size: Size, arrived_ms: float) -> Offered:
    """Return one of the nine tasks; its estimate is exact."""
    memory, run_ns = Bytes(size.memory_mib * MIB), Nanos(size.run_ms * MS)
    solo_ns = Nanos(run_ns + PREPARE_NS)
    task = Task(
        TaskId(number), "example:1", 1, 1, Nanos(round(arrived_ms * MS)),
        TaskEstimate(memory, memory, run_ns, solo_ns), QoS(Nanos(QOS_FACTOR * solo_ns)),
    )  # fmt: skip
    return Offered(task, run_ns, Nanos(PREPARE_NS))


REQUESTS = [offered(number, *given) for number, given in enumerate(TASKS)]


def played(policy: str, discipline: str) -> list[Run]:
    """Return the history of each task."""
    system = make_system(policy, discipline, cores=SLOTS, budget_bytes=BUDGET_BYTES)
    simulation = Watched(make_scheduler(system.params), system.device)
    simulation.runs = [Run() for _ in TASKS]
    simulation.run(REQUESTS)
    return simulation.runs


def picture(panels: Sequence[tuple[str, str, str]]) -> str:
    """Return the SVG: two panels in a row, the legend last."""
    parts: list[str] = []
    y = TOP
    for row in range(0, len(panels) + 1, 2):
        heights = [0.0]
        for column, (policy, discipline, title) in enumerate(panels[row : row + 2]):
            left, runs = column * COLUMN + LEFT, played(policy, discipline)
            height, drawn = _panel(left, y, title, runs, grouped=discipline == "barrier")
            parts += drawn
            heights.append(height)
        if row + 2 > len(panels):
            parts += _legend((len(panels) - row) * COLUMN + LEFT, y)
            heights.append(164)
        y += max(heights)
    return sheet(WIDTH, y, parts)


def _panel(
    left: float, top: float, title: str, runs: Sequence[Run], *, grouped: bool
) -> tuple[float, list[str]]:
    """Return the height, and arrivals, lanes, targets and memory from top to bottom."""
    x = Scale(0, LAST_MS * MS, left, left + PLOT_WIDTH)
    due_ns = [request.task.due_ns for request in REQUESTS]
    missed = [run.end_ns > due for run, due in zip(runs, due_ns, strict=True)]
    lanes = sorted({run.lane for run in runs})
    lanes_y = top + 34
    due_y = lanes_y + LANE * len(lanes)
    memory_y = due_y + 24
    count = text(left + PLOT_WIDTH, top, f"{sum(missed)} late", anchor="end")
    labels = {
        top + 22: "arrives",
        lanes_y + 13: "lanes",
        due_y + 15: "due",
        memory_y + 18: "memory",
    }
    parts = [heading(left, top, title), tag("g", count, fill=LATE if any(missed) else DARK)]
    parts += [text(left - 8, y, label, anchor="end") for y, label in labels.items()]
    for number in range(len(lanes)):
        parts.append(path(f"M{left:g} {lanes_y + LANE * (number + 1) - 1:g}h{PLOT_WIDTH:g}", RULE))
    if grouped:
        groups = {run.group for run in runs}
        starts = sorted(min(run.start_ns for run in runs if run.group == g) for g in groups)
        for start_ns in starts[1:]:
            line = f"M{x(start_ns) - 0.5:.1f} {lanes_y - 4:.1f}V{due_y + 2:.1f}"
            parts.append(path(line, DARK, stroke_dasharray="2 2"))
    label_x = _apart([x(due) for due in due_ns])
    for i, (request, run) in enumerate(zip(REQUESTS, runs, strict=True)):
        name = chr(ord("a") + i)
        arrived_x = x(request.task.arrived_ns)
        colour, weight = (LATE, "700") if missed[i] else (DARK, None)
        ticks = f"M{arrived_x:.1f} {top + 25:g}v5M{x(due_ns[i]):.1f} {due_y - 1:g}v5"
        label = text(label_x[i], due_y + 15, name, anchor="middle")
        parts += [
            text(arrived_x, top + 22, name, anchor="middle"),
            path(ticks, colour),
            tag("g", label, fill=colour, font_weight=weight),
            *_bar(x, lanes_y + LANE * lanes.index(run.lane), name, TASKS[i][0], run, due_ns[i]),
        ]
    bottom = memory_y + MEMORY
    parts += _memory(x, memory_y, runs)
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


def _bar(x: Scale, y: float, name: str, size: Size, run: Run, due_ns: int) -> Iterator[str]:
    """Yield a bar: solid while executing, pale while suspended, with a red foot when late."""
    ends = [*(at for at, _ in run.changes[1:]), run.end_ns]
    for (start_ns, executes), end_ns in zip(run.changes, ends, strict=True):
        width = x(end_ns) - x(start_ns)
        yield tag("rect", x=x(start_ns), y=y, width=max(0.5, width - 1), height=LANE - 3,
                  fill=size.colour, opacity=None if executes else "0.25")  # fmt: skip
        if width > 8 and executes:
            letter = text((x(start_ns) + x(end_ns)) / 2, y + 12, name, anchor="middle")
            yield tag("g", letter, fill="white", font_weight="600")
    if run.end_ns > due_ns:
        start = x(max(due_ns, run.start_ns))
        yield tag("rect", x=start, y=y + LANE - 5, width=x(run.end_ns) - start - 1, height=3,
                  fill=LATE)  # fmt: skip


def _memory(x: Scale, top: float, runs: Sequence[Run]) -> Iterator[str]:
    """Yield the reserved memory against the budget; red above it, on a third of the scale."""
    changes: dict[int, int] = {}
    for run, (size, _) in zip(runs, TASKS, strict=True):
        for at_ns, sign in ((run.start_ns, 1), (run.end_ns, -1)):
            changes[at_ns] = changes.get(at_ns, 0) + sign * size.memory_mib * MIB
    moments = sorted(changes)
    used = list(accumulate(changes[at_ns] for at_ns in moments))
    bottom = top + MEMORY
    times = 3 if max(used) > BUDGET_BYTES else 1
    scale = Scale(0, times * BUDGET_BYTES, bottom, top + 4)
    for start_ns, end_ns, now_bytes in zip(moments, moments[1:], used, strict=False):
        for low, high, colour in (
            (0, min(now_bytes, BUDGET_BYTES), GREY),
            (BUDGET_BYTES, now_bytes, LATE),
        ):
            if high > low:
                yield tag("rect", x=x(start_ns), y=scale(high), width=x(end_ns) - x(start_ns),
                          height=scale(low) - scale(high), fill=colour)  # fmt: skip
    yield path(f"M{x.start:g} {scale(BUDGET_BYTES):.1f}H{x.end:g}", DARK, stroke_dasharray="5 3")
    yield path(f"M{x.start:g} {bottom:g}H{x.end:g}", RULE)


def _legend(left: float, top: float) -> Iterator[str]:
    title = f"Two slots, {BUDGET_BYTES // MIB} MiB, targets {QOS_FACTOR} × the solo time"
    yield heading(left, top, title)
    for number, size in enumerate((SHORT, WIDE, LONG)):
        y = top + 14 + 20 * number
        yield tag("rect", x=left, y=y, width=20 * size.run_ms, height=14, fill=size.colour)
        yield text(left + 92, y + 11, f"{size.name}: {size.run_ms} ms, {size.memory_mib} MiB")
    y = top + 74
    yield tag("rect", x=left, y=y, width=80, height=14, fill=LONG.colour, opacity="0.25")
    yield tag("rect", x=left, y=y + 26, width=80, height=3, fill=LATE)
    yield path(f"M{left + 40:g} {y + 38:g}v14", DARK, stroke_dasharray="2 2")
    yield path(f"M{left:g} {y + 66:g}h80", DARK, stroke_dasharray="5 3")
    for below, said in (
        (11, "suspended: keeps its lane and memory"),
        (31, "past its target; red letter: missed"),
        (51, "the next group starts"),
        (71, "memory: the budget; red: over it"),
    ):
        yield text(left + 92, y + below, said)
