"""Graphs whose edges are shared out: the same samples to the bit, and what happens without one."""

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("zmq", reason="ZeroMQ is not installed: pip install 'gnnserve[cluster]'")

from serve.cluster import row_store, wanted_rows
from serve.cluster.row_wire import RowsGiven
from serve.errors import InvalidInput, NotReady
from serve.graphs.shared_snapshot import SharedSnapshot
from serve.graphs.typed import TypedSnapshot
from serve.graphs.updates import Change
from tests.cluster.sharing import EDGES, NODES, cluster, parts_of_graph, sampled
from tests.cluster.test_shared_rows import SocketThatSays, changed, changes

ALL = np.arange(NODES)
EVERY = [-1, -1]
FANOUTS = st.lists(st.sampled_from([-1, 1, 2, 5]), min_size=1, max_size=3)
IDS = st.lists(st.integers(0, NODES - 1), min_size=1, max_size=20)
SEED = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module", params=[2, 3, 5])
def servers(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    with cluster(folder, request.param, with_edges=True, hot=0.1) as found:
        yield found


def check_same(snapshot, whole, ids, fanouts, seed):
    """Compare nodes, their order, positions of the ids, edges and features with the whole's."""
    ids = np.array(ids, np.int64)
    mine, expected = (prepared(one, ids, fanouts, seed) for one in (snapshot, whole))
    assert mine == expected


def prepared(snapshot, ids, fanouts, seed):
    """Return all that a request gets of a graph, as bytes."""
    return [array.tobytes() for array in sampled(snapshot, ids, fanouts, seed)]


@settings(max_examples=20, deadline=None)
@given(ids=IDS, fanouts=FANOUTS, seed=SEED)
def test_every_server_samples_what_one_of_all_does(servers, ids, fanouts, seed):
    for graph in servers.graphs:
        check_same(graph.snapshot, servers.whole.snapshot, ids, fanouts, seed)


@settings(max_examples=10, deadline=None)
@given(ids=IDS, fanouts=st.lists(st.sampled_from([-1, 0, 2]), min_size=1, max_size=3), seed=SEED)
def test_models_that_declare_their_inputs_get_the_same_too(servers, ids, fanouts, seed):
    (name,) = TypedSnapshot.of(servers.whole.snapshot).edges
    found = []
    for graph in (servers.whole, servers.graphs[0]):
        snapshot = TypedSnapshot.of(graph.snapshot)
        sample = snapshot.sample("", np.array(ids, np.int64), {name: fanouts}, seed)
        edges = np.empty((2, sample.count(name)), np.int64)
        sample.write_edges(name, edges)
        arrays = sample.nodes(""), sample.positions(), edges
        found.append([array.tobytes() for array in arrays])
        assert snapshot.sample("", ALL, {name: fanouts}, seed, rehearse=True).count("") == NODES
    assert found[0] == found[1]


def test_a_server_has_the_edges_of_its_part_alone(tmp_path):
    with cluster(tmp_path, 5, with_edges=True) as five:
        whole = five.whole.snapshot
        for part, graph in enumerate(five.graphs):
            held = graph.snapshot
            assert isinstance(held, SharedSnapshot)
            mine = whole.edges()[:, five.parts[whole.edges()[1]] == part]
            np.testing.assert_array_equal(held.edges(), mine)
            assert (held.num_edges, held.num_nodes) == (EDGES, NODES)
        assert sum(graph.snapshot.base.values.size for graph in five.graphs) == EDGES


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8, deadline=None
)
@given(made=changes(), count=st.sampled_from([2, 3]), gone=st.integers(0, EDGES - 1), seed=SEED)
def test_changes_leave_every_server_with_what_one_of_all_samples(tmp_path, made, count, gone, seed):
    graph = parts_of_graph()
    made = [*made, Change(remove_edges=graph.edge_index[:, gone : gone + 1])]
    with cluster(tmp_path, count, hot=0.1, graph=graph, with_edges=True) as servers:
        before, first = [each.snapshot for each in servers.graphs], servers.whole.snapshot
        for change in made:
            for snapshot in (each.snapshot for each in servers.graphs):
                snapshot.check_removed(change.remove_edges)
            whole = changed(servers.whole, change)
            for each in servers.graphs:
                changed(each, change)
            ids = np.arange(0, whole.num_nodes, 7)
            for each in servers.graphs:
                check_same(each.snapshot, whole, ids, [2, -1], seed)
        # A request that began before sees the version that it began with, on all servers.
        for snapshot in before:
            check_same(snapshot, first, [1, 2], EVERY, seed)


