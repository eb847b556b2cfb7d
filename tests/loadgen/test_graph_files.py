"""Graphs of files become requests that fit the models asked."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset

from loadgen import graph_files
from loadgen.graph_files import MOST_GRAPHS, evenly, names_own_graphs, read_graphs
from loadgen.options import LoadOptions
from loadgen.plan import make_plan
from serve.errors import ConfigError
from serve.graphs.import_messages import GraphsRead
from serve.interface import InputSlot, Interface, TensorSlot
from serve.lane.graphs_reading import write_graphs
from serve.wire.messages import DATATYPES, decode_request
from serve.workload import PoolSpec
from tests.loadgen.test_parts import FakeServer

OPTIONS = LoadOptions("host:1", "own", rate_hz=10.0, requests=12, pool=PoolSpec(max_nodes=100))
EDGES = InputSlot("edge_index", "INT64", (2, "E"), index=("N",))
OUTPUT = (TensorSlot("y", "FP32", ("N",)),)
#: Declared as a model of molecules may: integers, a feature of each edge, and an optional batch.
MOLECULES = Interface(
    (
        InputSlot("z", "INT64", ("N",), low=1, high=20),
        InputSlot("pos", "FP32", ("N", 3)),
        EDGES,
        InputSlot("batch", "INT64", ("N",), index=("G",), optional=True, default=0.0),
    ),
    OUTPUT,
)
PAPERS = Interface(
    (
        InputSlot("x.author", "FP32", ("N.author", 3)),
        InputSlot("x.paper", "FP32", ("N.paper", 2)),
        InputSlot(
            "edge_index.author__writes__paper", "INT64", (2, "E"), index=("N.author", "N.paper")
        ),
        InputSlot("edge_label_index", "INT64", (2, "K"), index=("N.author", "N.paper")),
    ),
    OUTPUT,
)


class Server(FakeServer):
    def __init__(self, inputs):
        self.shapes = inputs

    def inputs(self, model):
        return self.shapes


def sent(data, inputs, **changes):
    """Return the tensors of each request of a run, by the graph it names, and the plan."""
    plan = make_plan(replace(OPTIONS, data=data, **changes), Server(inputs))
    found = {}
    for item, message in zip(plan.trace.items, plan.messages, strict=True):
        request = decode_request(message)
        found[item.index] = {
            tensor.name: np.frombuffer(bytes(raw), DATATYPES[tensor.datatype].dtype).reshape(
                tensor.shape
            )
            for tensor, raw in zip(request.inputs, request.raws, strict=True)
        }
    return found, plan


def molecule(nodes, **more):
    ring = torch.arange(nodes)
    return Data(
        z=torch.full((nodes,), 6), pos=torch.rand(nodes, 3),
        edge_index=torch.stack([ring, ring.roll(1)]), y=torch.rand(1), name="a ring", **more,
    )  # fmt: skip


def papers(authors):
    data = HeteroData()
    data["author"].x = torch.rand(authors, 3, dtype=torch.float64)
    data["paper"].x = torch.rand(4, 2)
    data["venue"].num_nodes = 2
    links = torch.tensor([[0, authors - 1], [3, 1]])
    data["author", "writes", "paper"].edge_index = links
    data["author", "writes", "paper"].edge_label_index = links.flip(1)
    return data


@pytest.fixture
def here(monkeypatch):
    """Read what PyG saved in this process, which has torch."""

    def read(module, order, source, kind):
        try:
            return write_graphs(order)
        except ConfigError as error:
            return GraphsRead(error=str(error))

    monkeypatch.setattr(graph_files, "read_apart", read)


def processed(graphs, path):
    """Write graphs as an in-memory dataset does."""
    path.parent.mkdir()
    data, slices = InMemoryDataset.collate(graphs)
    torch.save((data.to_dict(), slices, type(data)), path)
    torch.save("None", path.with_name("pre_transform.pt"))
    torch.save("None", path.with_name("pre_filter.pt"))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("form", ["list", "files", "dataset"])
def test_molecules_are_sent_as_they_are(form, tmp_path):
    graphs = [molecule(nodes) for nodes in (3, 7, 5)]
    path = tmp_path / "set"
    if form == "list":
        path = tmp_path / "set.pt"
        torch.save(graphs, path)
    elif form == "files":
        path.mkdir()
        for index, graph in enumerate(graphs):
            torch.save(graph, path / f"{index}.pt")
    else:
        path.mkdir()
        processed(graphs, path / "processed" / "data.pt")
    found, plan = sent(path, MOLECULES)
    assert {item.dataset for item in plan.trace.items} == {"set"}
    assert plan.trace.header.sources["set"].endswith(", 3 graphs")
    for index, graph in enumerate(graphs):
        assert list(found[index]) == ["z", "pos", "edge_index"]
        for name, array in found[index].items():
            np.testing.assert_array_equal(array, graph[name].numpy())


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("form", ["one", "list", "dataset"])
def test_graphs_of_several_types_are_sent_by_type(form, tmp_path):
    graphs = [papers(3), papers(6)]
    path = tmp_path / "papers.pt"
    if form == "dataset":
        processed(graphs, tmp_path / "processed" / "data.pt")
        path = tmp_path
    else:
        torch.save(graphs[0] if form == "one" else graphs, path)
    found, plan = sent(path, PAPERS)
    assert len(found) == (1 if form == "one" else 2)
    for index, tensors in found.items():
        graph = graphs[index]
        assert list(tensors) == [slot.name for slot in PAPERS.inputs]
        np.testing.assert_array_equal(tensors["x.author"], graph["author"].x.float().numpy())
        writes = graph["author", "writes", "paper"]
        np.testing.assert_array_equal(tensors["edge_label_index"], writes.edge_label_index)
    sizes = {(item.num_nodes, item.num_edges) for item in plan.trace.items}
    assert sizes == {(3 + 4 + 2, 2)} | ({(6 + 4 + 2, 2)} if form != "one" else set())


def test_arrays_of_safetensors_and_archives_are_sent(tmp_path):
    arrays = {
        "z": np.full(4, 6), "pos": np.ones((4, 3)), "edge_index": np.array([[0, 1], [1, 3]])
    }  # fmt: skip
    save_file(arrays, tmp_path / "a.safetensors")
    np.savez(tmp_path / "b.npz", **arrays)
    found, _ = sent(tmp_path, MOLECULES)
    assert len(found) == 2
    for tensors in found.values():
        assert tensors["pos"].dtype == np.float32
        np.testing.assert_array_equal(tensors["edge_index"], arrays["edge_index"])


def test_what_a_graph_lacks_is_random_and_told(tmp_path):
    path = tmp_path / "g.npz"
    np.savez(path, num_nodes=9, edge_index=[[0, 1], [1, 8]])
    found, plan = sent(path, MOLECULES)
    assert plan.trace.header.sources == {"g": "file g.npz, random pos, z"}
    assert found[0]["pos"].shape == (9, 3)
    assert 1 <= found[0]["z"].min() <= found[0]["z"].max() < 20
    # The short form of inputs has no other rules.
    found, _ = sent(path, {"x": (-1, 5), "edge_index": (2, -1), "edge_weight": (-1,)})
    assert {name: array.shape for name, array in found[0].items()} == {
        "x": (9, 5), "edge_index": (2, 2),
    }  # fmt: skip


def test_one_large_graph_is_cut_and_one_of_several_refused(tmp_path):
    ring = np.arange(300)
    large = {"num_nodes": np.array(300), "edge_index": np.stack([ring, np.roll(ring, 1)])}
    save_file(large, tmp_path / "a.safetensors")
    found, _ = sent(tmp_path / "a.safetensors", {"x": (-1, 5), "edge_index": (2, -1)})
    assert len(found) > 1
    assert all(len(tensors["x"]) <= 100 for tensors in found.values())
    np.savez(tmp_path / "b.npz", num_nodes=2, edge_index=[[0], [1]])
    with pytest.raises(ConfigError, match=r"a.safetensors: 300 nodes, .* at most --max-nodes 100"):
        sent(tmp_path, MOLECULES)


@pytest.mark.usefixtures("here")
def test_a_trace_of_files_is_replayed_with_them_alone(tmp_path):
    path = tmp_path / "set.pt"
    torch.save([molecule(3), molecule(5)], path)
    _, plan = sent(path, MOLECULES)
    plan.trace.save(tmp_path / "trace")
    again = LoadOptions("host:1", trace=tmp_path / "trace", data=path)
    assert make_plan(again, Server(MOLECULES)).messages == plan.messages
    torch.save([molecule(3), molecule(4)], path)
    with pytest.raises(ConfigError, match="the trace is for other files than file set"):
        make_plan(again, Server(MOLECULES))


SHORT = {"x": (-1, 3), "edge_index": (2, -1)}


@pytest.mark.parametrize(
    ("arrays", "inputs", "message"),
    [
        ({"x": np.ones((2, 4))}, SHORT, r"tensor 'x': shape \[2, 4\]; model 'own' takes \[N, 3\]"),
        ({"x": np.ones((2, 3))}, SHORT,
         "'edge_index', which the graph lacks, .* how many E .* the graph has x"),
        ({"x": np.ones((2, 3)), "edge_index": np.array([[0], [2]])}, SHORT,
         "array 'edge_index': ids 2 to 2, of 2 nodes"),
        ({"x": np.ones((2, 3)), "edge_index": np.ones((3, 1), int)}, SHORT,
         r"array 'edge_index': integers \[2, E\] wanted, got int64 \[3, 1\]"),
        ({"edge_index": np.array([[0], [1]])}, SHORT, "array 'num_nodes' is missing"),
        ({"num_nodes": np.array(0), "edge_index": np.ones((2, 0), int)}, SHORT, "has no nodes"),
        ({"x": np.array(["a"])}, SHORT, "array 'x': numbers wanted, got <U1"),
        ({"num_nodes": np.array(3), "x": np.ones((2, 3))}, SHORT,
         "tensor 'x': 2 N, but 'num_nodes' tells 3"),
        ({"z": np.full(2, 20), "edge_index": np.ones((2, 0), int)}, MOLECULES,
         "tensor 'z': values 20 to 20; at least 1 and below 20 is wanted"),
        ({"z": np.full(2, 1.5), "edge_index": np.ones((2, 0), int)}, MOLECULES,
         "tensor 'z': integers are required, not float64; model 'own' takes it"),
        ({"x.author": np.ones((2, 3)), "edge_index.author__paper": np.ones((2, 0), int)}, PAPERS,
         "'author__paper' is no edge type"),
    ],
)  # fmt: skip
def test_a_graph_that_does_not_fit_is_refused_by_file_tensor_and_rule(
    arrays, inputs, message, tmp_path
):
    np.savez(tmp_path / "g.npz", **arrays)
    with pytest.raises(ConfigError, match=rf"g\.npz: .*{message}"):
        sent(tmp_path / "g.npz", inputs)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([], "an empty list"),
        ([3], "it holds a int; a Data or HeteroData"),
        ("text", "it holds a str"),
        (Batch.from_data_list([molecule(3)]), "would be code to run"),
    ],
)
def test_what_holds_no_graphs_is_refused(held, message, tmp_path):
    torch.save(held, tmp_path / "g.pt")
    with pytest.raises(ConfigError, match=f"g.pt: .*{message}"):
        read_graphs(tmp_path / "g.pt")


def test_a_folder_of_nothing_and_other_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no file of graphs: \.npz, \.safetensors, \.pt"):
        read_graphs(tmp_path)
    (tmp_path / "g.csv").write_text("")
    with pytest.raises(ConfigError, match=r"g\.csv: a file of graphs ends in"):
        read_graphs(tmp_path / "g.csv")
    # A folder with a dataset of the pool is one of the pool.
    np.savez(tmp_path / "pubmed.npz", num_nodes=2, edge_index=[[0], [1]])
    assert not names_own_graphs(tmp_path)
    assert names_own_graphs(tmp_path / "pubmed.npz")


class Hostile:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return exec, (f"open({str(self.mark)!r}, 'w')",)


def test_the_process_that_reads_runs_no_code(tmp_path):
    torch.save([molecule(3), molecule(4)], tmp_path / "g.pt")
    assert [graph.num_nodes for graph in read_graphs(tmp_path / "g.pt").graphs] == [3, 4]
    mark = tmp_path / "ran"
    with (tmp_path / "h.pt").open("wb") as file:
        pickle.dump([Hostile(mark)], file)
    with pytest.raises(ConfigError, match=r"h\.pt: .*would be code to run; nothing was loaded"):
        read_graphs(tmp_path / "h.pt")
    assert not mark.exists()


@pytest.mark.parametrize(("count", "most"), [(1, 5), (5, 5), (17, 5), (2000, MOST_GRAPHS)])
def test_so_many_are_taken_evenly(count, most):
    taken = evenly(count, most)
    assert len(taken) == min(count, most)
    assert taken[0] == 0
    steps = np.diff(taken)
    assert not steps.size or steps.max() - steps.min() <= 1
