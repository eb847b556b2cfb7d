"""What docs/resident-graphs.md tells a reader to do, done in order against a real server."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from bench.kit.servers import ROOT, ServerProcess
from serve.config import load_config
from serve.graphs.load import OpenOptions, open_graph
from serve.models.community import community_graph
from tests.docs.pages import blocks, texts
from tests.e2e.support import run_python

PAGE = "docs/resident-graphs.md"


def at(server, text):
    """A block as arguments, asking this server."""
    return ["-c", text.replace("127.0.0.1:8001", server.target)]


def test_its_python_runs(server, tmp_path):
    shown = [block.text for block in blocks(PAGE, "python") if block.mark in ("server", "alone")]
    printed = "".join(run_python(at(server, text), tmp_path) for text in shown)
    assert "(3, 5)" in printed
    assert "2 2001" in printed, "the version and nodes after the change"
    (command,) = texts(PAGE, "sh", "import")
    said = run_python(["-m", "serve", *command.split()[1:]], tmp_path)
    (tmp_path / "found.toml").write_text(said)
    (graph,) = load_config(tmp_path / "found.toml").graph
    found = open_graph(graph.name, tmp_path / graph.file, OpenOptions(), lambda *_: None)
    assert (graph.name, found.snapshot.num_nodes) == ("mine", 4)


def test_its_configuration_is_one(tmp_path):
    (text,) = texts(PAGE, "toml", "config")
    path = tmp_path / "gnnserve.toml"
    path.write_text(text)
    (graph,) = load_config(path).graph
    assert (graph.name, graph.memory_map) == ("cora", "auto")


def test_its_command_serves_the_graph_it_names():
    (text,) = texts(PAGE, "sh", "dev")
    assert text.strip() == "gnnserve serve --config configs/dev.toml"
    (graph,) = load_config(ROOT / "configs" / "dev.toml").graph
    assert (graph.name, graph.dataset) == ("community", "community")


@pytest.mark.slow
def test_cora_is_trained_served_and_asked(tmp_path):
    """Cora itself where it is at hand, else as small a graph with classes, under its name."""
    cora = Path(os.environ.get("GNNSERVE_DATA", "")) / "cora.npz"
    if cora.is_file():
        shutil.copy(cora, tmp_path)
    else:
        made = community_graph()
        np.savez(
            tmp_path / "cora.npz",
            num_nodes=len(made.y), edge_index=made.edge_index, x=made.x, y=made.y,
        )  # fmt: skip
    (commands,) = texts(PAGE, "sh", "cora")
    train, serve = commands.splitlines()
    assert serve == "gnnserve serve --config cora.toml"
    run_python(train.split()[1:], tmp_path)
    (text,) = texts(PAGE, "toml", "cora")
    (tmp_path / "cora.toml").write_text(text)
    config = load_config(tmp_path / "cora.toml")
    assert (config.models.repository, config.graph[0].name) == ("models", "cora")
    graphs = ({"name": "cora", "file": str(tmp_path / "cora.npz")},)
    with ServerProcess(tmp_path, repository=tmp_path / "models", graphs=graphs) as server:
        (text,) = texts(PAGE, "python", "cora")
        said = run_python(at(server, text), tmp_path)
    assert int(said.partition("%")[0]) > 70, said


@pytest.mark.slow
def test_a_graph_with_several_types_is_trained_written_served_and_asked(tmp_path):
    for block in blocks(PAGE, "python"):
        kind, _, name = block.mark.partition("=")
        if kind == "file":
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    (commands,) = texts(PAGE, "sh", "typed")
    train, serve = commands.splitlines()
    assert (train, serve) == (
        "PYTHONPATH=models/fields python train.py",
        "gnnserve serve --config academic.toml",
    )
    run_python(["train.py"], tmp_path, tmp_path / "models" / "fields")
    (text,) = texts(PAGE, "toml", "typed")
    (tmp_path / "academic.toml").write_text(text)
    config = load_config(tmp_path / "academic.toml")
    (graph,) = config.graph
    assert (config.models.repository, graph.name) == ("models", "academic")
    graphs = ({"name": "academic", "file": str(tmp_path / graph.file)},)
    with ServerProcess(tmp_path, repository=tmp_path / "models", graphs=graphs) as server:
        asked, changed = texts(PAGE, "python", "typed")
        said = run_python(at(server, asked), tmp_path)
        assert int(said.partition("%")[0]) > 60, said
        assert "2 {'author': 1601, 'paper': 2000" in run_python(at(server, changed), tmp_path)