def test_versions_are_told_apart_where_only_edges_changed(tmp_path):
    add = Change(add_edges=np.array([[0], [1]]))
    with cluster(tmp_path, 2, with_edges=True, patience_ms=300) as two:
        changed(two.graphs[0], add)
        with pytest.raises(NotReady, match="has not made the same changes"):
            two.graphs[0].snapshot.sample(ALL, EVERY, 1)
        changed(two.graphs[1], add)
        check_same(two.graphs[0].snapshot, changed(two.whole, add), ALL, EVERY, 1)


def test_an_edge_that_no_server_has_cannot_be_removed(tmp_path):
    with cluster(tmp_path, 2, with_edges=True) as two:
        edges = {tuple(edge) for edge in two.whole.snapshot.edges().T.tolist()}
        for part in range(2):
            end = int(np.flatnonzero(two.parts == part)[0])
            source = next(node for node in range(NODES) if (node, end) not in edges)
            told = rf"'remove_edges' \[:, 0\]: there is no edge {source} → {end}"
            with pytest.raises(InvalidInput, match=told):
                two.graphs[0].snapshot.check_removed(np.array([[source], [end]]))


def test_an_edge_that_another_change_removed_meanwhile_changes_nothing(tmp_path):
    graph = parts_of_graph()
    gone = Change(remove_edges=graph.edge_index[:, :1])
    with cluster(tmp_path, 2, with_edges=True) as two:
        changed(two.whole, gone)
        for each in two.graphs:
            changed(each, gone)
            changed(each, gone)
        for each in two.graphs:
            check_same(each.snapshot, two.whole.snapshot, ALL, EVERY, 3)


def test_draws_of_more_than_a_message_come_piece_by_piece(servers, monkeypatch):
    for module in (wanted_rows, row_store):
        monkeypatch.setattr(module, "PIECE_BYTES", 64)
    before = [rows.given["given"] for rows in servers.rows]
    check_same(servers.graphs[0].snapshot, servers.whole.snapshot, ALL, [-1], 5)
    assert all(
        rows.given["given"] - given > 2
        for rows, given in zip(servers.rows[1:], before[1:], strict=True)
    )


def test_without_a_server_requests_that_need_it_fail_and_name_it(tmp_path):
    with cluster(tmp_path, 3, with_edges=True) as three:
        three.graphs[0].snapshot.sample(ALL, [1], 0)
        three.rows[2].close()
        lost = r"graph 'made': no server drew neighbours for nodes of part 2: "
        with pytest.raises(NotReady, match=lost + f"{three.addresses[2]} ended the connection"):
            three.graphs[0].snapshot.sample(ALL, [1], 0)
        others = np.flatnonzero(three.parts != 2)
        sample = three.graphs[0].snapshot.sample(others, [1], 0)
        assert sample.num_seeds == others.size


def test_with_a_replica_no_request_fails(tmp_path):
    with cluster(tmp_path, 2, replicas=2, with_edges=True) as four:
        held, whole = four.graphs[0].snapshot, four.whole.snapshot
        check_same(held, whole, ALL, EVERY, 1)
        four.rows[1].close()
        for seed in range(10):
            check_same(held, whole, ALL[:9], EVERY, seed)
        assert four.rows[0].counts["lost"] == 0


THERE = 30


