"""`gnnserve cluster plan`: what a file describes is placed, drawn and, when wrong, named."""

import json
import sys
from xml.etree import ElementTree

import pytest

from serve import cli
from serve.commands.plan import plan
from serve.commands.plan_picture import plan_picture
from serve.commands.serving_plan import plan_servers
from serve.errors import ConfigError
from serve.toml_tables import read_toml

DESCRIBED = """
iterations = 6
[[machines]]
name = "fast<&>"
count = 2
gbit_s = 50
speed = 2
has = { memory = 48, gpus = 2 }
[[machines]]
name = "slow"
gbit_s = 10
has = { memory = 48, cores = 4, gpus = 2 }
[store]
needs = { memory = 16 }
run_ms = 5
[sampler]
count = 2
needs = { memory = 7 }
run_ms = 10
[worker]
count = 3
needs = { memory = 3, gpus = 1 }
run_ms = 20
[volumes]
features_mb = 60
locality = 0.5
batch_mb = 65
model_mb = 0.8
factors = [0.9, 1.1]
"""
SERVER = "[server]\nneeds = { memory = 5 }\nrun_ms = 1\n"


def quiet(what, share):
    """Tell nobody how far it is."""


def planned(path, **options):
    return plan(read_toml(path), str(path), progress=quiet, **options)


def described(tmp_path, text=DESCRIBED):
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("more", ["", SERVER])
def test_all_tasks_are_placed_within_what_machines_have(tmp_path, more):
    path = described(tmp_path, DESCRIBED + more)
    found = planned(path, steps=100, seed=3)
    assert found.job.excess(found.assignment) == 0
    assert found.gain is None or found.gain >= 0
    assert len(found.run.runs) == 6 * len(found.job.tasks)
    again = planned(path, steps=100, seed=3)
    assert again.assignment == found.assignment
    # A fast machine runs a worker in half of the time.
    worker = next(task for task in found.job.tasks if task.name == "worker 0")
    assert worker.run_s == (0.01, 0.01, 0.02)


def test_the_picture_shows_every_task_and_machine(tmp_path):
    found = planned(described(tmp_path), steps=20, seed=0)
    root = ElementTree.fromstring(plan_picture(found))
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"fast<&>-0", "fast<&>-1", "slow"} <= set(texts)
    titles = {each.text for each in root.iter("{http://www.w3.org/2000/svg}title")}
    assert {"worker 2", "sampler 2.1", "store slow"} <= titles


def run(*arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gnnserve", "cluster", "plan", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_the_command_prints_and_draws(tmp_path, monkeypatch, capsys):
    path, svg = described(tmp_path), tmp_path / "out.svg"
    assert run(path, "--svg", svg, "--steps", 5, monkeypatch=monkeypatch) == 0
    assert "6 iterations take" in capsys.readouterr().out
    assert svg.stat().st_size > 1000
    assert run(path, "--json", "--steps", 5, monkeypatch=monkeypatch) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["at_least_s"] <= told["makespan_s"] <= told["at_most_s"]
    assert sum(map(len, told["machines"].values())) == 9


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("memory = 16", "memry = 16", "store.needs.memry: no machine has it; known: memory"),
        ("count = 3", "count = 7", "3 machines cannot hold"),
        ("count = 3", "count = 100", "tasks, at most 2000"),
        ("memory = 16", "memory = 160", "cannot hold what is fixed on it"),
        ("locality = 0.5", "locality = 2", "volumes.locality"),
        ('name = "slow"', 'name = "fast<&>-0"', "two have one name"),
        ("count = 2\ngbit", "count = 500\ngbit", "1 to 256 machines"),
        ("gbit_s = 10", "gbit = 10", "machines"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, old, new, error):
    text = DESCRIBED.replace(old, new, 1)
    assert text != DESCRIBED
    with pytest.raises(ConfigError, match=error):
        planned(described(tmp_path, text), steps=1, seed=0)


SERVERS = """
simulated = 200
[[machines]]
name = "fast"
count = 2
gbit_s = 8
has = { memory = 64, cores = 12 }
[[machines]]
name = "slow<&>"
count = 2
gbit_s = 0.8
has = { memory = 64, cores = 12 }
[graph]
parts = 4
needs = { memory = 20 }
[sampler]
count = 8
needs = { cores = 1 }
[[lanes]]
name = "lane"
count = 16
needs = { cores = 1 }
[[requests]]
name = "ids"
per_s = 400
rows_mb = 1.2
batch_mb = 1.3
prepare_ms = 4
run_ms = 10
target_ms = 50
"""


def test_servers_are_placed_drawn_and_told(tmp_path, monkeypatch, capsys):
    path, svg = described(tmp_path, SERVERS), tmp_path / "out.svg"
    assert run(path, "--svg", svg, "--steps", 100, "--json", monkeypatch=monkeypatch) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gain"] >= 1
    assert told["load"] == pytest.approx(told["gain"] * told["colocated_load"])
    names = [name for each in told["machines"].values() for name in each]
    assert {"part 0", "part 1", "part 2", "part 3"} <= set(names)
    drawn = ElementTree.fromstring(svg.read_text())
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"fast-0", "slow<&>-1"} <= set(texts)
    assert any(one.startswith("sends: busy") for one in texts)
    titles = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 4 + 8 + 16


def test_small_requests_are_told_not_to_need_it(tmp_path, monkeypatch, capsys):
    text = (
        SERVERS.replace("1.2", "0.012")
        .replace("1.3", "0.013")
        .replace("gbit_s = 0.8", "gbit_s = 8")
    )
    assert run(described(tmp_path, text), "--steps", 8, monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "the network is no reason to place anything" in said
    assert "Do not bother" in said


def test_targets_that_no_placement_meets_are_told(tmp_path, monkeypatch, capsys):
    path, svg = described(tmp_path, SERVERS.replace("run_ms = 10", "run_ms = 60")), tmp_path / "svg"
    assert run(path, "--svg", svg, "--steps", 8, monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "The targets cannot be met" in said
    assert "times" not in said, "no load is carried, and none is compared"
    assert "The targets cannot be met" in svg.read_text()
    assert run(path, "--json", "--steps", 8, monkeypatch=monkeypatch) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["load"], told["colocated_load"], told["gain"]) == (0, 0, None)


def test_a_picture_that_cannot_be_drawn_is_told_before_the_search(tmp_path, monkeypatch, capsys):
    path, svg = described(tmp_path, SERVERS), tmp_path / "none" / "plan.svg"
    assert run(path, "--svg", svg, "--steps", 5, monkeypatch=monkeypatch) == 2
    told = capsys.readouterr().err.replace("\n", "")
    assert f"--svg {svg}: a file in a folder that is there is wanted" in told


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("parts = 4", "parts = 4\ncopies = 5", "4 parts in 5 copies on 4 machines"),
        ("count = 16", "count = 400", "412 tasks and 1 classes"),
        ("cores = 1 }\n[[requests]]", "gpus = 1 }\n[[requests]]", "lanes.needs.gpus: no machine"),
        ("memory = 20", "memory = 65", "cannot hold"),
        ("count = 2\ngbit", "count = 32\ngbit", "1 to 32 machines"),
        ("rows_mb = 1.2", "rows_mb = 0", "rows_mb"),
    ],
)
def test_what_is_wrong_with_servers_is_named(tmp_path, old, new, error):
    text = SERVERS.replace(old, new, 1)
    assert text != SERVERS
    path = described(tmp_path, text)
    with pytest.raises(ConfigError, match=error):
        plan_servers(read_toml(path), str(path), steps=1, seed=0, progress=quiet)
