"""Requests by node id of a graph with several types, through a real server: equal to PyG."""

import json
import urllib.request

import numpy as np
import pytest

from bench.kit import academic
from bench.kit.servers import ServerProcess
from bench.kit.waiting import PATIENCE_S
from serve.client import Client, InvalidRequest, Mismatched
from serve.graphs.academic import academic_graph
from serve.graphs.features import FeatureKeeper
from serve.graphs.typed_load import held_typed

PAPERS = 300
ARRAYS = academic_graph(PAPERS)
EDGE_TYPES = [name.partition(".")[2] for name in ARRAYS if name.startswith("edge_index.")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("academic")
    return root, {name: academic.write(root, name) for name in academic.MODELS}


@pytest.fixture(scope="module")
def server(tmp_path_factory, models):
    folder = tmp_path_factory.mktemp("typed")
    np.savez(folder / "academic.npz", **ARRAYS)
    graphs = (
        {"name": "academic", "file": "academic.npz"},
        {"name": "community", "dataset": "community"},
    )
    with ServerProcess(folder, repository=models[0], graphs=graphs) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with Client(server.target, timeout_s=PATIENCE_S) as found:
        yield found


def assert_close(found, wanted):
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * float(np.abs(wanted).max()))


def sampled(node_type, ids, fanouts, seed):
    """The arrays of the sample that the server draws, drawn here, and the ids' places in it."""
    graph = held_typed(
        "academic", ARRAYS, FeatureKeeper(dtype="float32", folder=None), "", lambda *_: None
    )
    found = graph.snapshot.sample(node_type, np.asarray(ids), fanouts, seed)
    arrays = {}
    for name, array in ARRAYS.items():
        base, _, of = name.partition(".")
        if base == "edge_index":
            arrays[name] = np.empty((2, found.count(of)), np.int64)
            found.write_edges(of, arrays[name])
        else:
            arrays[name] = array[found.nodes(of)]
    return arrays, found.positions()


@pytest.mark.parametrize(
    ("model", "node_type"),
    [("hgt", "paper"), ("sage", "paper"), ("sage", "author"), ("sage", "venue")],
)
def test_all_neighbours_give_the_answer_of_the_whole_graph(client, models, model, node_type):
    ids = np.array([3, 0, 3, 5])
    answer = client.infer(model, graph="academic", nodes={node_type: ids}, fanouts="all")
    output = "y" if model == "hgt" else node_type
    assert list(answer.outputs) == [output]
    assert_close(answer.output, academic.answers(models[1][model], ARRAYS)[output][ids])
    assert (answer.qos.graph, answer.qos.graph_version) == ("academic", 1)


@pytest.mark.parametrize("model", academic.MODELS)
@pytest.mark.parametrize(
    "fanouts",
    [[4, 3], {"*": [2, 2], ("author", "writes", "paper"): [-1, 0], "paper__cites__paper": [0, 3]}],
)
def test_a_sample_gives_what_pyg_gives_on_it(client, models, model, fanouts):
    """The sample is found again from the seed in the answer, and run here."""
    ids = np.random.default_rng(0).integers(0, PAPERS, 25)
    answer = client.infer(model, graph="academic", nodes={"paper": ids}, fanouts=fanouts)
    per_type = dict.fromkeys(EDGE_TYPES, fanouts)
    if isinstance(fanouts, dict):
        per_type = {name: [2, 2] for name in EDGE_TYPES} | {
            "author__writes__paper": [-1, 0], "paper__cites__paper": [0, 3],
        }  # fmt: skip
    arrays, positions = sampled("paper", ids, per_type, answer.qos.seed)
    nodes = sum(len(array) for name, array in arrays.items() if name.startswith("x."))
    edges = sum(a.shape[1] for name, a in arrays.items() if name.startswith("edge_index."))
    assert (answer.qos.sampled_nodes, answer.qos.sampled_edges) == (nodes, edges)
    wanted = academic.answers(models[1][model], arrays)
    assert_close(answer.output, wanted["y" if model == "hgt" else "paper"][positions])
    again = client.infer(
        model, graph="academic", nodes={"paper": ids}, fanouts=fanouts, seed=answer.qos.seed
    )
    assert (again.output == answer.output).all()


@pytest.mark.parametrize("model", academic.MODELS)
def test_the_whole_graph_sent_gives_the_same(client, models, model):
    arrays = {s.name: ARRAYS[s.name] for s in models[1][model].spec.interface.inputs}
    answer = client.infer(model, arrays)
    for name, wanted in academic.answers(models[1][model], ARRAYS).items():
        assert_close(answer.outputs[name], wanted)


def test_estimates_hold_what_is_then_sampled(client):
    told = client.estimate("sage", graph="academic", num_ids=8, node_type="author")
    rng = np.random.default_rng(0)
    authors = len(ARRAYS["x.author"])
    seen = [
        client.infer("sage", graph="academic", nodes={"author": rng.integers(0, authors, 8)}).qos
        for _ in range(15)
    ]
    for count in ("nodes", "edges"):
        found = np.median([getattr(qos, f"sampled_{count}") for qos in seen])
        assert getattr(told, f"num_{count}") == pytest.approx(found, rel=0.4)
    assert told.reserve_bytes >= max(qos.pmc_measured_bytes for qos in seen)
    assert client.estimate("hgt", graph="academic", num_ids=8).num_nodes > 8, "papers alone"
    with pytest.raises(InvalidRequest, match=r"give one of 'node_ids\.author'"):
        client.estimate("sage", graph="academic", num_ids=8)