def ids_given(lengths, ids, dtype="int32"):
    """Return the answers of a server whose part has `THERE` nodes, for the first two numbers."""
    arrays = np.array(lengths, np.int32).tobytes(), np.array(ids, dtype).tobytes()
    return [[msgspec.msgpack.encode(RowsGiven(n, dtype)), *arrays] for n in (1, 2)]


@pytest.mark.parametrize(
    "said",
    [
        [[b"junk", b"", b""]],
        [frames[:2] for frames in ids_given([0] * THERE, [])],
        ids_given([0] * (THERE + 1), []),
        # More than the fan-out, fewer than none, other sums, ids of no nodes.
        ids_given([3] + [0] * (THERE - 1), [1, 2, 3]),
        ids_given([-1, 1] + [0] * (THERE - 2), []),
        ids_given([1] * THERE, [1] * (THERE - 1)),
        ids_given([1] * THERE, [NODES] * THERE),
        ids_given([1] * THERE, [-1] * THERE, "int64"),
        ids_given([1] * THERE, [1] * THERE, "float32"),
        # Fewer nodes than were asked for, though a message holds more.
        ids_given([1], [1]),
    ],
)
def test_a_broken_server_harms_only_requests_that_need_it(tmp_path, said):
    with cluster(tmp_path, 2, with_edges=True) as two, SocketThatSays(two, 1, said):
        assert np.count_nonzero(two.parts == 1) == THERE
        with pytest.raises(NotReady, match=r"part 1: 127\.0\.0\.1:\d+ sent "):
            two.graphs[0].snapshot.sample(ALL, [2], 0)
        two.graphs[0].snapshot.sample(np.flatnonzero(two.parts == 0), [2], 0)


def test_a_server_refuses_what_it_cannot_draw(tmp_path):
    with cluster(tmp_path, 2, with_edges=True) as two, cluster(tmp_path / "", 2) as other:
        source, column = two.rows[0], two.graphs[0].snapshot.column
        there = np.flatnonzero(two.parts == 1)

        def ask(nodes, fanout, of=column.of_rows):
            parts = np.ones(nodes.size, np.uint16)
            return source.drawn(of, nodes, parts, NODES, fanout, 1)

        for nodes, fanout, told in (
            (np.flatnonzero(two.parts == 0), 1, "holds part 1, and was asked for rows of another"),
            (np.array([NODES]), 1, "holds part 1"),
            (np.array([-1]), 1, "holds part 1"),
            (there[[0, 0]], 1, "or of one twice"),
            (there, -2, "was asked for draws of -2"),
        ):
            with pytest.raises(NotReady, match=told):
                ask(nodes, fanout)
        assert two.rows[1].given["refused"] == 5
        ask(there, 1)
        whole = other.graphs[0].snapshot.column
        with pytest.raises(NotReady, match="has all edges of graph 'made'"):
            other.rows[0].drawn(whole.of_rows, there, np.ones(there.size, np.uint16), NODES, 1, 1)


def test_a_node_with_more_neighbours_than_a_message_holds_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(row_store, "MOST_BYTES", 2 * row_store.PIECE_BYTES + 8)
    with cluster(tmp_path, 2, with_edges=True) as two:
        with pytest.raises(NotReady, match="more than a message holds"):
            two.graphs[0].snapshot.sample(ALL, [-1], 0)
        two.graphs[0].snapshot.sample(ALL, [2], 0)


def test_what_a_sample_may_be_is_known_without_other_servers(tmp_path):
    graph = parts_of_graph(num_nodes=600)
    with cluster(tmp_path, 2, graph=graph, with_edges=True) as two:
        two.rows[1].close()
        held, ids = two.graphs[0].snapshot, np.arange(20)
        found, expected_ns = held.rehearsed(ids, [3, 3], 1)
        sizes = [two.whole.snapshot.sample(ids, [3, 3], seed).num_edges for seed in range(20)]
        assert expected_ns > 0
        assert min(sizes) / 3 < found.num_edges < 3 * max(sizes)
