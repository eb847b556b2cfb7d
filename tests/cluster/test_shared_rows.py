"""Features that several servers share out: the same to the bit, and what happens without one."""

import threading

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

zmq = pytest.importorskip("zmq", reason="ZeroMQ is not installed: pip install 'gnnserve[cluster]'")

from bench.kit.waiting import PATIENCE_S, wait_for  # noqa: E402
from serve.cluster import row_store, row_wire, wanted_rows  # noqa: E402
from serve.cluster.row_wire import Keys, RowsGiven  # noqa: E402
from serve.cluster.shared_rows import SharedRows  # noqa: E402
from serve.cluster.stores_file import read_stores  # noqa: E402
from serve.errors import ConfigError, NotReady  # noqa: E402
from serve.graphs.load import OpenOptions  # noqa: E402
from serve.graphs.sharing import Parting  # noqa: E402
from serve.graphs.updates import Change  # noqa: E402
from tests.cluster.sharing import NODES, PATIENT_MS, cluster, opened, parts_of_graph  # noqa: E402

ALL = np.arange(NODES)
KEY = "a-key-of-the-servers"


@pytest.fixture(scope="module", params=[2, 3, 5])
def servers(request, tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("servers"), request.param) as found:
        yield found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    ids=st.lists(st.integers(0, NODES - 1), min_size=1, max_size=20),
    fanouts=st.lists(st.sampled_from([-1, 1, 2, 5]), min_size=1, max_size=3),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_server_samples_and_gathers_what_one_of_all_does(servers, ids, fanouts, seed):
    ids = np.array(ids, np.int64)
    found = [sampled(graph.snapshot, ids, fanouts, seed) for graph in servers.graphs]
    nodes, edges, features = sampled(servers.whole.snapshot, ids, fanouts, seed)
    for its_nodes, its_edges, its_features in found:
        np.testing.assert_array_equal(its_nodes, nodes)
        np.testing.assert_array_equal(its_edges, edges)
        assert its_features.tobytes() == features.tobytes()


def sampled(snapshot, ids, fanouts, seed):
    sample = snapshot.sample(ids, fanouts, seed)
    nodes, edges = np.empty(sample.num_nodes, np.int64), np.empty((2, sample.num_edges), np.int64)
    sample.write_nodes(nodes)
    sample.write_edges(edges, False)
    return nodes, edges, snapshot.features(nodes)


@pytest.mark.parametrize(("kind", "dtype"), [(np.float32, "float16"), (np.uint8, "float32")])
def test_features_travel_as_they_are_stored(tmp_path, kind, dtype):
    with cluster(tmp_path, 2, dtype=dtype, graph=parts_of_graph(kind=kind)) as two:
        held = two.graphs[0].snapshot
        assert held.x.dtype.itemsize < 4
        np.testing.assert_array_equal(held.features(ALL), two.whole.snapshot.features(ALL))
        there = np.count_nonzero(two.parts == 1)
        assert two.rows[0].counts["bytes"] == two.rows[1].given["bytes"]
        assert two.rows[0].counts["bytes"] == there * held.x.shape[1] * held.x.dtype.itemsize


def test_a_server_holds_its_part_and_what_is_hot(tmp_path):
    with cluster(tmp_path, 3, hot=0.1) as three:
        held = three.graphs[0].snapshot
        hot = NODES // 10
        mine = np.count_nonzero(three.parts == 0)
        assert mine <= len(held.x) <= mine + hot
        degrees = np.bincount(three.whole.snapshot.edges()[0], minlength=NODES)
        hottest = np.argsort(-degrees, kind="stable")[:hot]
        held.features(hottest)
        assert three.rows[0].counts["got"] == 0
        np.testing.assert_array_equal(held.features(ALL), three.whole.snapshot.features(ALL))
        assert three.rows[0].counts["got"] == 1


