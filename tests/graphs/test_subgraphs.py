import numpy as np
import pytest

from serve.errors import ConfigError
from serve.graphs.datasets import load_dataset
from serve.graphs.pool import GraphPool
from serve.graphs.subgraphs import subgraphs
from serve.workload import GraphRef, PoolSpec


@pytest.fixture(scope="module")
def artist():
    return load_dataset("artist", scale=0.05)


def components(num_nodes, edges):
    parent = list(range(num_nodes))

    def root(v):
        while parent[v] != v:
            parent[v] = v = parent[parent[v]]
        return v

    for a, b in edges.T.tolist():
        parent[root(a)] = root(b)
    return len({root(v) for v in range(num_nodes)})


def test_sizes_are_log_spaced_over_the_whole_range(artist):
    sizes = [graph.num_nodes for graph in subgraphs(artist, max_nodes=1600)]
    assert len(sizes) == 25
    assert (sizes[0], sizes[12], sizes[24]) == (100, 400, 1600)


def test_edges_are_exactly_those_between_the_nodes(artist):
    graph = subgraphs(artist, 3, min_nodes=50, max_nodes=60)[1]
    all_edges = set(map(tuple, artist.edge_index.T.tolist()))
    chosen = set(graph.nodes.tolist())
    expected = {(a, b) for a, b in all_edges if a in chosen and b in chosen}
    assert set(map(tuple, graph.nodes[graph.edge_index].T.tolist())) == expected
    assert graph.num_edges == len(expected)


def test_subgraphs_of_a_connected_graph_are_connected(artist):
    whole = components(artist.num_nodes, artist.edge_index)
    for graph in subgraphs(artist, 6, max_nodes=800):
        assert components(graph.num_nodes, graph.edge_index) <= whole


def test_seeded(artist):
    first, again, other = (subgraphs(artist, 4, seed=seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a.nodes, b.nodes) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0].nodes, other[0].nodes)


def test_max_edges_cuts_back_to_the_nodes_found_first(artist):
    free = subgraphs(artist, 5)
    bound = subgraphs(artist, 5, max_edges=5_000)
    for whole, part in zip(free, bound, strict=True):
        assert part.num_edges <= 5_000
        assert np.array_equal(part.nodes, whole.nodes[: part.num_nodes])
        if part.num_nodes < whole.num_nodes:
            kept = part.num_nodes + 1
            assert (whole.edge_index.max(axis=0) < kept).sum() > 5_000


def test_no_larger_than_the_dataset(tmp_path):
    np.savez(tmp_path / "tiny.npz", num_nodes=5, edge_index=[[0, 2], [1, 3]])
    pool = subgraphs(load_dataset("tiny", folder=tmp_path), 3)
    assert [graph.num_nodes for graph in pool] == [5, 5, 5]
    assert {graph.num_edges for graph in pool} == {4}


def test_pool_finds_graphs_by_reference():
    spec = PoolSpec(datasets=("pubmed", "artist"), count=4, scale=0.05, max_nodes=300)
    pool = GraphPool(spec)
    assert len(pool.refs) == 8
    for ref in pool.refs:
        assert pool.edges(ref).shape == (2, ref.num_edges)
    assert pool.sources["artist"] == "generated, scale 0.05, seed 0"
    assert GraphPool(spec).refs == pool.refs


def test_pool_makes_random_graphs():
    pool = GraphPool(PoolSpec(datasets=()))
    ref = GraphRef("random", 7, 50, 200)
    assert pool.edges(ref).shape == (2, 200)
    assert np.array_equal(pool.edges(ref), pool.edges(ref))
    assert pool.edges(GraphRef("random", 7, 1, 0)).shape == (2, 0)


def test_pool_refuses_a_graph_that_is_not_the_one_meant():
    pool = GraphPool(PoolSpec(datasets=("pubmed",), count=2, scale=0.05, max_nodes=200))
    ref = pool.refs[0]
    with pytest.raises(ConfigError, match=r"another scale, seed or folder"):
        pool.edges(GraphRef("pubmed", 0, ref.num_nodes, ref.num_edges + 2))
    with pytest.raises(ConfigError, match=r"pubmed/2 is not in the pool"):
        pool.edges(GraphRef("pubmed", 2, 100, 100))
    with pytest.raises(ConfigError, match=r"cora/0 is not in the pool"):
        pool.edges(GraphRef("cora", 0, 100, 100))
