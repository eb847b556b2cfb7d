"""What a server reads of a graph whose edges are shared out."""

import numpy as np
import pytest

from serve.errors import ConfigError
from serve.graphs import edge_parts
from serve.graphs.load import OpenOptions, open_graph
from serve.graphs.partition import held_edges, hottest
from serve.graphs.sharing import Parting

NODES, EDGES, PARTS = 50, 300, 5


class Held:
    """Stands for the other servers of part 1; keeps what is held for them."""

    part = 1
    changes = None

    def hold(self, column, edges=None):
        self.column, self.edges = column, edges


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder of arrays, whose edges are read some at a time."""
    monkeypatch.setattr(edge_parts, "_AT_ONCE", 7)
    rng = np.random.default_rng(0)
    graph = tmp_path / "graph"
    graph.mkdir()
    np.save(graph / "edge_index.npy", rng.integers(0, NODES, (2, EDGES)))
    np.save(graph / "x.npy", rng.standard_normal((NODES, 64)).astype(np.float32))
    np.save(tmp_path / "parts.npy", np.arange(NODES) % PARTS)
    return tmp_path


def opened(folder, source, hot=0.0, **options):
    parting = Parting(folder / "parts.npy", hot, source, with_edges=True)
    options = OpenOptions(map_above_bytes=0, parting=parting, **options)
    return open_graph("g", folder / "graph", options, lambda step, share: None)


def test_a_server_holds_the_rows_of_its_part_and_of_hot_nodes(folder):
    whole = open_graph("g", folder / "graph", OpenOptions(), lambda step, share: None).snapshot
    degrees = np.bincount(whole.edges()[0], minlength=NODES)
    hot = np.argsort(-degrees, kind="stable")[: NODES // 10]
    here = np.unique(np.concatenate([np.arange(1, NODES, PARTS), hot]))
    source = Held()
    held = opened(folder, source, hot=0.1).snapshot
    mine = whole.in_edges.neighbours(here).values
    for nodes in (here, np.arange(NODES)):
        np.testing.assert_array_equal(held.in_edges.neighbours(nodes).values, mine)
    assert held.num_edges == EDGES
    assert source.edges is held.in_edges
    np.testing.assert_array_equal(source.column.rows_here(here), whole.features(here))


@pytest.mark.parametrize("hot", [0.0, 0.1, 1.0])
def test_how_many_edges_a_server_holds_is_known_from_the_file(folder, hot):
    whole = open_graph("g", folder / "graph", OpenOptions(), lambda step, share: None).snapshot
    edges, parts = np.load(folder / "graph" / "edge_index.npy"), np.load(folder / "parts.npy")
    held = held_edges(whole, parts, hottest(whole, hot))
    assert edge_parts.most_held(edges, parts, hot) == held.max()
    mine = opened(folder, Held(), hot=hot).snapshot.in_edges
    assert held[1] == mine.neighbours(np.arange(NODES)).values.size


def test_five_servers_hold_a_graph_of_four_times_the_memory_of_each(folder):
    whole = open_graph("g", folder / "graph", OpenOptions(), lambda step, share: None).snapshot
    assert 4 * opened(folder, Held()).snapshot.held_bytes < whole.held_bytes


def test_servers_that_read_other_edges_know_it(folder):
    digests = set()
    for change in (0, 1):
        edges = np.load(folder / "graph" / "edge_index.npy")
        edges[0, -1] = change
        np.save(folder / "graph" / "edge_index.npy", edges)
        digests |= {opened(folder, Held()).snapshot.column.of_rows.files for _ in range(2)}
    assert len(digests) == 2


def test_edges_that_cannot_be_shared_out_are_refused(folder):
    with pytest.raises(ConfigError, match="graph 'g': undirected: edges that are shared out"):
        opened(folder, Held(), undirected=True)
    edges = np.load(folder / "graph" / "edge_index.npy")
    edges[1, 40] = NODES
    np.save(folder / "graph" / "edge_index.npy", edges)
    with pytest.raises(
        ConfigError, match=rf"'edge_index' \[1, 40\] is {NODES}; not in \[0, {NODES}\)"
    ):
        opened(folder, Held())


def test_servers_that_made_other_changes_know_it(folder):
    column = opened(folder, Held()).snapshot.column
    edges, none = np.array([[1], [2]]), np.empty((2, 0), np.int64)
    made = [(edges, none), (none, edges), (edges[:, 0], edges[:, :0]), (edges, edges)]
    digests = [column.noted(*change).of_rows.changes for change in made]
    assert len(set(digests)) == len(made)
    assert column.noted(edges.copy(), none).of_rows.changes == digests[0]
    assert column.noted(none, none) is column