def test_rows_of_more_than_one_message_are_asked_for_piece_by_piece(servers, monkeypatch):
    monkeypatch.setattr(wanted_rows, "PIECE_BYTES", 3 * 5 * 4)
    before = [rows.given["given"] for rows in servers.rows]
    found = servers.graphs[0].snapshot.features(ALL)
    np.testing.assert_array_equal(found, servers.whole.snapshot.features(ALL))
    for part, rows in enumerate(servers.rows[1:], start=1):
        there = np.count_nonzero(servers.parts == part)
        assert rows.given["given"] - before[part] == -(-there // 3)


def test_many_requests_at_once_each_get_their_own_rows(servers):
    wrong, whole = [], servers.whole.snapshot

    def ask(seed):
        rng = np.random.default_rng(seed)
        for _ in range(20):
            nodes = rng.integers(0, NODES, 30)
            graph = servers.graphs[seed % len(servers.graphs)]
            if (graph.snapshot.features(nodes) != whole.features(nodes)).any():
                wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not wrong
    assert all(rows.counts["lost"] == 0 for rows in servers.rows)


def test_without_a_server_requests_that_need_it_fail_at_once_and_name_it(tmp_path):
    with cluster(tmp_path, 3) as three:
        held = three.graphs[0].snapshot
        held.features(ALL)
        three.rows[2].close()
        lost = r"graph 'made': no server gave features of part 2: "
        # Who ends is not waited for, as who is silent would be.
        with pytest.raises(NotReady, match=lost + f"{three.addresses[2]} ended the connection"):
            held.features(ALL)
        others = np.flatnonzero(three.parts != 2)
        expected = three.whole.snapshot.features(others)
        np.testing.assert_array_equal(held.features(others), expected)
        assert three.rows[0].counts["lost"] == 1


def test_a_server_that_comes_back_is_asked_again(tmp_path):
    with cluster(tmp_path, 2) as two:
        held = two.graphs[0].snapshot
        held.features(ALL)
        two.rows[1].close()
        with pytest.raises(NotReady):
            held.features(ALL)
        two.rows[1] = SharedRows(1, two.addresses[1], tmp_path / "stores", None, PATIENT_MS)
        parting = Parting(tmp_path / "parts.npy", 0.0, two.rows[1])
        opened(parts_of_graph(), OpenOptions(parting=parting))
        np.testing.assert_array_equal(held.features(ALL), two.whole.snapshot.features(ALL))


def test_with_a_replica_no_request_fails(tmp_path):
    with cluster(tmp_path, 2, replicas=2) as four:
        held, expected = four.graphs[0].snapshot, four.whole.snapshot.features(ALL)
        for _ in range(4):
            held.features(ALL)
        four.rows[1].close()
        for _ in range(20):
            np.testing.assert_array_equal(held.features(ALL), expected)
        assert four.rows[0].counts["lost"] == 0
        assert four.rows[3].given["given"] >= 20


def test_a_server_that_is_silent_is_waited_for_no_longer_than_configured(tmp_path):
    with (
        cluster(tmp_path, 2, patience_ms=80) as two,
        SocketThatSays(two, 1, []),
        pytest.raises(NotReady, match=r"(did not answer|could not be reached) in time"),
    ):
        two.graphs[0].snapshot.features(ALL)


def rows_given(number):
    return msgspec.msgpack.encode(RowsGiven(number, "float32"))


#: The number asked for depends on which server could be reached first.
TOO_SHORT = [[rows_given(number), b"short"] for number in (1, 2)]


#: A dtype that is no UTF-8, and lists in lists.
NO_TEXT, TOO_DEEP = b"\x93\x01\xa1\xff\xa0", b"\x95\x01\xa0\xa0\xc2" + b"\x91" * 5000


@pytest.mark.parametrize(
    "said", [[[b""]], [[b"junk", b""]], TOO_SHORT, [[NO_TEXT, b""]], [[TOO_DEEP, b""]]]
)
def test_a_broken_server_harms_only_requests_that_need_it(tmp_path, said):
    with cluster(tmp_path, 3) as three, SocketThatSays(three, 1, said):
        with pytest.raises(NotReady, match=r"part 1: 127\.0\.0\.1:\d+ sent "):
            three.graphs[0].snapshot.features(ALL)
        others = np.flatnonzero(three.parts != 1)
        three.graphs[0].snapshot.features(others)


class SocketThatSays:
    """Takes the place of a server: sends the messages to whoever asks."""

    def __init__(self, servers, number, messages):
        servers.rows[number].close()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(f"tcp://{servers.addresses[number]}")
        self._messages = messages
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while True:
            try:
                identity, *_ = self._socket.recv_multipart()
            except zmq.ZMQError:
                return
            if identity == b"end":
                return
            for frames in self._messages:
                self._socket.send_multipart([identity, *frames])

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        end = self._context.socket(zmq.DEALER)
        end.identity = b"end"
        end.connect(self._socket.last_endpoint)
        end.send(b"")
        self._thread.join(PATIENCE_S)
        self._context.destroy(linger=0)


def test_only_servers_with_the_key_are_heard(tmp_path):
    key = tmp_path / "key"
    key.write_text(KEY)
    with cluster(tmp_path, 2, key=key) as two:
        found = two.graphs[0].snapshot.features(ALL)
        np.testing.assert_array_equal(found, two.whole.snapshot.features(ALL))
        with zmq.Context() as context:
            for keys in (None, Keys.of("another-key-of-servers"), own_keys_but(KEY)):
                asker = context.socket(zmq.DEALER)
                row_wire.secure(asker, keys, listens=False)
                if keys is not None:
                    asker.curve_serverkey = Keys.of(KEY).public
                asker.connect(f"tcp://{two.addresses[1]}")
                asker.send_multipart([b"", b""])
                assert not asker.poll(200)
                asker.close(0)
        assert two.rows[1].given["refused"] == 0
        two.graphs[0].snapshot.features(ALL)


def own_keys_but(shared):
    """Return a pair of keys that is another than the servers', who know theirs."""
    public, secret = zmq.curve_keypair()
    assert public != Keys.of(shared).public
    return Keys(public, secret)


def test_whatever_is_sent_the_server_goes_on(tmp_path):
    with cluster(tmp_path, 2) as two, zmq.Context() as context:
        asker = context.socket(zmq.DEALER)
        asker.connect(f"tcp://{two.addresses[1]}")
        odd = [b"\x94\x01\xa1g\xc4\x00\x00", b"odd"]
        deep = [b"\x97\x01\xa1g\xc4\x00\xc4\x00\x00\x00" + b"\x91" * 5000, b""]
        for frames in ([b""], [b"junk", b""], [b"\x90", b""], odd, deep):
            asker.send_multipart(frames)
        wait_for(lambda: two.rows[1].given["refused"] == 5, "all to be refused")
        asker.close(0)
        two.graphs[0].snapshot.features(ALL)


def test_servers_of_other_graphs_are_told_apart(tmp_path):
    with cluster(tmp_path, 2) as two:
        parting = Parting(tmp_path / "parts.npy", 0.0, two.rows[1])
        other = parts_of_graph()
        other.edge_index[0, 0] ^= 1
        opened(other, OpenOptions(parting=parting))
        with pytest.raises(NotReady, match="holds another graph 'made', or other parts of it"):
            two.graphs[0].snapshot.features(ALL)


def changed(graph, change):
    """Make the change as a server does; return the version that requests see from then on."""
    return graph.update(change, accept=lambda new: new.publish())


FEATURE = st.integers(-3, 300).map(float)
ROW = st.lists(FEATURE, min_size=5, max_size=5)


@st.composite
def changes(draw):
    """Draw changes, each for the graph as the ones before leave it."""
    found, count = [], NODES
    for _ in range(draw(st.integers(1, 4))):
        add = draw(st.lists(ROW, max_size=4))
        ids = draw(st.lists(st.integers(0, count - 1), max_size=6, unique=True))
        rows = draw(st.lists(ROW, min_size=len(ids), max_size=len(ids)))
        count += len(add)
        ends = draw(st.lists(st.tuples(*[st.integers(0, count - 1)] * 2), max_size=5))
        found.append(
            Change(
                add_x=np.array(add, np.float32) if add else None,
                set_ids=np.array(ids, np.int64),
                set_x=np.array(rows, np.float32).reshape(-1, 5) if ids else None,
                add_edges=np.array(ends, np.int64).reshape(-1, 2).T,
            )
        )
    return found


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8, deadline=None
)
@given(made=changes(), count=st.sampled_from([2, 3]), kind=st.sampled_from([np.float32, np.uint8]))
def test_changes_leave_every_server_with_what_one_of_all_has(tmp_path, made, count, kind):
    with cluster(tmp_path, count, hot=0.1, graph=parts_of_graph(kind=kind)) as servers:
        before = [graph.snapshot for graph in servers.graphs]
        first = servers.whole.snapshot.features(ALL)
        for change in made:
            whole = changed(servers.whole, change)
            for graph in servers.graphs:
                changed(graph, change)
            nodes = np.arange(whole.num_nodes)
            for graph in servers.graphs:
                assert graph.snapshot.features(nodes).tobytes() == whole.features(nodes).tobytes()
                np.testing.assert_array_equal(graph.snapshot.edges(), whole.edges())
        # A request that began before sees the version that it began with, on all servers.
        for snapshot in before:
            assert snapshot.features(ALL).tobytes() == first.tobytes()


