"""Two real servers that share out a graph: their answers, and what a client hears of a loss."""

import sqlite3
import urllib.request
from contextlib import ExitStack, closing

import numpy as np
import pytest

pytest.importorskip("zmq", reason="ZeroMQ is not installed: pip install 'gnnserve[cluster]'")

from bench.kit.servers import ServerProcess, free_ports
from bench.kit.waiting import PATIENCE_S, eventually, wait_for
from serve.client import Client, InvalidRequest, Unavailable
from serve.cluster.servers_file import write_servers
from serve.models.community import community_graph

pytestmark = pytest.mark.slow

GRAPH = community_graph()


@pytest.fixture(scope="module")
def addresses():
    return [f"127.0.0.1:{port}" for port in free_ports(2)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory, addresses):
    """Yield the servers of parts 0 and 1; the first holds the whole graph too."""
    found = []
    with ExitStack() as stack:
        for part, address in enumerate(addresses):
            folder = tmp_path_factory.mktemp(f"part-{part}")
            edges = GRAPH.edge_index
            np.savez(folder / "own.npz", num_nodes=len(GRAPH.x), edge_index=edges, x=GRAPH.x)
            np.save(folder / "parts.npy", np.arange(len(GRAPH.x)) % 2)
            (folder / "stores").write_text("".join(f"{a} {n}\n" for n, a in enumerate(addresses)))
            (folder / "key").write_text("the-key-of-both-servers")
            rows = {"part": part, "listen": address, "servers_file": "stores", "key_file": "key"}
            # Both may stand still for a while on a busy machine.
            rows["patience_ms"] = 10_000
            graphs = [
                {"name": "shared", "file": "own.npz", "parts": "parts.npy"},
                {"name": "apart", "file": "own.npz", "parts": "parts.npy", "share": "all"},
            ]
            if part == 0:
                graphs.append({"name": "whole", "file": "own.npz"})
            sections = {
                "models": {"load": ["gcn"]},
                "device": {"lanes": 1},
                "cluster": {"name": f"of {part}", "servers_file": "servers"},
                "cluster.rows": rows,
            }
            found.append(ServerProcess(folder, graphs=tuple(graphs), sections=sections))
        for one in found:
            write_servers(one.folder / "servers", [each.target for each in found])
            stack.enter_context(one.starting())
        for one in found:
            one.wait_ready()
        yield found


def test_nodes_are_answered_where_they_live(servers):
    here, there = servers
    rng = np.random.default_rng(0)
    with Client(here.target, timeout_s=PATIENCE_S) as a:
        for name in ("apart", "shared"):
            for seed in range(4):
                ids = rng.integers(0, len(GRAPH.x), 9 + 8 * seed)
                asked = {"graph": name, "node_ids": ids, "fanouts": "all"}
                whole = a.infer("gcn", **asked, split="off")
                assert whole.qos.split_parts == 0
                found = eventually_split(a, 2, **asked, split="home")
                assert found.output.tobytes() == whole.output.tobytes()
                assert (found.qos.node, found.qos.hops) == ("of 0", 0)
        # Of one node alone, whole requests go to where it lives, and stay where they live here.
        for ids, node in (([1, 3], "of 1"), ([0, 2], "of 0")):
            found = eventually_split(a, 1, graph="apart", node_ids=ids, split="home")
            assert found.qos.node == node
        # Each part draws as it would alone.
        ids, options = np.arange(40, 70), {"graph": "apart", "fanouts": [3, 2], "seed": 5}
        found = eventually_split(a, 2, **options, node_ids=ids, split="home").output
        for part in range(2):
            at = np.flatnonzero(ids % 2 == part)
            alone = a.infer("gcn", **options, node_ids=ids[at], split="off").output
            assert found[at].tobytes() == alone.tobytes()
        with pytest.raises(InvalidRequest, match="parameter 'split': 'away' is not one of off"):
            a.infer("gcn", graph="apart", node_ids=[0], split="away")
        qos = eventually_split(a, 2, graph="apart", node_ids=[0, 1, 3], split="home").qos
    (row,) = wait_for(lambda: rows_of(here, "request_uid", qos.request_uid), "the row of the whole")
    assert (row["num_ids"], row["status"]) == (3, "OK")
    assert row["qos_target_ns"] // 1000 == qos.qos_target_us
    # The other server keeps rows of what was passed on to it, and none of parts.
    passed = wait_for(lambda: rows_of(there, "graph", "apart"), "the row of what was passed on")
    assert {row["num_ids"] for row in passed} == {2}


