"""docs/serve-your-own-model.md does what it says, block after block in an empty folder."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from torch_geometric.nn import SAGEConv

from bench.kit.servers import ROOT, SHORT_CALIBRATIONS, ServerProcess
from serve.client import Client
from serve.config import load_config
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.models.loader import load_model
from serve.models.declaration import interface_of
from serve.models.model_config import read_settings
from serve.models.repository import find
from serve.models.wrappers import wrapper
from tests.docs.pages import blocks
from tests.e2e.support import run_python

PAGE = "docs/serve-your-own-model.md"


def run(block, folder, environment):
    """Run a shell block as a reader would; return what it printed."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block.text}\n{done.stdout}"
    return done.stdout


@pytest.fixture
def environment(tmp_path):
    """A shell with this checkout's `gnnserve` and this Python, whatever is installed."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, arguments in (("gnnserve", "-m serve "), ("python", "")):
        tool = tools / name
        tool.write_text(
            f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{ROOT}"\n'
            f'exec "{sys.executable}" {arguments}"$@"\n'
        )
        tool.chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    return os.environ | SHORT_CALIBRATIONS | {"PATH": path, "PYTHONPATH": ""}


def accuracy(printed):
    """The last accuracy told."""
    return float(re.findall(r"test accuracy (0\.\d\d)", printed)[-1])


def test_blocks_run_in_order(tmp_path, environment):
    folder = tmp_path / "empty"
    folder.mkdir()
    printed = ""
    for block in blocks(PAGE):
        kind, _, value = block.mark.partition("=")
        if kind == "file":
            path = folder / value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif kind == "alone":
            printed += run(block, folder, environment)
    assert accuracy(printed) > 0.9
    signature = probe_signature(load_model(find(folder / "models", "mine")))
    assert (signature.num_features, signature.num_outputs, signature.rows) == (32, 5, "node")

    (serve,) = blocks(PAGE, "sh", "server")
    assert serve.text.strip() == "gnnserve serve --config gnnserve.toml"
    repository = folder / load_config(folder / "gnnserve.toml").models.repository
    with ServerProcess(tmp_path, repository=repository) as server:

        def ask(mark):
            (block,) = blocks(PAGE, "python", mark)
            return run_python(["-c", block.text.replace("127.0.0.1:8001", server.target)], tmp_path)

        assert accuracy(ask("server")) > 0.9
        shutil.copytree(repository / "mine" / "1", repository / "mine" / "2")
        ask("load")
        with Client(server.target) as client:
            assert client.ready("mine", "2")


class OfNeighbourhoods(torch.nn.Module):
    """As in PyG's examples of its NeighborSampler."""

    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(4, 8), SAGEConv(8, 3)])

    def forward(self, x, adjs):
        for conv, (edge_index, _, size) in zip(self.convs, adjs, strict=True):
            x = conv((x, x[: size[1]]), edge_index)
        return x


class OfMatrix(OfNeighbourhoods):
    """Passes a matrix on to layers, and computes with it."""

    def forward(self, x, adj_t):
        for conv in self.convs:
            x = conv(x, adj_t)
        return adj_t @ x


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(("name", "model"), [("adjs", OfNeighbourhoods), ("adj_t", OfMatrix)])
def test_a_forward_without_edge_index_is_served_by_the_class_shown(name, model):
    (block,) = blocks(PAGE, "python", f"forward={name}")
    assert block.text in wrapper("net.py:Net", "forward", ("x", name))
    names = {"Net": model}
    exec(block.text, names)
    served = names["Served"]().eval()
    x, edge_index = torch.rand(5, 4), torch.tensor([[0, 1, 2, 3, 3, 4], [1, 2, 0, 0, 4, 1]])
    expected = x
    for conv in served.convs:
        expected = conv(expected, edge_index)
    if model is OfMatrix:
        expected = torch.zeros(5, 3).index_add_(0, edge_index[1], expected[edge_index[0]])
    with torch.inference_mode():
        torch.testing.assert_close(served(x, edge_index), expected)


def test_the_declaration_shown_is_of_the_model_described(tmp_path):
    """A relational model, with an attention vector as second output."""
    (block,) = blocks(PAGE, "toml", "declared")
    folder = tmp_path / "relational"
    folder.mkdir()
    (folder / "config.toml").write_text(f'[model]\nfactory = "torch.nn:Linear"\n{block.text}')
    model = read_settings(folder).model
    interface = interface_of(model.input, model.output, PAGE)
    assert list(interface.by_name) == ["x", "edge_index", "edge_type"]
    assert [slot.name for slot in interface.outputs] == ["scores", "attention"]
    assert interface.counts == ("N", "E")
