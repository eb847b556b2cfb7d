"""Requests by node id through a real server: equal to PyG, seeded, and refused with their codes."""

import asyncio
import itertools
import json
import subprocess
import sys
import threading

import grpc
import numpy as np
import pytest
import torch

from bench.kit.servers import ServerProcess
from serve import native
from serve.client import AsyncClient, Client, InvalidRequest, Mismatched, NotFound
from serve.graphs.csr import Rows
from serve.lane.models.loader import load_model
from serve.models.community import community_graph
from serve.models.repository import find
from serve.wire.messages import encode_request
from tests.e2e.support import MODELS, REPOSITORY, assert_equal, raw_channel
from tests.processes import PATIENCE_S

GRAPH = community_graph()
#: With an isolated node at the end.
NUM_NODES = len(GRAPH.x) + 1
X = np.concatenate([GRAPH.x, GRAPH.x[:1]])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resident")
    np.savez(folder / "own.npz", num_nodes=NUM_NODES, edge_index=GRAPH.edge_index, x=X)
    np.savez(folder / "wide.npz", num_nodes=3, edge_index=np.zeros((2, 1), int), x=np.eye(3))
    graphs = (
        {"name": "own", "file": "own.npz"},
        {"name": "wide", "file": "wide.npz"},
        {"name": "community", "dataset": "community"},
    )
    with ServerProcess(folder, discipline="preemptive", policy="slack", graphs=graphs) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with Client(server.target, timeout_s=PATIENCE_S) as found:
        yield found


@pytest.fixture(scope="module")
def models():
    return {name: load_model(find(REPOSITORY, name)) for name in MODELS}


def run(model, x, edge_index):
    inputs = {"x": torch.from_numpy(x), "edge_index": torch.from_numpy(edge_index)}
    return model.run(inputs).numpy()


@pytest.mark.parametrize("name", MODELS)
def test_all_neighbours_give_the_answer_of_the_whole_graph(client, models, name):
    ids = np.array([7, 0, 1999, 7, NUM_NODES - 1])
    answer = client.infer(name, graph="own", node_ids=ids, fanouts="all")
    whole = run(models[name], X, GRAPH.edge_index)
    assert_equal(answer.output, whole[ids])
    assert (answer.qos.graph, answer.qos.graph_version) == ("own", 1)


@pytest.mark.parametrize("name", MODELS)
def test_a_sample_gives_what_pyg_gives_on_it(client, models, name):
    """The sample is found again from the seed in the answer, and run here."""
    ids = np.random.default_rng(0).integers(0, NUM_NODES, 40)
    answer = client.infer(name, graph="own", node_ids=ids, fanouts=[4, 3])
    rows = Rows(*native.build_rows(GRAPH.edge_index, NUM_NODES))
    none = np.empty(0, np.int64)
    topology = native.Topology(
        NUM_NODES, rows.starts, rows.values, True, none, np.zeros(1, np.int64), none
    )
    sample = native.sample_neighbours(topology, ids, [4, 3], answer.qos.seed)
    assert (answer.qos.sampled_nodes, answer.qos.sampled_edges) == (
        sample.num_nodes,
        sample.num_edges,
    )
    nodes, positions = np.empty(sample.num_nodes, np.int64), np.empty(ids.size, np.int64)
    edges = np.empty((2, sample.num_edges), np.int64)
    sample.write_nodes(nodes)
    sample.write_positions(positions)
    sample.write_edges(edges, False)
    assert_equal(answer.output, run(models[name], X[nodes], edges)[positions])