def test_a_server_that_has_yet_to_make_a_change_is_waited_for(tmp_path):
    change = Change(set_ids=ALL, set_x=np.ones((NODES, 5), np.float32))
    with cluster(tmp_path, 2) as two:
        changed(two.graphs[0], change)
        found = []
        ask = threading.Thread(target=lambda: found.append(two.graphs[0].snapshot.features(ALL)))
        ask.start()
        wait_for(lambda: two.rows[1].given["late"], "the request to wait for the change")
        assert not found
        changed(two.graphs[1], change)
        ask.join(PATIENCE_S)
        np.testing.assert_array_equal(found[0], 1)
        assert two.rows[0].counts["lost"] == 0


def test_requests_among_changes_each_see_one_version_on_all_servers(tmp_path):
    """Each change gives every node the number of the change, on one server after the other."""
    with cluster(tmp_path, 3) as three:
        ended, mixed, newest = threading.Event(), [], [0] * 3

        def ask(number):
            while not ended.is_set():
                found = three.graphs[number].snapshot.features(ALL)
                if np.unique(found).size != 1:
                    mixed.append(found)
                newest[number] = found[0, 0]

        first = Change(set_ids=ALL, set_x=np.zeros((NODES, 5), np.float32))
        for graph in three.graphs:
            changed(graph, first)
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        rng = np.random.default_rng(0)
        try:
            for value in range(1, 40):
                change = Change(set_ids=ALL, set_x=np.full((NODES, 5), value, np.float32))
                for number in rng.permutation(3):
                    changed(three.graphs[number], change)
            wait_for(lambda: newest == [39] * 3, "all servers to see the last change")
        finally:
            ended.set()
            for thread in threads:
                thread.join(PATIENCE_S)
        assert not mixed
        assert all(rows.counts["lost"] == 0 for rows in three.rows)


