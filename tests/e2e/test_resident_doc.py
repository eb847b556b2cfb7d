"""What docs/resident-graphs.md tells a reader to do, done in order against a real server."""

import re
import subprocess
import sys

import pytest

from serve.config import load_config
from tests.harness import ROOT, ServerProcess

PAGE = (ROOT / "docs" / "resident-graphs.md").read_text()
_FENCE = re.compile(r"(<!-- run: alone -->\n)?^```(\w+)\n(.*?)^```$", re.M | re.S)
_TIMEOUT_S = 120.0


def blocks(kind):
    return [text for _, language, text in _FENCE.findall(PAGE) if language == kind]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    graphs = ({"name": "community", "dataset": "community"},)
    with ServerProcess(tmp_path_factory.mktemp("resident_doc"), graphs=graphs) as running:
        yield running


def test_its_python_runs(server, tmp_path):
    printed = ""
    for text in blocks("python"):
        done = subprocess.run(
            [sys.executable, "-c", text.replace("127.0.0.1:8001", server.target)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stderr}"
        printed += done.stdout
    assert "(3, 5)" in printed
    assert "2 2001" in printed, "the version and nodes after the change"
    assert (tmp_path / "mine.safetensors").exists()


def test_its_configuration_is_one(tmp_path):
    (text,) = blocks("toml")
    path = tmp_path / "gnnserve.toml"
    path.write_text(text)
    (graph,) = load_config(path).graph
    assert (graph.name, graph.memory_map) == ("cora", "auto")


def test_its_command_serves_the_graph_it_names():
    (command,) = [line for text in blocks("sh") for line in text.splitlines()]
    assert command == "gnnserve serve --config configs/dev.toml"
    (graph,) = load_config(ROOT / "configs" / "dev.toml").graph
    assert (graph.name, graph.dataset) == ("community", "community")