def test_the_command_line_expects_what_is_then_sampled(server, client):
    def estimate(*options, code=0):
        command = [sys.executable, "-m", "serve", "estimate", "sage", "--config", server.config]
        done = subprocess.run([*command, *options], capture_output=True, timeout=PATIENCE_S)
        assert done.returncode == code, done.stderr
        return done.stdout or done.stderr

    said = json.loads(estimate("--graph", "own", "--node-ids", "8", "--json"))
    assert (said["sample"]["num_ids"], said["sample"]["fanouts"]) == (8, [10, 10, 5])
    rng = np.random.default_rng(0)
    seen = [
        client.infer("sage", graph="own", node_ids=rng.integers(0, NUM_NODES - 1, 8)).qos
        for _ in range(15)
    ]
    for name in ("nodes", "edges"):
        found = np.array([getattr(qos, f"sampled_{name}") for qos in seen])
        assert said[f"num_{name}"] == pytest.approx(np.median(found), rel=0.25)
        assert (found <= 1.2 * said["sample"]["size"][f"num_{name}_high"]).all()
    assert said["reserve_bytes"] >= max(qos.pmc_measured_bytes for qos in seen)
    told = client.estimate("sage", graph="own", num_ids=8)
    assert told.num_nodes == pytest.approx(np.median([qos.sampled_nodes for qos in seen]), rel=0.25)
    assert told.reserve_bytes >= max(qos.pmc_measured_bytes for qos in seen)
    fewer = client.estimate("sage", graph="own", num_ids=8, fanouts=[2, 2, 2])
    assert fewer.num_edges < told.num_edges
    with pytest.raises(NotFound, match="wide"):
        client.estimate("sage", graph="x", num_ids=8)
    assert b"1 to 16 numbers" in estimate(
        "--graph", "own", "--node-ids", "8", "--fanouts", "0", code=2
    )
    assert b"which has: own, wide, community" in estimate("--graph", "x", "--node-ids", "8", code=2)
    assert b"give --nodes and --edges, or" in estimate("--graph", "own", code=2)


def test_the_same_seed_gives_the_same_answer_and_another_another(client):
    ids = np.arange(50)
    one, same, other = (
        client.infer("sage", graph="own", node_ids=ids, seed=seed, fanouts=[2, 2, 2])
        for seed in (-5, -5, 6)
    )
    assert (one.output == same.output).all()
    assert (one.output != other.output).any()
    drawn = client.infer("sage", graph="own", node_ids=ids, fanouts=[2, 2, 2])
    again = client.infer("sage", graph="own", node_ids=ids, fanouts=[2, 2, 2], seed=drawn.qos.seed)
    assert (drawn.output == again.output).all()


def test_no_ids_one_id_and_more_ids_than_nodes(client):
    for count in (0, 1, 30_000):
        ids = np.arange(count) % NUM_NODES
        answer = client.infer("gin", graph="own", node_ids=ids)
        assert answer.output.shape == (count, 5)
    assert_equal(answer.output[:NUM_NODES], answer.output[NUM_NODES : 2 * NUM_NODES])


def test_the_demo_graph_is_classified_as_its_models_were_trained(client):
    ids = np.flatnonzero(GRAPH.test_mask)
    answer = client.infer("gcn", graph="community", node_ids=ids, fanouts="all")
    assert (answer.output.argmax(axis=1) == GRAPH.y[ids]).mean() > 0.95


@pytest.mark.parametrize(
    ("kind", "told", "request_"),
    [
        (NotFound, "unknown graph 'mine'; this server holds: own, wide", {"graph": "mine"}),
        (Mismatched, "'wide' has 3 features, model 'gcn' takes 32", {"graph": "wide"}),
        (InvalidRequest, r"'node_ids' \[1\] is -1; it must be in", {"node_ids": [0, -1]}),
        (InvalidRequest, r"\[0\] is 2001; .* nodes of graph 'own'", {"node_ids": [NUM_NODES]}),
        (InvalidRequest, "'fanouts': '3,0'", {"fanouts": [3, 0]}),
        (InvalidRequest, "'fanouts': 'some'", {"fanouts": "some"}),
        (InvalidRequest, "'fanouts'", {"fanouts": [1] * 17}),
        (InvalidRequest, "'graph' .* without", {"node_ids": None}),
        (InvalidRequest, "'node_ids' is given without", {"graph": None}),
    ],
)
def test_what_cannot_be_answered_is_refused_with_its_code(client, kind, told, request_):
    usual = {"graph": "own", "node_ids": [0]}
    with pytest.raises(kind, match=told):
        client.infer("gcn", **(usual | request_))
    assert client.infer("gcn", **usual).output.shape == (1, 5)


