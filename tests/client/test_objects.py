"""What becomes of the objects that callers have: the arrays sent, or the exact sentence."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData, TemporalData
from torch_geometric.loader import DataLoader

from serve.client import Answer, InvalidRequest, ModelInterface, QosFacts, Request, TensorFacts
from serve.client.objects import read_graph
from serve.client.requests import refuse_unknown


def model(name, optional=(), **inputs):
    """Describe a model with `inputs`: datatype and number of dimensions by name."""
    facts = tuple(TensorFacts(key, kind, (-1,) * rank) for key, (kind, rank) in inputs.items())
    declared = {}
    if optional or any("." in key for key in inputs):
        declared["inputs"] = [
            {
                "name": key,
                "optional": key in optional,
                "index": ["N"] if key.startswith("edge_index") else [],
            }
            for key in inputs
        ]
    return ModelInterface(name, ("1",), facts, (), {"interface": json.dumps(declared)})


GRAPH = {"x": ("FP32", 2), "edge_index": ("INT64", 2)}
GCN = model("gcn", **GRAPH, edge_weight=("FP32", 1), batch=("INT64", 1), node_ids=("INT64", 1))
GIN = model("gin", **GRAPH)
GINE = model("gine", **GRAPH, edge_attr=("FP32", 2))
RGCN = model("rgcn", **GRAPH, edge_type=("INT64", 1))
SCHNET = model("schnet", z=("INT64", 1), pos=("FP32", 2), batch=("INT64", 1))
OGB = model("ogb", x=("INT64", 2), edge_index=("INT64", 2), batch=("INT64", 1))
HALF = model("half", x=("FP16", 2), edge_index=("INT64", 2))
SMALL = model("small", x=("INT8", 2), edge_index=("INT64", 2), keep=("BOOL", 1))
LINK = model("link", **GRAPH, edge_label_index=("INT64", 2))
STATE = model("state", optional=("h",), **GRAPH, h=("FP32", 2))
BRAIN = model("brain", x=("BF16", 2))
WRITES = "author__writes__paper"
LINKS = model(
    "links",
    **{
        "x.author": ("FP32", 2),
        f"edge_index.{WRITES}": ("INT64", 2),
        "edge_label_index": ("INT64", 2),
    },
)
HGT = model(
    "hgt",
    **{
        "x.author": ("FP32", 2),
        "x.paper": ("FP32", 2),
        f"edge_index.{WRITES}": ("INT64", 2),
    },
)

X = torch.arange(6, dtype=torch.float32).reshape(3, 2)
EDGES = torch.tensor([[0, 1], [1, 2]])
X_SENT, EDGES_SENT = ("float32", (3, 2)), ("int32", (2, 2))
SENT = {"x": X_SENT, "edge_index": EDGES_SENT}


def data(**more):
    return Data(**{"x": X, "edge_index": EDGES, **more})


def hetero(**left_out):
    graph = HeteroData()
    graph["author"].x = X
    graph["paper"].x = X[:1]
    graph["author", "writes", "paper"].edge_index = EDGES
    return graph


def hetero_links(*more):
    graph = hetero()
    for kind in ("writes", *more):
        graph["author", kind, "paper"].edge_label_index = EDGES
    return graph


def sparse_adjacency():
    return Data(x=X, adj_t=torch.eye(3).to_sparse())


def neighbour(value):
    return {"x": X.numpy(), "edge_index": value}


SENDS = {
    "a Data": (GIN, lambda: data(), SENT),
    "what the model does not take": (GIN, lambda: data(y=X, edge_attr=X[:2]), SENT),
    "an optional input": (
        GCN,
        lambda: data(edge_weight=torch.ones(2)),
        SENT | {"edge_weight": ("float32", (2,))},
    ),
    "node ids are no attribute": (GCN, lambda: data(node_ids=EDGES[0]), SENT),
    "half precision": (GIN, lambda: data(x=X.half()), SENT),
    "bfloat16": (GIN, lambda: data(x=X.bfloat16()), SENT),
    "double precision": (GIN, lambda: data(x=X.double()), SENT),
    "integer features of a float model": (GIN, lambda: data(x=X.long()), SENT),
    "boolean features": (GIN, lambda: data(x=X > 1), SENT),
    "integer features": (OGB, lambda: data(x=X.long()), SENT | {"x": ("int64", (3, 2))}),
    "half precision as declared": (HALF, lambda: data(), SENT | {"x": ("float16", (3, 2))}),
    "narrow integers": (
        SMALL,
        lambda: data(x=X.long(), keep=torch.tensor([1, 0, 1])),
        SENT | {"x": ("int8", (3, 2)), "keep": ("bool", (3,))},
    ),
    "with a gradient": (GIN, lambda: data(x=X.clone().requires_grad_()), SENT),
    "not contiguous": (GIN, lambda: data(x=X.t().contiguous().t()), SENT),
    "an EdgeIndex": (GIN, lambda: data(edge_index=EdgeIndex(EDGES, sparse_size=(3, 3))), SENT),
    "no edges": (
        GIN,
        lambda: data(edge_index=torch.zeros(2, 0, dtype=torch.long)),
        {"x": X_SENT, "edge_index": ("int32", (2, 0))},
    ),
    "edges of large ids": (
        GIN,
        lambda: data(edge_index=EDGES + 2**31),
        {"x": X_SENT, "edge_index": ("int64", (2, 2))},
    ),
    "edge features": (
        GINE,
        lambda: data(edge_attr=torch.ones(2, 5)),
        SENT | {"edge_attr": ("float32", (2, 5))},
    ),
    "edge types": (
        RGCN,
        lambda: data(edge_type=torch.tensor([0, 1])),
        SENT | {"edge_type": ("int64", (2,))},
    ),
    "a molecule": (
        SCHNET,
        lambda: Data(z=torch.tensor([6, 8]), pos=torch.ones(2, 3)),
        {"z": ("int64", (2,)), "pos": ("float32", (2, 3))},
    ),
    "pairs to score": (
        LINK,
        lambda: data(edge_label_index=EDGES[:, :1]),
        SENT | {"edge_label_index": ("int64", (2, 1))},
    ),
    "without a declared optional input": (STATE, lambda: data(), SENT),
    "with it": (STATE, lambda: data(h=X), SENT | {"h": X_SENT}),
    "a Batch": (
        GCN,
        lambda: Batch.from_data_list([data(), data()]),
        {"x": ("float32", (6, 2)), "edge_index": ("int32", (2, 4)), "batch": ("int64", (6,))},
    ),
    "a list": (
        GCN,
        lambda: [data(y=X), data()],
        {"x": ("float32", (6, 2)), "edge_index": ("int32", (2, 4)), "batch": ("int64", (6,))},
    ),
    "a list for a model without batch": (
        GIN,
        lambda: (data(), data()),
        {"x": ("float32", (6, 2)), "edge_index": ("int32", (2, 4))},
    ),
    "a list of molecules": (
        SCHNET,
        lambda: [Data(z=torch.tensor([6, 8]), pos=torch.ones(2, 3))] * 2,
        {"z": ("int64", (4,)), "pos": ("float32", (4, 3)), "batch": ("int64", (4,))},
    ),
    "a HeteroData": (
        HGT,
        lambda: hetero(),
        {
            "x.author": X_SENT,
            "x.paper": ("float32", (1, 2)),
            f"edge_index.{WRITES}": ("int32", (2, 2)),
        },
    ),
    "an attribute that one type of edges has": (
        LINKS,
        lambda: hetero_links(),
        {
            "x.author": X_SENT,
            f"edge_index.{WRITES}": ("int32", (2, 2)),
            "edge_label_index": ("int64", (2, 2)),
        },
    ),
    "a list of HeteroData": (
        HGT,
        lambda: [hetero(), hetero()],
        {
            "x.author": ("float32", (6, 2)),
            "x.paper": ("float32", (2, 2)),
            f"edge_index.{WRITES}": ("int32", (2, 4)),
        },
    ),
    "any object with attributes": (GIN, lambda: SimpleNamespace(x=X, edge_index=EDGES), SENT),
    "a mapping": (GIN, lambda: {"x": X.numpy(), "edge_index": [[0, 1], [1, 2]]}, SENT),
    "a mapping with types": (
        HGT,
        lambda: {"x.author": X, "x.paper": X[:1], f"edge_index.{WRITES}": EDGES},
        {
            "x.author": X_SENT,
            "x.paper": ("float32", (1, 2)),
            f"edge_index.{WRITES}": ("int32", (2, 2)),
        },
    ),
}

REFUSED = {
    "no features": (
        GIN,
        lambda: Data(edge_index=EDGES),
        "model 'gin' takes 'x', and this Data has none (it has edge_index): make features, for"
        " example with T.Constant or T.OneHotDegree",
    ),
    "a point cloud": (
        GIN,
        lambda: Data(x=X, pos=X),
        "model 'gin' takes 'edge_index', and this Data has none (it has pos, x): make edges with"
        " T.KNNGraph or T.RadiusGraph",
    ),
    "a sparse adjacency": (
        GIN,
        sparse_adjacency,
        "model 'gin' takes 'edge_index', and this Data has none (it has adj_t, x): send the Data"
        " from before T.ToSparseTensor",
    ),
    "no edge features": (
        GINE,
        lambda: data(),
        "model 'gine' takes 'edge_attr', and this Data has none (it has edge_index, x)",
    ),
    "an empty Data": (
        SCHNET,
        lambda: Data(),
        "model 'schnet' takes 'z', and this Data has none (it has nothing)",
    ),
    "edges the wrong way round": (
        GIN,
        lambda: data(edge_index=torch.tensor([[0, 1], [1, 2], [2, 0]])),
        "tensor 'edge_index': shape [3, 2]; PyG's is [2, E]: send edge_index.t()",
    ),
    "edges as floats": (
        GIN,
        lambda: data(edge_index=EDGES.float()),
        "tensor 'edge_index': integers are required, not float32",
    ),
    "types as floats": (
        RGCN,
        lambda: data(edge_type=torch.ones(2)),
        "tensor 'edge_type': integers are required, not float32",
    ),
    "numbers too large for the datatype": (
        SMALL,
        lambda: data(x=X.long() + 200, keep=torch.ones(3).bool()),
        "tensor 'x': 200 to 205 does not fit INT8",
    ),
    "numbers for booleans": (
        SMALL,
        lambda: data(x=X.long(), keep=torch.tensor([2, 0, 1])),
        "tensor 'keep': booleans are required, not int64",
    ),
    "sparse features": (
        GIN,
        lambda: data(x=X.to_sparse()),
        "tensor 'x': it is sparse (torch.sparse_coo); send x.to_dense()",
    ),
    "complex features": (
        GIN,
        lambda: data(x=X.to(torch.complex64)),
        "tensor 'x': complex64 is no number that can be sent",
    ),
    "text": (
        GIN,
        lambda: neighbour([["a"], ["b"]]),
        "tensor 'edge_index': <U1 is no number that can be sent",
    ),
    "a datatype that numpy lacks": (
        BRAIN,
        lambda: data(),
        "tensor 'x': BF16 cannot be sent from Python",
    ),
    "a HeteroData for one type": (
        GIN,
        hetero,
        "model 'gin' takes x, edge_index of one type; this HeteroData has the types author, paper,"
        " author__writes__paper: send data.to_homogeneous(), if the model was trained on it",
    ),
    "a Data for several types": (
        HGT,
        lambda: data(),
        "model 'hgt' has inputs of the types author, author__writes__paper, paper, so it takes a"
        " HeteroData, not a Data",
    ),
    "another type": (
        model("venues", **{"x.venue": ("FP32", 2)}),
        hetero,
        "model 'venues' takes 'x.venue'; this HeteroData has the types author, paper,"
        " author__writes__paper",
    ),
    "a type without the attribute": (
        model("types", **{f"edge_attr.{WRITES}": ("FP32", 2)}),
        hetero,
        f"model 'types' takes 'edge_attr.{WRITES}'; data[('author', 'writes', 'paper')] has no"
        " 'edge_attr'",
    ),
    "an attribute that two types of edges have": (
        LINKS,
        lambda: hetero_links("cites"),
        "model 'links' takes 'edge_label_index'; data has no 'edge_label_index'",
    ),
    "an empty list": (
        GIN,
        list,
        "model 'gin' is asked with an empty list; a list holds at least one graph",
    ),
    "a list of tensors": (
        GIN,
        lambda: [X, EDGES],
        "model 'gin' is asked with a list, which must hold PyG graphs; its item 0 is a Tensor",
    ),
    "a list of batches": (
        GIN,
        lambda: [Batch.from_data_list([data()])],
        "model 'gin' is asked with a list whose item 0 is a Batch already",
    ),
    "a list of several kinds": (
        GIN,
        lambda: [data(), hetero()],
        "model 'gin' is asked with a list of several kinds of graphs: Data, HeteroData",
    ),
    "a list in which one lacks something": (
        GINE,
        lambda: [data(edge_attr=torch.ones(2, 1)), data()],
        "model 'gine' is asked with a list in which some graphs have 'edge_attr' and item 1 has"
        " none",
    ),
    "a tensor": (
        GIN,
        lambda: X,
        "model 'gin' takes a graph, not a Tensor: give arrays by keyword: x=…, edge_index=…",
    ),
    "a loader": (
        GIN,
        lambda: DataLoader([data()]),
        "model 'gin' takes a graph, not a DataLoader: give one of its graphs",
    ),
    "events": (
        GIN,
        lambda: TemporalData(src=EDGES[0], dst=EDGES[1], t=EDGES[0], msg=X[:2]),
        "model 'gin' takes a graph, not a TemporalData: it holds events; send the Data of one"
        " moment",
    ),
    "a path": (
        GIN,
        lambda: "graph.pt",
        "model 'gin' takes a graph, not a str: load the graph first",
    ),
    "a Path": (
        GIN,
        lambda: Path("graph.pt"),
        "model 'gin' takes a graph, not a PosixPath: load the graph first",
    ),
    "a mapping with an unknown name": (
        GIN,
        lambda: {"x": X, "edges": EDGES},
        "model 'gin' has no input 'edges'; it takes x, edge_index",
    ),
}


@pytest.mark.parametrize("name", SENDS)
def test_what_can_be_sent_is_sent(name):
    interface, make, expected = SENDS[name]
    found = read_graph(make(), {}, interface).tensors
    assert {key: (str(array.dtype), array.shape) for key, array in found.items()} == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_is_told_in_these_words(name):
    interface, make, sentence = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        read_graph(make(), {}, interface)
    assert caught.value.message == sentence


def test_the_table_is_long_enough():
    assert len(SENDS) + len(REFUSED) >= 40


def test_values_survive():
    found = read_graph([data(x=X.bfloat16()), data()], {}, GCN).tensors
    np.testing.assert_array_equal(found["x"], np.concatenate([X, X]))
    np.testing.assert_array_equal(found["edge_index"], [[0, 1, 3, 4], [1, 2, 4, 5]])
    np.testing.assert_array_equal(found["batch"], [0, 0, 0, 1, 1, 1])


def test_what_is_given_by_keyword_goes_first():
    request = Request(model="gcn", data=Data(edge_index=EDGES), x=X.numpy() + 1)
    assert request.needs_interface
    np.testing.assert_array_equal(request.read(GCN).tensors["x"], X.numpy() + 1)


def test_integers_by_keyword_have_the_model_asked():
    assert Request(model="ogb", x=X.long(), edge_index=EDGES).needs_interface
    assert Request(model="ogb", x=X.long().numpy(), edge_index=EDGES).needs_interface
    for x in (X, X.numpy(), X.tolist(), [[1], [2]]):
        assert not Request(model="gcn", x=x, edge_index=EDGES).needs_interface


# -- answers --------------------------------------------------------------------------------------


def answer(graph_nodes, **outputs):
    return Answer(outputs, QosFacts(), "m", "1", "r", graph_nodes)


def test_answers_to_lists_are_cut_into_their_graphs():
    graphs = [Data(x=X, edge_index=EDGES), Data(x=X[:1], edge_index=EDGES[:, :0])]
    nodes = read_graph(graphs, {}, GCN).graph_nodes
    assert nodes == (3, 1)
    assert read_graph(Batch.from_data_list(graphs), {}, GCN).graph_nodes == (3, 1)
    assert read_graph(data(), {}, GCN).graph_nodes is None
    rows = np.arange(8.0).reshape(4, 2)
    first, second = answer(nodes, per_node=rows, per_graph=rows[:2]).split()
    np.testing.assert_array_equal(first.outputs["per_node"], rows[:3])
    np.testing.assert_array_equal(second.outputs["per_node"], rows[3:])
    np.testing.assert_array_equal(first.outputs["per_graph"], rows[:1])
    np.testing.assert_array_equal(second.outputs["per_graph"], rows[1:2])


def test_other_answers_are_not_cut():
    with pytest.raises(ValueError, match="no list of graphs"):
        answer(None, output=X.numpy()).split()
    with pytest.raises(ValueError, match="3 rows, neither one for each of 2 graphs nor one for"):
        answer((4, 4), output=X.numpy()).split()


def test_answers_become_tensors_that_share_their_memory():
    found = answer(None, first=X.numpy().copy(), second=np.array([1, 2]))
    tensor = found.torch()
    tensor[0, 0] = 9
    assert found.output[0, 0] == 9
    assert found.torch("second").dtype == torch.int64
    with pytest.raises(KeyError):
        found.torch("third")


def test_declared_outputs_are_cut_by_what_their_rows_count():
    def slot(name, shape, index=()):
        return {"name": name, "datatype": "FP32", "shape": shape, "index": index}

    declared = {
        "inputs": [
            slot("x", ["N", 2]),
            slot("edge_index", [2, "E"], ["N"]),
            slot("pairs_index", [2, "P"], ["N"]),
            slot("batch", ["N"], ["G"]),
        ],
        "outputs": [
            slot("nodes", ["N", 4]), slot("edges", ["E"]), slot("pairs", ["P"]),
            slot("graphs", ["G", 1]), slot("fixed", [3]),
        ],
    }  # fmt: skip
    interface = ModelInterface(
        "links", ("1",),
        (
            TensorFacts("x", "FP32", (-1, 2)), TensorFacts("edge_index", "INT64", (2, -1)),
            TensorFacts("pairs_index", "INT64", (2, -1)), TensorFacts("batch", "INT64", (-1,)),
        ),
        (), {"interface": json.dumps(declared)},
    )  # fmt: skip
    # As many edges as nodes, and as many nodes in the second as there are graphs.
    graphs = [
        Data(x=torch.ones(n, 2), edge_index=torch.zeros(2, e).long(),
             pairs_index=torch.zeros(2, p).long())
        for n, e, p in ((1, 0, 2), (2, 3, 1))
    ]  # fmt: skip
    graph = read_graph(graphs, {}, interface)
    assert graph.graph_rows == {
        "nodes": (1, 2), "edges": (0, 3), "pairs": (2, 1), "graphs": (1, 1)
    }  # fmt: skip
    outputs = {name: np.arange(3.0) for name in ("nodes", "edges", "pairs")}
    whole = Answer(
        {**outputs, "graphs": np.arange(2.0)}, QosFacts(), "links", "1", "r", graph.graph_nodes,
        graph.graph_rows,
    )  # fmt: skip
    first, second = whole.split()
    assert [len(first.outputs[name]) for name in whole.outputs] == [1, 0, 2, 1]
    assert [len(second.outputs[name]) for name in whole.outputs] == [2, 3, 1, 1]
    assert read_graph(Data(x=X, edge_index=EDGES), {}, GCN).graph_rows == {}


def test_a_models_own_input_by_keyword_is_refused_with_the_way_to_give_it():
    with pytest.raises(
        TypeError, match=r"give all inputs as a mapping by name: infer\(model, {'z'"
    ):
        refuse_unknown({"x": 1, "timeout_s": 2, "z": 3})
    refuse_unknown({"x": 1, "timeout_s": 2})
