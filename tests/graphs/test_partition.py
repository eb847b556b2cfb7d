"""Parts of a graph, and what requests fetch from other parts, counted as by hand."""

import json
import sys

import numpy as np
import pytest

from serve.commands.partition_graph import partition_graph
from serve.errors import ConfigError
from serve.graphs.load import GraphParts, OpenOptions, held
from serve.graphs.partition import cut_share, fetches, held_edges, hottest, imbalance, partition
from tests.e2e.support import run_python

#: Two cliques of eight with one edge between them, 7 to 8.
CLIQUES = [
    (a, b) for low in (0, 8) for a in range(low, low + 8) for b in range(low, low + 8) if a != b
]
EDGES = np.array([*CLIQUES, (7, 8), (8, 7)]).T


def opened(edges, num_nodes):
    parts = GraphParts(num_nodes, edges, np.zeros((num_nodes, 2), np.float32), "made")
    return held("made", parts, OpenOptions(), lambda step, share: None).snapshot


@pytest.fixture(scope="module")
def cliques():
    return opened(EDGES, 16)


def test_metis_cuts_where_few_edges_are(cliques):
    pytest.importorskip("pymetis", reason="METIS is not installed: pip install 'gnnserve[cluster]'")
    parts = partition(cliques, 2, "metis")
    assert parts.dtype == np.uint16
    assert len(set(parts[:8])) == len(set(parts[8:])) == 1
    assert cut_share(cliques, parts) == 2 / EDGES.shape[1]
    assert imbalance(parts, 2) == 1
    np.testing.assert_array_equal(parts, partition(cliques, 2, "metis"))


def test_random_parts_are_even_and_repeatable(cliques):
    parts = partition(cliques, 3, "random")
    assert sorted(np.bincount(parts)) == [5, 5, 6]
    assert imbalance(parts, 3) == pytest.approx(6 * 3 / 16)
    np.testing.assert_array_equal(parts, partition(cliques, 3, "random"))


def test_what_is_fetched_is_what_other_parts_have(cliques):
    parts = np.repeat([0, 1], 8).astype(np.uint16)
    hot = np.zeros(16, bool)
    # All 8 of the clique, and of the other one node 8.
    one = fetches(cliques, parts, hot, [np.array([7])], [-1])
    assert (one.nodes, one.asked, one.rounds) == (9, 1, 0)
    assert one.remote_share == one.cold_remote_share == 1 / 9
    hot[8] = True
    assert fetches(cliques, parts, hot, [np.array([7])], [-1]).cold_remote_share == 0
    # The second of three hops draws for node 8, and so does the third for others of its clique.
    for marked, rounds in ((hot, 1), (np.zeros(16, bool), 2)):
        assert fetches(cliques, parts, marked, [np.array([7])], [-1, -1, -1]).rounds == rounds
    # A request is where most of its ids are; one whose nodes are all there asks nobody.
    most = fetches(cliques, parts, hot, [np.array([9, 10, 0]), np.array([1])], [-1])
    assert most.nodes == (16 + 8) / 2
    assert most.remote_share == 8 / 24
    assert most.asked == 0.5


def test_a_part_holds_the_in_edges_of_its_nodes_and_of_hot_ones(cliques):
    parts = np.repeat([0, 1], [8, 8]).astype(np.uint16)
    hot = np.zeros(16, bool)
    assert held_edges(cliques, parts, hot).tolist() == [57, 57]
    hot[8] = True
    assert held_edges(cliques, parts, hot).tolist() == [57 + 8, 57]


def test_the_hottest_nodes_are_in_neighbours_of_most():
    star = np.array([(3, other) for other in range(8) if other != 3]).T
    np.testing.assert_array_equal(np.flatnonzero(hottest(opened(star, 8), 1 / 8)), [3])
    assert not hottest(opened(star, 8), 0).any()


@pytest.mark.parametrize("count", [0, 17])
def test_impossible_numbers_of_parts_are_refused(cliques, count):
    with pytest.raises(ConfigError, match=f"parts: {count}, of a graph of 16 nodes 1 to 16"):
        partition(cliques, count, "random")


def test_an_unknown_method_is_refused(cliques):
    with pytest.raises(ConfigError, match="method 'best' is not one of metis, random"):
        partition(cliques, 2, "best")


def test_without_metis_it_says_what_to_install(cliques, monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ConfigError, match=r"pip install 'gnnserve\[cluster\]'"):
        partition(cliques, 2, "metis")


def test_the_command_tells_and_writes_the_parts(tmp_path):
    np.savez(tmp_path / "made.npz", num_nodes=16, edge_index=EDGES, x=np.zeros((16, 2), np.float32))
    command = [
        "-m",
        "serve",
        "graph",
        "partition",
        "made.npz",
        "--parts",
        "2",
        "--method",
        "random",
    ]
    said = json.loads(run_python([*command, "--out", "parts.npy", "--json"], tmp_path))
    parts = np.load(tmp_path / "parts.npy")
    assert (parts.shape, parts.dtype) == ((16,), np.uint16)
    sources, targets = EDGES
    assert said["cut_share"] == pytest.approx(np.mean(parts[sources] != parts[targets]))
    assert [row["ids"] for row in said["requests"]] == [1, 64]
    assert said["requests"][0]["remote_bytes"] == pytest.approx(
        said["requests"][0]["nodes"] * said["requests"][0]["remote_share"] * 8
    )
    assert "16 nodes and 114 edges in 2 parts" in run_python(command, tmp_path)


@pytest.mark.parametrize(
    ("out", "fanouts", "told"),
    [
        ("none/parts.npy", "10", "--out .*none/parts.npy: a file in a folder that is there"),
        (".", "10", "--out .*: a file in a folder that is there"),
        ("x" * 254, "10", "--out .*x: cannot be written: File name too long"),
        ("parts.npy", f"10,{1 << 40}", "--fanouts '10,1099511627776': numbers of neighbours"),
    ],
)
def test_what_cannot_be_written_or_asked_for_is_told(tmp_path, out, fanouts, told):
    np.savez(tmp_path / "made.npz", num_nodes=16, edge_index=EDGES, x=np.zeros((16, 2), np.float32))
    with pytest.raises(ConfigError, match=told):
        partition_graph(
            tmp_path / "made.npz", 2, "random", fanouts, 0.0, tmp_path / out, lambda *_: None
        )
    assert [file.name for file in tmp_path.iterdir()] == ["made.npz"]