def test_http_asks_by_the_same_name(server, client, models):
    body = {
        "inputs": [
            {"name": "node_ids.paper", "datatype": "INT64", "shape": [2], "data": [7, 2]},
        ],
        "parameters": {"graph": "academic", "fanouts": "*=-1,-1"},
    }
    url = f"http://127.0.0.1:{server.http_port}/v2/models/hgt/infer"
    with urllib.request.urlopen(url, json.dumps(body).encode(), PATIENCE_S) as told:
        answer = json.load(told)
    (output,) = answer["outputs"]
    found = np.array(output["data"], np.float32).reshape(output["shape"])
    assert_close(found, academic.answers(models[1]["hgt"], ARRAYS)["y"][[7, 2]])


def test_changes_are_seen_whole_and_wrong_ones_refused(client, models):
    """Last of those that read the graph as it was opened."""
    (before,) = client.graphs("academic")
    assert before.node_types == {
        name: len(ARRAYS[f"x.{name}"]) for name in ("author", "paper", "venue")
    }
    assert before.features["x.paper"] == "float32 [N, 16]"
    new, x, edge = PAPERS, np.full((1, 16), 0.25), np.array([[PAPERS], [5]])
    after = client.update_graph(
        "academic",
        if_version=before.version,
        add_nodes={"paper": {"x": x.tolist(), "year": [2020]}},
        set_nodes={"author": {"ids": [3], "x": np.ones((1, 8))}},
        add_edges={("paper", "cites", "paper"): edge, "paper__cited_by__paper": edge[::-1]},
        remove_edges={"author__writes__paper": ARRAYS["edge_index.author__writes__paper"][:, :1]},
    )
    assert (after.version, after.node_types["paper"]) == (before.version + 1, PAPERS + 1)
    arrays = dict(ARRAYS)
    arrays["x.paper"] = np.concatenate([arrays["x.paper"], x.astype(np.float32)])
    arrays["year.paper"] = np.append(arrays["year.paper"], 2020)
    arrays["x.author"] = arrays["x.author"].copy()
    arrays["x.author"][3] = 1
    for name, ends in (("paper__cites__paper", edge), ("paper__cited_by__paper", edge[::-1])):
        key = f"edge_index.{name}"
        arrays[key] = np.concatenate([arrays[key], ends], axis=1)
    arrays["edge_index.author__writes__paper"] = arrays["edge_index.author__writes__paper"][:, 1:]
    ids = np.array([new, 5, 0])
    answer = client.infer("hgt", graph="academic", nodes={"paper": ids}, fanouts=[-1, -1])
    assert_close(answer.output, academic.answers(models[1]["hgt"], arrays)["y"][ids])
    assert answer.qos.graph_version == after.version
    for change, told in (
        ({"add_x": np.ones((1, 16))}, "several types of nodes"),
        ({"add_nodes": {"paper": {"x": x}}}, "need all features of their type, x, year"),
        ({"add_edges": {"cites": edge}}, "no type 'cites'"),
        ({"set_nodes": {"paper": {"ids": [0.5], "x": x}}}, "INT64 or INT32 is required"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            client.update_graph("academic", **change)
    with pytest.raises(InvalidRequest, match="'tensors' are not for it"):
        client.update_graph("community", add_edges={"cites": edge})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"nodes": {"paper": [PAPERS + 1]}}, r"'node_ids.paper' \[0\] is 301; .* \[0, 301\)"),
        ({"nodes": {"journal": [0]}}, "'node_ids.journal': .* one of 'node_ids.author'"),
        ({"node_ids": [0]}, "'node_ids': graph 'academic' has several types of nodes"),
        ({"nodes": {"author": [0]}}, "'hgt' has outputs for nodes of paper"),
        ({"nodes": {"author": [0], "paper": [0]}}, "a request asks for nodes of one type"),
        ({"nodes": {"paper": [0]}, "fanouts": {"cites": [2]}}, "takes no edges 'cites'"),
        ({"nodes": {"paper": [0]}, "fanouts": {EDGE_TYPES[0]: [2]}}, r"none for .*, nor for '\*'"),
        (
            {"nodes": {"paper": [0]}, "fanouts": {"*": [2], EDGE_TYPES[0]: [2, 2]}},
            r"types of edges have \[1, 2\] hops",
        ),
        ({"nodes": {"paper": [0]}, "fanouts": {"*": ["x"]}}, r"'\*=x' is neither 'all' nor"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(client, options, told):
    with pytest.raises(InvalidRequest, match=told):
        client.infer("hgt", graph="academic", **options)


def test_a_graph_of_one_type_is_told_to_be_one(client):
    told = r"model 'hgt' takes 'x\.\w+'; graph 'community' has one type of nodes$"
    with pytest.raises(Mismatched, match=told):
        client.infer("hgt", graph="community", node_ids=[0])


def test_metadata_lists_the_types_that_may_be_asked_about(client):
    names = {each.name for each in client.interface("sage").inputs}
    assert {"node_ids.author", "node_ids.paper", "node_ids.venue"} <= names
    papers = {each.name for each in client.interface("hgt").inputs}
    assert "node_ids.paper" in papers
    assert "node_ids.author" not in papers
