"""The pictures in docs/scheduling.md are what the scheduler does."""

from pathlib import Path

import pytest

from bench.kit.result import DOCS_PATH, read_result
from docs.drawings.policies import policies_picture
from docs.drawings.schedules import PICTURES, picture
from serve.core.commands import AnswerTask, LaunchTask, ResumeTask, SuspendTask
from serve.core.jobs.lifecycle import mermaid as jobs_mermaid
from serve.core.lifecycle import mermaid
from serve.core.scheduler import Scheduler
from serve.core.types import Nanos
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import Simulation
from tests.builders import MS, params, task
from tests.docs.pages import texts

PAGE = Path(__file__).parents[2] / "docs" / "scheduling.md"

#: Name: (arrives at, runs for), ms.
EXAMPLE = {"A": (0, 9), "B": (0, 6), "C": (1, 2), "D": (2, 4), "E": (3, 1)}
SLOTS = 2


class Watched(Simulation):
    """Notes what every task does from when on."""

    def __init__(self, *args):
        self.changes = {name: [] for name in EXAMPLE}
        super().__init__(*args)

    def _obey(self, command):
        shown = {LaunchTask: "█", ResumeTask: "█", SuspendTask: "░", AnswerTask: " "}
        if type(command) in shown:
            name = list(EXAMPLE)[command.task_id]
            self.changes[name].append((self.now_ns // MS, shown[type(command)]))
        return super()._obey(command)


def requests():
    return [
        Offered(task(i, run_ns=run * MS, prepare_ns=0, arrived_ns=at * MS), run * MS, 0)
        for i, (at, run) in enumerate(EXAMPLE.values())
    ]


def draw(policy, discipline):
    """One row per task, one column per millisecond."""
    chosen = params(
        policy=policy, discipline=discipline, lanes=2 * SLOTS, parallelism=SLOTS, can_suspend=True
    )
    simulation = Watched(Scheduler(chosen), DeviceModel(switch_ns=Nanos(0)))
    simulation.run(requests())
    rows = [f"{policy} + {discipline}"]
    for name, (at, run) in EXAMPLE.items():
        changes = dict([(at, "·"), *simulation.changes[name]])
        row, mark = "", " "
        for column in range(max(changes)):
            mark = changes.get(column, mark)
            row += mark
        late = " late" if max(changes) - at > 2 * run else ""
        rows.append(f"  {name} {row}{late}")
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("policy", "discipline"),
    [("bqt", "barrier"), ("slack", "rolling"), ("slack", "preemptive")],
)
def test_picture(policy, discipline):
    assert draw(policy, discipline) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PICTURES)
def test_schedules_are_as_drawn(name):
    assert picture(PICTURES[name]) == (DOCS_PATH / name).read_text(encoding="utf-8")
    assert f"({name})" in PAGE.read_text(encoding="utf-8")


def test_the_load_is_drawn_as_it_was_measured():
    drawn = (DOCS_PATH / "policies.svg").read_text(encoding="utf-8")
    assert policies_picture(read_result("policies")) == drawn


def test_life_cycle_diagrams():
    page = PAGE.read_text(encoding="utf-8")
    assert mermaid() in page
    assert jobs_mermaid() in page


def test_the_example_runs(capsys):
    (block,) = texts("docs/scheduling.md", "python", "simulator")
    exec(block, {"requests": requests()})
    assert capsys.readouterr().out.startswith("0.0 0.")
