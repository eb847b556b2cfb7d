"""docs/load.md: its commands send a load and simulate one."""

import json
import re

import msgspec
import pytest
import torch
from torch_geometric.data import Data

from serve.native import front_lacks
from serve.recording import RecordedRequest, RecordingHeader
from tests.docs.pages import texts
from tests.e2e.support import run_python

PAGE = "docs/load.md"
#: Of generated graphs, which otherwise take seconds to make.
SMALL = "--scale 0.01 --max-nodes 300"


def lines(mark):
    return [line for text in texts(PAGE, "sh", mark) for line in text.splitlines()]


@pytest.mark.parametrize("command", [*lines("server"), *lines("native")])
def test_loads_run(command, server, tmp_path):
    if "--native" in command and front_lacks():
        pytest.skip(front_lacks())
    text = command.replace("127.0.0.1:8001", server.target)
    text = re.sub(r"--duration \d+", f"--duration 2 {SMALL}", text)
    assert run_python(["-m", "serve", *text.split()[1:]], tmp_path)


@pytest.mark.parametrize("command", lines("data"))
def test_graphs_of_files_are_sent(command, server, tmp_path):
    links = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graphs = [Data(x=torch.rand(nodes, 32), edge_index=links) for nodes in (3, 9)]
    torch.save(graphs, tmp_path / "molecules.pt")
    text = command.replace("127.0.0.1:8001", server.target).replace("20", "2 --json")
    seen = json.loads(run_python(["-m", "serve", *text.split()[1:]], tmp_path))
    assert seen["by_status"].keys() == {"OK"}, seen["messages"]
    assert seen["trace"]["sources"] == {"molecules": "file molecules.pt, 2 graphs"}


@pytest.mark.parametrize("command", lines("limit"))
def test_searches_run(command, server, tmp_path):
    text = command.replace("127.0.0.1:8001", server.target).replace("'", "")
    # Whether anything is late says little on a machine that does other work.
    text = re.sub(r"late-by-server>1%", "failed>99%", text)
    text = re.sub(r"--duration \d+", f"--requests 3 {SMALL}", text)
    assert "requests/s" in run_python(["-m", "serve", *text.split()[1:]], tmp_path)


@pytest.mark.parametrize("command", lines("replay"))
def test_recordings_are_sent_and_simulated(command, server, tmp_path):
    rows = [
        RecordingHeader(started_unix_ns=0),
        *(RecordedRequest(at_ns=at_ns, model="gcn", nodes=20, edges=31) for at_ns in range(9)),
    ]
    text = "".join(msgspec.json.encode(row).decode() + "\n" for row in rows)
    (tmp_path / "requests.jsonl").write_text(text)
    command = command.replace("127.0.0.1:8001", server.target)
    assert run_python(["-m", "serve", *command.split()[1:]], tmp_path)


@pytest.mark.parametrize("command", lines("simulate"))
def test_simulations_run(command, tmp_path):
    asked = [*command.split()[1:], "--requests", "100", *SMALL.split()]
    assert run_python(["-m", "serve", *asked], tmp_path)
