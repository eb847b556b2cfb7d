"""Texts of files, servers and users reach the terminal as they are."""

import io
import re
import sys
import threading
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kit.servers import ROOT
from loadgen.measure import Sample, summarise
from loadgen.show import show_summary
from serve import cli
from serve.commands.estimate import estimate_table
from serve.commands.steps import Steps
from serve.server.api import ModelEstimate
from serve.terminal import Console
from serve.workload import TraceHeader

#: What markup makes of it: [model.args] is eaten, [/b] an error, :smile: a picture.
HOSTILE = "[model.args] is x[red]y in a[/b] :smile:"


def run(*arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gnnserve", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def shown(what):
    console = Console(file=io.StringIO(), width=200)
    console.print(what)
    return console.file.getvalue()


@pytest.mark.parametrize("name", ["x[red]y", "a[/b]", "[model.args]", ":smile:"])
def test_an_error_names_the_file_as_it_is_called(tmp_path, monkeypatch, capsys, name):
    assert run("check", "--config", str(tmp_path / name / "no.toml"), monkeypatch=monkeypatch) == 2
    assert f"{name}/no.toml: cannot be read" in capsys.readouterr().err


def test_the_key_that_is_wrong_is_told(tmp_path, monkeypatch, capsys):
    model = tmp_path / "models" / "m" / "config.toml"
    model.parent.mkdir(parents=True)
    model.write_text('[model]\nfactory = "a:B"\n[model.args]\ninputs = ["x", "edge_index"]\n')
    (tmp_path / "s.toml").write_text('[scheduling]\npolicy = "fifo"\ndiscipline = "rolling"\n')
    assert run("check", "--config", str(tmp_path / "s.toml"), monkeypatch=monkeypatch) == 2
    assert "write inputs above [model.args]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("estimate", "nope"), "unknown model 'nope'; the repository holds: gat, gcn, gin, sage"),
        (
            ("estimate", "gcn", "--graph", "community", "--node-ids", "2", "--fanouts", "x"),
            "'x' is",
        ),
    ],
    ids=["model", "fanouts"],
)
def test_what_an_estimate_cannot_be_asked_for_is_a_wrong_argument(
    arguments, told, monkeypatch, capsys
):
    size = () if "--graph" in arguments else ("--nodes", "2", "--edges", "2")
    config = str(ROOT / "configs" / "dev.toml")
    assert run(*arguments, *size, "--config", config, monkeypatch=monkeypatch) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ("serve",),
        ("check",),
        ("config", "show"),
        ("estimate", "gcn", "--nodes", "1", "--edges", "1"),
        ("graph", "apply", "g", "--out", "there"),
        ("token", "list"),
    ],
    ids=" ".join,
)
def test_a_folder_without_a_configuration_is_told_what_to_do(
    command, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert run(*command, monkeypatch=monkeypatch) == 2
    said = "gnnserve.toml: cannot be read: No such file or directory; `gnnserve init gnnserve.toml`"
    assert f"{said} writes one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("report", "--since", "30"), "error: since: '30' is not a duration"),
        (("report",), "error: gnnserve.db: no such report database"),
        (("db", "prune", "--keep", "30"), "error: --keep: '30' is not a duration"),
        (("token", "new", "a", "--file", "t", "--expires", "3"), "error: --expires: '3' is not a"),
        (
            ("token", "new", "a", "--file", "t", "--role", "boss"),
            "error: --role: 'boss' is not one of infer, observe, admin",
        ),
        (("model", "list", "--target", "127.0.0.1:1"), "--target names another"),
        (
            ("model", "list", "--ca", "a.crt"),
            "error: --ca: a.crt: cannot be read: No such file or directory",
        ),
        (
            ("simulate", "--workload", "mix", "--rho", "1", "--policy", "slak"),
            "sqtf; baselines: default, mps_base, mps_aggr",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_told_with_its_name_and_rule(command, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*command, monkeypatch=monkeypatch) == (1 if "--target" in command else 2)
    assert told in capsys.readouterr().err


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1))
def test_any_text_is_printed(text):
    console = Console(file=io.StringIO(), width=80)
    console.print_error(ValueError(text))
    assert console.file.getvalue() == f"error: {text}\n"


def test_tables_hold_texts_as_they_are():
    names = (field.name for field in fields(ModelEstimate))
    numbers = {name: 1 for name in names if name.endswith(("bytes", "_ns"))}
    estimate = ModelEstimate(
        model=HOSTILE, version="1", executor="csr", num_nodes=1, num_edges=1, fit_count=1,
        peak_where=HOSTILE, warning=HOSTILE, **numbers,
    )  # fmt: skip
    assert shown(estimate_table(estimate)).count(HOSTILE) == 3


def test_a_load_is_told_in_the_words_of_the_server():
    header = TraceHeader(workload=HOSTILE, seed=0, rate_hz=1.0, sources={HOSTILE: HOSTILE})
    sample = Sample(
        model=HOSTILE, due_ns=1, lag_ns=1, latency_ns=1, status="INTERNAL", message=HOSTILE
    )
    console = Console(file=io.StringIO(), width=200)
    summary = summarise(HOSTILE, header, [sample], scheduled=1, elapsed_s=1.0, cpu_s=0.1)
    show_summary(summary, console)
    assert console.file.getvalue().count(HOSTILE) == 6


def test_progress_shows_what_is_being_done():
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    failures = []
    before, threading.excepthook = threading.excepthook, failures.append
    try:
        with Steps(console) as steps:
            steps.tell(HOSTILE, 0.5)
    finally:
        threading.excepthook = before
    assert not failures
    assert HOSTILE in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_one_console_prints():
    ours = [path for folder in ("serve", "loadgen") for path in (ROOT / folder).rglob("*.py")]
    takers = [path.name for path in ours if re.search(r"rich\.console.*Console", path.read_text())]
    assert takers == ["terminal.py"]
