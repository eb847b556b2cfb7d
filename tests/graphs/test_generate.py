import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve.graphs.generate import both_directions, generate_edges


def undirected(edges):
    return {(int(a), int(b)) for a, b in edges.T}


@settings(max_examples=60)
@example(nodes=42, share=0.001953125, seed=42)  # no node gets an edge end at first
@given(nodes=st.integers(1, 60), share=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_exact_count_symmetric_no_loops_sorted(nodes, share, seed):
    wanted = int(share * nodes * (nodes - 1))
    edges = generate_edges(nodes, wanted, np.random.default_rng(seed))
    pairs = undirected(edges)
    assert edges.dtype == np.int32
    assert edges.shape == (2, wanted - wanted % 2)
    assert len(pairs) == edges.shape[1]
    assert all(a != b and (b, a) in pairs for a, b in pairs)
    assert all(0 <= a < nodes for a, _ in pairs)
    assert (np.diff(edges[0]) >= 0).all()


def test_same_seed_same_graph():
    first, again, other = (
        generate_edges(500, 3000, np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_degrees_are_heavy_tailed():
    edges = generate_edges(20_000, 200_000, np.random.default_rng(0))
    degrees = np.bincount(edges[0], minlength=20_000)
    # A random graph of this mean has its largest degree near 27 and its median at 10.
    assert degrees.max() > 200
    assert np.median(degrees) < 0.75 * degrees.mean()
    top = np.sort(degrees)[-200:].sum() / degrees.sum()
    assert top > 0.08


def test_reverses_of_edges_whose_ids_have_32_bits():
    count = 70_000
    edges = np.array([[69_999, 0, 69_998], [69_998, 69_997, 69_998]], np.int32)
    found = both_directions(edges[0], edges[1], count)
    assert undirected(found) == {
        (69_999, 69_998), (69_998, 69_999), (0, 69_997), (69_997, 0)
    }  # fmt: skip


def test_too_many_edges_are_refused():
    with pytest.raises(ValueError, match="4 nodes cannot have 14 directed edges"):
        generate_edges(4, 14, np.random.default_rng(0))
