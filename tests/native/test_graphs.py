"""Sampling and gathering: the compiled module against its oracle, and both against the rules."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve import _core, native
from tests.native import oracle

BOTH = pytest.mark.parametrize("core", [_core, oracle], ids=["compiled", "oracle"])
NONE = np.empty(0, np.int64)


def graph(core, num_nodes, edges, patch=None):
    """A topology of edges [2, E], whose rows in `patch` are others."""
    edges = np.asarray(edges, np.int64).reshape(2, -1)
    indptr = np.empty(num_nodes + 1, np.int64)
    indices = np.empty(edges.shape[1], np.int32)
    assert core.build_rows(edges, False, num_nodes, num_nodes, indptr, indices, True) == -1
    patch = patch or {}
    nodes = np.array(sorted(patch), np.int64)
    rows = [patch[node] for node in sorted(patch)]
    starts = np.cumsum([0, *map(len, rows)])
    held = np.array([met for row in rows for met in row], np.int64)
    total = max([num_nodes, *(node + 1 for node in patch)])
    return core.Topology(total, indptr, indices, True, nodes, starts, held)


def read(sample, num_ids):
    nodes, positions = np.empty(sample.num_nodes, np.int64), np.empty(num_ids, np.int64)
    edges, narrow = (np.empty((2, sample.num_edges), kind) for kind in (np.int64, np.int32))
    sample.write_nodes(nodes)
    sample.write_positions(positions)
    sample.write_edges(edges, False)
    sample.write_edges(narrow, True)
    assert (narrow == edges).all()
    return SimpleNamespace(
        nodes=nodes, positions=positions, edges=edges, num_seeds=sample.num_seeds
    )


def sampled(core, topology, ids, fanouts, seed=0):
    ids = np.asarray(ids, np.int64)
    return read(core.sample_neighbours(topology, ids, fanouts, seed), ids.size)


@BOTH
def test_rows_are_by_destination_in_the_order_of_the_edges(core):
    edges = np.array([[3, 1, 0, 2, 1], [0, 2, 0, 0, 2]], np.int32)
    indptr, indices = np.empty(5, np.int64), np.empty(5, np.int32)
    assert core.build_rows(edges, True, 4, 4, indptr, indices, True) == -1
    assert indptr.tolist() == [0, 3, 3, 5, 5]
    assert indices.tolist() == [3, 0, 2, 1, 1]
    assert core.build_rows(edges, True, 3, 3, np.empty(4, np.int64), indices, True) == 0
    with pytest.raises(ValueError, match="indptr"):
        core.build_rows(edges, True, 4, 4, np.empty(4, np.int64), indices, True)


def test_the_first_id_that_is_no_node_is_named():
    with pytest.raises(ValueError, match=r"\[1, 2\] is 9; not in \[0, 9\)"):
        native.build_rows(np.array([[0, 1, 2, 3], [1, 2, 9, -1]]), 9)
    assert native.build_rows(np.empty((2, 0), np.int64), 0)[0].tolist() == [0]


@BOTH
def test_asked_nodes_come_first_and_repeated_ones_once(core):
    topology = graph(core, 6, [[1, 2, 3, 4], [0, 0, 1, 5]])
    found = sampled(core, topology, [5, 0, 5, 2], [-1, -1])
    assert found.nodes[: found.num_seeds].tolist() == [5, 0, 2]
    assert found.positions.tolist() == [0, 1, 0, 2]
    assert sorted(found.nodes.tolist()) == [0, 1, 2, 3, 4, 5]
    ends = found.nodes[found.edges]
    assert sorted(zip(*ends.tolist(), strict=True)) == [(1, 0), (2, 0), (3, 1), (4, 5)]
    assert (np.diff(found.edges[1]) >= 0).all()


@BOTH
def test_each_hop_takes_one_step(core):
    topology = graph(core, 5, [[1, 2, 3, 4], [0, 1, 2, 3]])
    for hops in range(5):
        assert sampled(core, topology, [0], [1] * hops).nodes.tolist() == list(range(hops + 1))


@BOTH
def test_isolated_nodes_no_ids_and_no_hops(core):
    topology = graph(core, 3, [[0], [1]])
    assert sampled(core, topology, [2, 2], [5]).nodes.tolist() == [2]
    assert sampled(core, topology, [], [5]).nodes.size == 0
    assert sampled(core, topology, [1], []).edges.size == 0


@BOTH
@pytest.mark.parametrize(("ids", "fanouts"), [([3], [1]), ([-1], [1]), ([0], [0]), ([0], [-2])])
def test_what_cannot_be_sampled_is_refused(core, ids, fanouts):
    with pytest.raises(ValueError, match=r"not in \[0, 3\)|neither positive nor -1"):
        sampled(core, graph(core, 3, [[0], [1]]), ids, fanouts)


@BOTH
def test_changed_rows_are_read_instead(core):
    topology = graph(core, 3, [[0, 1], [2, 2]], patch={2: [2], 4: [0, 3], 1: []})
    found = sampled(core, topology, [4, 2], [-1, -1])
    ends = found.nodes[found.edges]
    assert list(zip(*ends.tolist(), strict=True)) == [(0, 4), (3, 4), (2, 2)]


@BOTH
def test_topologies_that_do_not_fit_are_refused(core):
    good = np.array([0, 1], np.int64), np.zeros(1, np.int32)
    for num_nodes, indptr, indices in (
        (1, np.array([0, 2]), good[1]),
        (0, *good),
        (1, NONE, good[1]),
    ):
        with pytest.raises(ValueError, match="indptr"):
            core.Topology(num_nodes, indptr, indices, True, NONE, np.zeros(1, np.int64), NONE)
    with pytest.raises(ValueError, match="patched"):
        core.Topology(1, *good, True, np.array([0]), np.zeros(1, np.int64), NONE)


@st.composite
def cases(draw):
    num_nodes = draw(st.integers(1, 60))
    num_edges = draw(st.integers(0, 400))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    # A hub, so that rows are longer and shorter than the fan-outs.
    edges = rng.integers(0, num_nodes, (2, num_edges))
    edges[1, : num_edges // 3] = 0
    patch = {
        int(node): rng.integers(0, num_nodes, rng.integers(0, 9)).tolist()
        for node in rng.choice(num_nodes + 3, rng.integers(0, 5))
    }
    ids = rng.integers(0, num_nodes, draw(st.integers(0, 12)))
    fanouts = draw(st.lists(st.sampled_from([-1, 1, 2, 5, 40, 100]), max_size=3))
    return num_nodes, edges, patch, ids, fanouts, draw(st.integers(0, 2**64 - 1))


@pytest.mark.skipif(_core is None, reason="not built")
@given(cases())
@settings(max_examples=100)
def test_compiled_and_oracle_draw_the_same(case):
    num_nodes, edges, patch, ids, fanouts, seed = case
    found, expected = (
        sampled(core, graph(core, num_nodes, edges, patch), ids, fanouts, seed)
        for core in (_core, oracle)
    )
    assert found.nodes.tolist() == expected.nodes.tolist()
    assert found.edges.tolist() == expected.edges.tolist()
    assert found.positions.tolist() == expected.positions.tolist()
    assert found.num_seeds == expected.num_seeds


@given(cases())
@settings(max_examples=100)
def test_a_sample_holds_what_was_asked_for(case):
    num_nodes, edges, _, ids, fanouts, seed = case
    indptr, indices = native.build_rows(edges, num_nodes)
    found = sampled(native, graph(_core, num_nodes, edges), ids, fanouts, seed)
    assert len(set(found.nodes.tolist())) == found.nodes.size
    assert (found.nodes[found.positions] == ids).all()
    hop_of = np.full(found.nodes.size, 0)
    for source, end in found.edges.T:
        if source >= found.num_seeds and hop_of[source] == 0:
            hop_of[source] = hop_of[end] + 1
    into = np.bincount(found.edges[1], minlength=found.nodes.size)
    for local, node in enumerate(found.nodes):
        row = indices[indptr[node] : indptr[node + 1]].tolist()
        drawn = found.nodes[found.edges[0][found.edges[1] == local]].tolist()
        for met in set(drawn):
            assert drawn.count(met) <= row.count(met), "drawn without replacement"
        hop = hop_of[local]
        fanout = fanouts[hop] if hop < len(fanouts) else 0
        assert into[local] == (len(row) if fanout == -1 else min(fanout, len(row)))


def test_draws_are_uniform():
    """Every neighbour about equally often: within 5 standard deviations of a fair draw."""
    degree, fanout, draws = 20, 6, 4000
    edges = np.stack([np.arange(1, degree + 1), np.zeros(degree, np.int64)])
    topology = graph(_core, degree + 1, edges)
    counts = np.zeros(degree + 1)
    for seed in range(draws):
        counts[sampled(native, topology, [0], [fanout], seed).nodes[1:]] += 1
    share = fanout / degree
    spread = np.sqrt(draws * share * (1 - share))
    assert (np.abs(counts[1:] - draws * share) < 5 * spread).all()


@BOTH
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8])
def test_rows_are_gathered_and_widened(core, dtype):
    rng = np.random.default_rng(0)
    rows = (rng.random((50, 7)) * 200).astype(dtype)
    patched = np.array([3, 60], np.int64)
    patched_rows = rng.random((2, 7)).astype(np.float32)
    ids = np.array([49, 3, 0, 60, 3, 12])
    target = np.empty((6, 7), np.float32)
    core.gather_rows(rows, rows.dtype.name, 7, patched, patched_rows, ids, target)
    expected = np.stack([rows[49], patched_rows[0], rows[0], patched_rows[1], patched_rows[0],
                         rows[12]]).astype(np.float32)  # fmt: skip
    assert (target == expected).all()


@BOTH
def test_rows_that_are_not_there_and_sizes_that_do_not_fit(core):
    rows, none = np.zeros((4, 3), np.float32), np.empty((0, 3), np.float32)
    target = np.empty((1, 3), np.float32)
    for bad in (4, -1):
        with pytest.raises(ValueError, match="has no row"):
            core.gather_rows(rows, "float32", 3, NONE, none, np.array([bad]), target)
    with pytest.raises(ValueError, match="row"):
        core.gather_rows(rows, "float32", 3, NONE, none, np.array([0, 1]), target)
    with pytest.raises(ValueError, match="float64"):
        core.gather_rows(rows, "float64", 3, NONE, none, np.array([0]), target)


def test_a_width_of_which_eight_rows_count_as_few_elements_in_64_bits():
    ids, eight, width = np.arange(8), np.zeros(8, np.float32), 2**61 + 1
    for patched, patched_rows in ((ids, eight), (NONE, eight[:0])):
        with pytest.raises(ValueError, match="does not have one row"):
            _core.gather_rows(b"", "float32", width, patched, patched_rows, ids, eight)


def test_threads_sample_one_topology_alike():
    rng = np.random.default_rng(0)
    topology = graph(_core, 1000, rng.integers(0, 1000, (2, 20_000)))
    ids, results = np.arange(500), {}

    def work(index):
        results[index] = sampled(native, topology, ids, [10, 10], 5).edges

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((results[index] == results[0]).all() for index in range(4))
