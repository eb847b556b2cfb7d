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