def test_servers_that_made_other_changes_are_not_mixed(tmp_path):
    with cluster(tmp_path, 2, patience_ms=500) as two:
        for value, graph in enumerate(two.graphs):
            changed(graph, Change(set_ids=ALL, set_x=np.full((NODES, 5), value, np.float32)))
        with pytest.raises(NotReady, match=f"{two.addresses[1]} has not made the same changes"):
            two.graphs[0].snapshot.features(ALL)


def check_only_the_newest_is_given(two, old):
    """Make two changes on both servers; then nobody gives features of the version `old`."""
    for value in range(2):
        change = Change(set_ids=ALL, set_x=np.full((NODES, 5), value, np.float32))
        for graph in two.graphs:
            changed(graph, change)
    with pytest.raises(NotReady, match="has not made the same changes"):
        old.features(ALL)
    np.testing.assert_array_equal(two.graphs[0].snapshot.features(ALL), 1)


def test_versions_are_given_for_a_while_after_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(row_store, "_KEPT_S", 0.0)
    with cluster(tmp_path, 2, patience_ms=500) as two:
        old = two.graphs[0].snapshot
        check_only_the_newest_is_given(two, old)


def test_versions_take_no_more_memory_than_they_may(tmp_path, monkeypatch):
    monkeypatch.setattr(row_store, "_KEPT_BYTES", 0)
    with cluster(tmp_path, 2, patience_ms=500) as two:
        old = two.graphs[0].snapshot
        # Each of these changes has all rows of its own, more than a quarter of the newest.
        check_only_the_newest_is_given(two, old)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("127.0.0.1:1", "stores:1: expected host:port and the number of a part"),
        ("# none", "0 servers, expected 1 to 256"),
        ("a:1 0\na:1 1", "stores:2: a:1 is named twice"),
    ],
)
def test_a_wrong_file_of_servers_is_refused(tmp_path, content, told):
    file = tmp_path / "stores"
    file.write_text(content)
    with pytest.raises(ConfigError, match=told):
        read_stores(file)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (np.zeros(3, np.int64), r"parts \[3\] for a graph of 60 nodes"),
        (np.full(NODES, -1), "it has -1"),
        (np.zeros(NODES), "integers"),
        (np.zeros(NODES, np.int64), r"cluster\.rows\.part is 1, and .* has parts 0 to 0"),
    ],
)
def test_wrong_parts_are_refused(tmp_path, parts, told):
    with cluster(tmp_path, 2) as two:
        np.save(tmp_path / "wrong.npy", parts)
        parting = Parting(tmp_path / "wrong.npy", 0.0, two.rows[1])
        with pytest.raises(ConfigError, match=told):
            opened(parts_of_graph(), OpenOptions(parting=parting))