def eventually_split(client, parts, **asked):
    """Return the answer; servers that were silent for a moment are left alone for a second."""
    found = []

    def split():
        found.append(client.infer("gcn", **asked))
        return found[-1].qos.split_parts == parts

    eventually(split)
    return found[-1]


def rows_of(server, column, value):
    """Return the rows of a server's report that have that value, as far as it has written them."""
    with closing(sqlite3.connect(f"file:{server.database}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        asked = f"SELECT * FROM request WHERE {column} = ?"
        return database.execute(asked, (value,)).fetchall()


def test_a_graph_that_is_shared_out_is_served_and_its_loss_told(servers, addresses):
    here, there = servers
    rng = np.random.default_rng(0)
    with Client(here.target, timeout_s=PATIENCE_S) as a, Client(there.target) as b:
        for seed in range(5):
            ids = rng.integers(0, len(GRAPH.x), 1 + 8 * seed)
            asked = {"node_ids": ids, "seed": seed}
            whole = a.infer("gcn", graph="whole", **asked).output
            for client in (a, b):
                found = client.infer("gcn", graph="shared", **asked).output
                assert found.tobytes() == whole.tobytes()
        check_apart(a, b)
        counted = metrics(here)
        assert counted['gnnserve_rows_requests_total{outcome="got"}'] >= 5
        assert counted["gnnserve_rows_wait_seconds_total"] > 0
        assert counted['gnnserve_rows_bytes_total{way="given"}'] > 0
        # A change is sent to one of them, and both make it.
        check_changed(a, (a, b), b, {"set_ids": [0, 1], "set_x": 1 - GRAPH.x[:2]}, 2)
        there.kill()
        with pytest.raises(Unavailable, match=f"part 1: {addresses[1]} ended the connection"):
            a.infer("gcn", graph="shared", node_ids=[0, 1], seed=1, retry=False)
        a.infer("gcn", graph="whole", node_ids=[0, 1], seed=1)
        change = {"set_ids": [2, 3], "set_x": 1 - GRAPH.x[2:4]}
        for name in ("whole", "shared"):
            assert a.update_graph(name, **change).version == 3
        # It makes all changes before it is ready again.
        there.start()
        there.wait_ready()
        assert metrics(there)["gnnserve_rows_changes"] == 3
        check_changed(a, (a, b), b, {"set_ids": [4], "set_x": 1 - GRAPH.x[4:5]}, 4)
        here.kill()
        with pytest.raises(Unavailable, match=f"{addresses[0]}, the sequencer of changes"):
            b.update_graph("shared", **change)


def check_apart(a, b):
    """Have both servers answer by edges that they share out, also after these have changed."""
    edges, count = GRAPH.edge_index, len(GRAPH.x)
    asked = [{"node_ids": np.arange(seed, count, 97), "seed": seed} for seed in range(3)]
    for one in asked:
        whole = a.infer("gcn", graph="whole", **one).output
        for client in (a, b):
            assert client.infer("gcn", graph="apart", **one).output.tobytes() == whole.tobytes()
    end = int(edges[1, 0])
    near = set(edges[0, edges[1] == end].tolist())
    far = next(node for node in range(count) if node not in near)
    for client in (a, b):
        with pytest.raises(InvalidRequest, match=f"there is no edge {far} → {end}"):
            client.update_graph("apart", remove_edges=[[far], [end]])
    found = b.update_graph("apart", remove_edges=[[min(near)], [end]], add_edges=[[far], [end]])
    assert (found.version, found.num_edges) == (2, edges.shape[1])
    given = [
        client.infer("gcn", graph="apart", node_ids=[end], fanouts="all").output.tobytes()
        for client in (a, b)
    ]
    before = a.infer("gcn", graph="whole", node_ids=[end], fanouts="all").output.tobytes()
    assert given[0] == given[1] != before


def check_changed(whole, both, one, change, version):
    """Make a change of the whole graph, and through `one` of the shared; both answer by it."""
    assert whole.update_graph("whole", **change).version == version
    assert one.update_graph("shared", **change).version == version
    asked = {"node_ids": [0, 1, 2, 3, 4], "fanouts": "all"}
    expected = whole.infer("gcn", graph="whole", **asked).output.tobytes()
    for client in both:
        found = client.infer("gcn", graph="shared", **asked)
        assert (found.output.tobytes(), found.qos.graph_version) == (expected, version)


def metrics(server):
    """Return the server's metrics by name and labels."""
    address = f"http://127.0.0.1:{server.http_port}/metrics"
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
    }
