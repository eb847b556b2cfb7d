"""`gnnserve graph import`: graphs as PyG saves them become files that servers open."""

import os
import re
import tomllib

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from serve.graphs.load import OpenOptions, open_graph
from serve.lane.graph_importing import convert
from tests.cli.test_import import gnnserve


def told(text):
    """Return what was printed, whatever lines it was wrapped into."""
    return re.sub(r"\s+", " ", text)


@pytest.fixture
def data():
    edges = torch.tensor([[0, 1, 2, 2], [1, 2, 3, 0]])
    return Data(x=torch.rand(4, 3), edge_index=edges, y=torch.arange(4), train_mask=torch.ones(4))


@pytest.fixture
def hetero():
    data = HeteroData()
    data["author"].x = torch.rand(3, 2)
    data["paper"].x = torch.rand(5, 4, dtype=torch.float64)
    data["paper"].year = torch.arange(5)
    data["paper"].y = torch.arange(5)
    data["venue"].num_nodes = 2
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 2, 2], [4, 0, 1]])
    data["author", "writes", "paper"].edge_attr = torch.rand(3, 2)
    data["paper", "at", "venue"].edge_index = torch.tensor([[0, 1], [1, 1]], dtype=torch.int32)
    return data


def opened_graph(path):
    return open_graph("g", path, OpenOptions(), lambda *_: None)


def opened(path):
    return opened_graph(path).snapshot


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_data_becomes_a_graph_with_one_type(data, suffix, tmp_path, monkeypatch, capfd):
    torch.save(data, tmp_path / "g.pt")
    out = () if suffix == ".safetensors" else ("--out", f"g{suffix}")
    assert gnnserve(monkeypatch, tmp_path, "graph", "import", "g.pt", *out) == 0
    seen = capfd.readouterr()
    assert "left out, as graphs do not hold it: train_mask" in told(seen.err)
    assert ", y" not in told(seen.err)
    assert "4 nodes, 4 edges" in told(seen.err)
    assert tomllib.loads(seen.out) == {"graph": [{"name": "g", "file": f"g{suffix}"}]}
    found = opened(tmp_path / f"g{suffix}")
    assert (found.num_nodes, found.num_edges) == (4, 4)
    rows = np.empty((4, 3), np.float32)
    found.gather(np.arange(4), rows)
    np.testing.assert_array_equal(rows, data.x.numpy())
    np.testing.assert_array_equal(opened_graph(tmp_path / f"g{suffix}").labels, data.y.numpy())
    # What is there is not overwritten.
    assert gnnserve(monkeypatch, tmp_path, "graph", "import", "g.pt", *out) == 2
    assert "exists; remove it" in told(capfd.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "held"),
    [
        (torch.tensor([[2], [0], [1], [-1]]), [2, 0, 1, -1]),
        (torch.rand(4), None),
        (torch.ones(4, 3, dtype=torch.int64), None),
        (torch.tensor([7]), None),
    ],
    ids=["[N, 1]", "numbers", "[N, 3]", "of the graph"],
)
def test_labels_are_kept_where_each_node_has_a_class(labels, held, data, tmp_path):
    data.y = labels
    torch.save(data, tmp_path / "g.pt")
    notes = convert(tmp_path / "g.pt", tmp_path / "g.safetensors")
    found = opened_graph(tmp_path / "g.safetensors").labels
    if held is None:
        assert found is None
        assert notes == ("left out, as graphs do not hold it: train_mask, y",)
    else:
        assert found.tolist() == held


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_hetero_data_becomes_a_graph_with_several(hetero, suffix, tmp_path, monkeypatch, capfd):
    torch.save(hetero, tmp_path / "g.pt")
    command = "graph", "import", "g.pt", "--out", f"other{suffix}"
    assert gnnserve(monkeypatch, tmp_path, *command) == 0
    seen = capfd.readouterr()
    assert "edge_attr.author__writes__paper, y.paper" in told(seen.err)
    assert tomllib.loads(seen.out)["graph"][0]["name"] == "other"
    found = opened(tmp_path / f"other{suffix}")
    assert {of: table.num_nodes for of, table in found.nodes.items()} == {
        "author": 3, "paper": 5, "venue": 2,
    }  # fmt: skip
    assert set(found.nodes["paper"].columns) == {"x", "year"}
    assert {of: edges.num_edges for of, edges in found.edges.items()} == {
        "author__writes__paper": 3, "paper__at__venue": 2,
    }  # fmt: skip


class Harmful:
    def __reduce__(self):
        return os.system, ("touch ran",)


def broken(data, case):
    """Return a graph that cannot be held, or what is none."""
    if case == "code":
        data.x = Harmful()
    if case == "no features":
        del data.x
    if case == "far edge":
        data.edge_index = torch.tensor([[0], [9]])
    if case == "dots":
        data = HeteroData()
        data["a.b"].x = torch.rand(2, 2)
    if case == "state":
        return torch.nn.Linear(2, 2).state_dict()
    if case == "several":
        return data, {"x": torch.tensor([0, 2, 4])}, Data
    return data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("code", "it holds 'posix.system', which would be code to run; nothing was loaded"),
        ("no features", "the graph has no tensor 'x'"),
        ("far edge", "g.pt: array 'edge_index'"),
        ("dots", "the type 'a.b' has '.', '__' or '/' in its name"),
        ("state", "it holds a OrderedDict; a Data or HeteroData of PyG is wanted"),
        ("several", "it holds several graphs; save one"),
    ],
)
def test_what_is_no_graph_is_refused_and_leaves_nothing(
    data, case, message, tmp_path, monkeypatch, capfd
):
    torch.save(broken(data, case), tmp_path / "g.pt")
    assert gnnserve(monkeypatch, tmp_path, "graph", "import", "g.pt") == 2
    assert message in told(capfd.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["g.pt"]


@pytest.mark.slow
def test_the_file_of_a_dataset_with_one_graph_is_read(data, tmp_path, monkeypatch, capfd):
    torch.save((data.to_dict(), None, Data), tmp_path / "data.pt")
    assert gnnserve(monkeypatch, tmp_path, "graph", "import", "data.pt") == 0
    assert opened(tmp_path / "data.safetensors").num_nodes == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("g.pt", "--out", "g.txt"), "ends in .safetensors or .npz"),
        (("g.pt", "--out", "nowhere/g.npz"), "nowhere: no such folder"),
    ],
)
def test_mistakes_are_told_before_anything_is_read(
    arguments, message, tmp_path, monkeypatch, capfd
):
    assert gnnserve(monkeypatch, tmp_path, "graph", "import", *arguments) == 2
    assert message in told(capfd.readouterr().err)