def test_ids_as_int32_are_refused(server):
    message = encode_request(
        "gcn", {"node_ids": np.zeros(1, np.int32)}, parameters={"graph": "own"}
    )
    with raw_channel(server) as call, pytest.raises(grpc.RpcError) as caught:
        call(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_request_with_a_time_limit_keeps_it(client):
    with pytest.raises(Exception, match="DEADLINE_EXCEEDED"):
        client.infer("gcn", graph="own", node_ids=np.arange(2000), timeout_s=1e-5)


def test_the_stock_client_asks_by_node_id(server):
    stock = pytest.importorskip("tritonclient.grpc")
    with stock.InferenceServerClient(server.target) as client:
        names = [row.name for row in client.get_model_metadata("gcn").inputs]
        assert "node_ids" in names
        assert "own" in client.get_model_config("gcn").config.parameters["graphs"].string_value
        ids = stock.InferInput("node_ids", [2], "INT64")
        ids.set_data_from_numpy(np.array([3, 1]))
        answer = client.infer("gcn", [ids], parameters={"graph": "own"})
        assert answer.as_numpy("output").shape == (2, 5)


def test_a_graph_that_does_not_fit_stops_the_start(tmp_path):
    np.savez(tmp_path / "g.npz", num_nodes=9, edge_index=np.zeros((2, 0), int), x=np.eye(9) / 3)
    graphs = ({"name": "g", "file": "g.npz", "memory_map": "never"},)
    starting = ServerProcess(
        tmp_path, graphs=graphs, sections={"device": {"memory_budget": "256 B", "lanes": 1}}
    )
    with pytest.raises(AssertionError, match=r"resident graphs take .* bytes, the device has"):
        starting.__enter__()


@pytest.fixture
def own(client):
    """The graph `own` at its newest version, put back as it was afterwards."""
    before = client.graphs("own")[0]
    yield before
    assert client.graphs("own")[0].num_edges == before.num_edges


def test_graphs_are_told(client):
    found = {graph.name: graph for graph in client.graphs()}
    assert list(found) == ["own", "wide", "community"]
    own = found["own"]
    assert (own.num_nodes, own.num_edges) == (NUM_NODES, GRAPH.edge_index.shape[1])
    assert (own.num_features, own.feature_dtype, own.memory_mapped) == (32, "float32", False)
    assert own.held_bytes > X.nbytes
    assert found["wide"].feature_dtype == "uint8"
    assert "demo models" in found["community"].source


def test_a_change_is_seen_by_the_next_request(client, models, own):
    isolated = NUM_NODES - 1
    features = np.full((1, 32), 0.5, np.float32)
    changed = client.update_graph(
        "own",
        if_version=own.version,
        set_ids=[isolated],
        set_x=features,
        add_edges=[[3, 8], [isolated, isolated]],
    )
    assert (changed.version, changed.num_edges) == (own.version + 1, own.num_edges + 2)
    x = X.copy()
    x[isolated] = features
    edges = np.concatenate([GRAPH.edge_index, [[3, 8], [isolated, isolated]]], axis=1)
    answer = client.infer("gcn", graph="own", node_ids=[isolated, 3], fanouts="all")
    assert answer.qos.graph_version == changed.version
    assert_equal(answer.output, run(models["gcn"], x, edges)[[isolated, 3]])
    client.update_graph(
        "own",
        set_ids=[isolated],
        set_x=X[-1:],
        remove_edges=[[3, 8], [isolated, isolated]],
    )
    answer = client.infer("gcn", graph="own", node_ids=[isolated, 3], fanouts="all")
    assert_equal(answer.output, run(models["gcn"], X, GRAPH.edge_index)[[isolated, 3]])


def test_added_nodes_can_be_asked_for_at_once(client, models):
    before = client.graphs("community")[0]
    new = before.num_nodes
    client.update_graph("community", add_x=GRAPH.x[:2], add_edges=[[0, new], [new, 0]])
    x = np.concatenate([GRAPH.x, GRAPH.x[:2]])
    edges = np.concatenate([GRAPH.edge_index, [[0, new], [new, 0]]], axis=1)
    answer = client.infer("sage", graph="community", node_ids=[new, new + 1, 0], fanouts="all")
    assert_equal(answer.output, run(models["sage"], x, edges)[[new, new + 1, 0]])


@pytest.mark.parametrize(
    ("kind", "told", "change"),
    [
        (InvalidRequest, r"'add_edges' \[0, 1\] is 99999", {"add_edges": [[0, 99999], [0, 0]]}),
        (InvalidRequest, "there is no edge 2000 → 0", {"remove_edges": [[2000], [0]]}),
        (InvalidRequest, r"'set_x': \[1, 32\]|1 rows for 2", {"set_ids": [0, 1], "set_x": X[:1]}),
        (InvalidRequest, "'add_x': 3 columns, but the graph has 32", {"add_x": X[:1, :3]}),
        (InvalidRequest, r"'add_x': shape \[32\], but \[-1, -1\]", {"add_x": X[0]}),
        (InvalidRequest, r"'add_x' \[0, 0\] is nan", {"add_x": X[:1] * np.nan}),
        (InvalidRequest, "nothing to change", {}),
        (InvalidRequest, "'edges' cannot be changed", {"edges": [[0], [0]]}),
        (Mismatched, "the change is for version 777", {"add_edges": [[0], [0]], "if_version": 777}),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("own")
def test_a_change_that_cannot_be_is_refused_and_nothing_is_changed(client, kind, told, change):
    before = client.graphs("own")
    with pytest.raises(kind, match=told):
        client.update_graph("own", **change)
    assert client.graphs("own") == before


def test_changes_to_what_is_not_there(client):
    with pytest.raises(NotFound, match="unknown graph 'mine'"):
        client.update_graph("mine", add_edges=[[0], [0]])
    with pytest.raises(NotFound, match="unknown graph 'mine'"):
        client.graphs("mine")


@pytest.mark.usefixtures("own")
def test_requests_during_changes_see_one_version(client, models):
    """Two versions take turns; every answer is that of the version it names."""
    ids = np.array([5, 900])
    other = X.copy()
    other[ids] += 3
    expected = [run(models["sage"], x, GRAPH.edge_index)[ids] for x in (X, other)]
    base = client.graphs("own")[0].version
    stop = threading.Event()

    def change():
        for turn in itertools.count(1):
            if stop.is_set() and turn % 2:
                return
            client.update_graph("own", set_ids=ids, set_x=(X, other)[turn % 2][ids])

    thread = threading.Thread(target=change)
    thread.start()
    try:
        seen, asked = set(), 0
        while asked < 60 or len(seen) < 2:
            asked += 1
            answer = client.infer("sage", graph="own", node_ids=ids, fanouts="all")
            turn = (answer.qos.graph_version - base) % 2
            assert_equal(answer.output, expected[turn])
            seen.add(turn)
    finally:
        stop.set()
        thread.join(PATIENCE_S)


def test_the_async_client_changes_graphs_too(server):
    async def change():
        async with AsyncClient(server.target) as client:
            before = (await client.graphs("wide"))[0]
            after = await client.update_graph("wide", add_edges=[[0], [2]])
            return before, after

    before, after = asyncio.run(change())
    assert (after.version, after.num_edges) == (before.version + 1, before.num_edges + 1)
