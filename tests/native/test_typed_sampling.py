"""Sampling along several relations: the compiled module against its oracle, and the rules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve import _core, native
from tests.native import oracle
from tests.native.test_graphs import BOTH, graph, sampled


def relation(core, num_sources, num_targets, edges, patch=None):
    """Rows of edges [2, E] between two types, of which those in `patch` are others."""
    edges = np.asarray(edges, np.int64).reshape(2, -1)
    indptr, indices = np.empty(num_targets + 1, np.int64), np.empty(edges.shape[1], np.int64)
    assert core.build_rows(edges, False, num_sources, num_targets, indptr, indices, False) == -1
    nodes = np.array(sorted(patch or {}), np.int64)
    rows = [patch[node] for node in sorted(patch or {})]
    starts = np.cumsum([0, *map(len, rows)])
    held = np.array([met for row in rows for met in row], np.int64)
    return core.Topology(num_targets, indptr, indices, False, nodes, starts, held)


def read(found, num_types, num_relations, num_ids):
    """Everything in a sample, as lists."""
    nodes, edges, positions = [], [], np.empty(num_ids, np.int64)
    for kind in range(num_types):
        nodes.append(np.empty(found.num_nodes(kind), np.int64))
        found.write_nodes(kind, nodes[-1])
    for at in range(num_relations):
        narrow, wide = (np.empty((2, found.num_edges(at)), kind) for kind in (np.int32, np.int64))
        found.write_edges(at, narrow, True)
        found.write_edges(at, wide, False)
        assert (narrow == wide).all()
        edges.append(wide)
    found.write_positions(positions)
    return [one.tolist() for one in nodes], [one.tolist() for one in edges], positions.tolist()


@st.composite
def cases(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_nodes = [int(rng.integers(1, 40)) for _ in range(draw(st.integers(1, 4)))]
    ends, made = [], []
    for _ in range(draw(st.integers(0, 5))):
        source, target = rng.integers(0, len(num_nodes), 2).tolist()
        count = int(rng.integers(0, 200))
        bounds = [[num_nodes[source]], [num_nodes[target]]]
        edges = rng.integers(0, bounds, (2, count))
        # A hub, so that rows are longer and shorter than the fan-outs.
        edges[1, : count // 3] = 0
        patch = {
            int(node): rng.integers(0, num_nodes[source], rng.integers(0, 9)).tolist()
            for node in rng.integers(0, num_nodes[target], rng.integers(0, 4))
        }
        ends.append((source, target))
        made.append((num_nodes[source], num_nodes[target], edges, patch))
    kind = int(rng.integers(0, len(num_nodes)))
    ids = rng.integers(0, num_nodes[kind], draw(st.integers(0, 9)))
    hops = draw(st.integers(0, 3)) if ends else 0
    fanouts = rng.choice([-1, 0, 1, 2, 5, 40], hops * len(ends)).tolist()
    keys = rng.permutation(len(ends)).tolist()
    return num_nodes, made, ends, keys, kind, ids, fanouts, draw(st.integers(0, 2**64 - 1))


@given(cases())
@settings(max_examples=150)
def test_compiled_and_oracle_draw_the_same(case):
    num_nodes, made, ends, keys, kind, ids, fanouts, seed = case
    found, expected = (
        read(
            core.sample_typed(
                [relation(core, *one) for one in made],
                ends, keys, num_nodes, kind, ids, fanouts, seed,
            ),
            len(num_nodes), len(ends), ids.size,
        )
        for core in (_core, oracle)
    )  # fmt: skip
    assert found == expected


@given(cases())
@settings(max_examples=100)
def test_a_sample_holds_what_was_asked_for(case):
    """Every edge is one of the graph's, and each node draws its share when it is first reached."""
    num_nodes, made, ends, keys, kind, ids, fanouts, seed = case
    made = [(*one[:3], {}) for one in made]
    rows = [relation(_core, *one) for one in made]
    found = native.sample_typed(rows, ends, keys, num_nodes, kind, ids, fanouts, seed)
    nodes, edges, positions = read(found, len(num_nodes), len(ends), ids.size)
    assert [nodes[kind][position] for position in positions] == ids.tolist()
    # Who was reached at which hop follows from the edges alone.
    hop_of = [dict.fromkeys(range(found.num_seeds), 0) if k == kind else {}
              for k in range(len(num_nodes))]  # fmt: skip
    for hop in range(len(fanouts) // max(1, len(ends))):
        reached = [dict(known) for known in hop_of]
        for at, (source, target) in enumerate(ends):
            fanout = fanouts[hop * len(ends) + at]
            whole = made[at][2]
            for local, when in hop_of[target].items():
                if when != hop:
                    continue
                node = nodes[target][local]
                row = whole[0][whole[1] == node].tolist()
                met = [s for s, d in zip(*edges[at], strict=True) if d == local]
                drawn = [nodes[source][s] for s in met]
                assert len(drawn) == (len(row) if fanout == -1 else min(fanout, len(row)))
                for one in drawn:
                    assert drawn.count(one) <= row.count(one), "drawn without replacement"
                for s in met:
                    reached[source].setdefault(s, hop + 1)
        hop_of = reached
    assert [len(known) for known in hop_of] == [len(of_type) for of_type in nodes]


@BOTH
def test_one_type_and_one_relation_are_sampled_as_ever(core):
    rng = np.random.default_rng(0)
    edges, ids = rng.integers(0, 50, (2, 900)), rng.integers(0, 50, 7)
    topology = graph(core, 50, edges)
    plain = sampled(core, topology, ids, [3, 2], seed=5)
    typed = core.sample_typed([topology], [(0, 0)], [0], [50], 0, ids, [3, 2], 5)
    nodes, ends, positions = read(typed, 1, 1, 7)
    assert nodes[0] == plain.nodes.tolist()
    assert ends[0] == plain.edges.tolist()
    assert positions == plain.positions.tolist()


@BOTH
def test_relations_into_one_type_draw_apart(core):
    edges = [[*range(40)], [0] * 40]
    rows = [relation(core, 40, 1, edges) for _ in range(2)]
    found = core.sample_typed(rows, [(1, 0)] * 2, [0, 1], [1, 40], 0, np.zeros(1, int), [5, 5], 3)
    nodes, ends, _ = read(found, 2, 2, 1)
    first, second = ([nodes[1][s] for s in sources] for sources, _ in ends)
    assert set(first) != set(second)


def test_what_does_not_fit_is_refused():
    row, ids = relation(_core, 3, 2, [[2], [1]]), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="not None"):
        _core.sample_typed([None], [(0, 1)], [0], [3, 2], 0, ids, [1], 0)
    for ends, keys, kind, fanouts, told in (
        ([(0, 2)], [0], 0, [1], "types that are none"),
        ([(0, 1)], [0], 2, [1], "the type is none"),
        ([(0, 1)], [], 0, [1], "not of one length"),
        ([(0, 1)], [0], 0, [-2], "fan-out -2"),
    ):
        with pytest.raises(ValueError, match=told):
            native.sample_typed([row], ends, keys, [3, 2], kind, ids, fanouts, 0)
    with pytest.raises(ValueError, match=r"id 2 is not in \[0, 2\)"):
        native.sample_typed([row], [(0, 1)], [0], [3, 2], 1, ids + 2, [1], 0)
    with pytest.raises(ValueError, match="one for each relation and hop"):
        native.sample_typed([row] * 2, [(0, 1)] * 2, [0, 1], [3, 2], 1, ids, [1, 1, 1], 0)
    found = native.sample_typed([], [], [], [3], 0, ids, [], 0)
    assert found.num_nodes(0) == 1
    with pytest.raises(IndexError):
        found.num_nodes(1)


def test_sources_and_destinations_have_bounds_of_their_own():
    starts, values = native.build_rows(np.array([[4, 0], [1, 1]]), 2, 5)
    assert (starts.tolist(), values.tolist()) == ([0, 0, 2], [4, 0])
    with pytest.raises(ValueError, match=r"\[0, 0\] is 4; not in \[0, 4\)"):
        native.build_rows(np.array([[4, 0], [1, 1]]), 2, 4)
    with pytest.raises(ValueError, match=r"\[1, 1\] is 2; not in \[0, 2\)"):
        native.build_rows(np.array([[4, 0], [1, 2]]), 2, 5)
