"""Models that are called by a method of theirs, or with a graph of PyG."""

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData

from serve.errors import ModelError
from serve.interface import InputSlot, Interface, TensorSlot
from serve.lane.models.calling import called, takes_data
from serve.lane.models.declared import DeclaredForward
from serve.models.repository import ModelSpec

X, EDGES = torch.randn(5, 3), torch.tensor([[0, 1, 2, 4], [1, 2, 3, 4]])


class Coder(torch.nn.Module):
    """An autoencoder, and whatever else a model may offer."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(3, 2)
        self.width = 3

    def forward(self, x, edge_index):
        return self.encode(x, edge_index) @ torch.ones(2, 4)

    def encode(self, x, edge_index, scale=1.0):
        return scale * self.encoder(x)

    def scores(self, x, edge_index):
        return self(x, edge_index).softmax(dim=-1)

    def of_data(self, data):
        assert data.num_nodes == 5
        return self(data.x, data.edge_index)

    def of_graph(self, graph: Data, hidden: int = 3):
        return self(graph.x, graph.edge_index)

    def of_batch(self, batch):
        assert batch.batch is not None
        return self(batch.x, batch.edge_index)


def spec(method="forward", inputs=("x", "edge_index"), **method_args):
    return ModelSpec(
        name="m", version=1, folder="", factory="", args={}, inputs=inputs, qos_factor=None,
        weights="", weights_bytes=0, method=method, method_args=method_args,
    )  # fmt: skip


def test_forward_is_left_as_it_is():
    model = Coder()
    assert called(model, spec()) is model


@pytest.mark.parametrize(
    ("method", "given", "wanted"),
    [
        ("encode", {}, lambda m: m.encode(X, EDGES)),
        ("encode", {"scale": 2.0}, lambda m: m.encode(X, EDGES, 2.0)),
        # It calls forward, which is still the model's.
        ("scores", {}, lambda m: m.scores(X, EDGES)),
        ("of_data", {}, lambda m: m(X, EDGES)),
        ("of_graph", {"hidden": 4}, lambda m: m(X, EDGES)),
    ],
)
def test_a_method_is_called(method, given, wanted):
    model = Coder()
    found = called(model, spec(method, **given))
    assert torch.equal(found(X, EDGES), wanted(model))
    assert {name.removeprefix("model.") for name in found.state_dict()} == set(model.state_dict())


def test_a_method_of_a_part_is_called():
    model = Coder()
    assert torch.equal(called(model, spec("encoder", ("x",)))(X), model.encoder(X))


def test_a_batch_is_told_by_being_all_there_is():
    model = Coder()
    found = called(model, spec("of_batch", ("x", "edge_index", "batch")))
    assert torch.equal(found(X, EDGES, torch.zeros(5, dtype=torch.int64)), model(X, EDGES))


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("encod", "model.method: 'Coder' has no method 'encod'"),
        ("encoder.nope", "has no method 'encoder.nope'"),
        ("width", "'width' of 'Coder' is a int, which cannot be called"),
    ],
)
def test_what_cannot_be_called_is_named(method, told):
    with pytest.raises(ModelError, match=f"^model m:1: .*{told}"):
        called(Coder(), spec(method))


def test_graphs_are_told_from_tensors():
    assert takes_data(lambda data: 0, ["x"])
    assert not takes_data(lambda data: 0, ["data"])
    assert not takes_data(lambda x: 0, ["x", "edge_index"])
    assert not takes_data(lambda batch: 0, ["batch"])
    assert not takes_data(lambda x, batch=None: 0, ["x", "batch"])
    assert not takes_data(lambda data, edge_index: 0, ["x", "edge_index"])
    assert not takes_data(lambda *given: 0, ["x"])

    def annotated(graph: Batch):
        return 0

    def in_words(graph: "HeteroData", scale=1.0):
        return 0

    assert takes_data(annotated, ["x"])
    assert takes_data(in_words, ["x"])


def test_several_kinds_of_nodes_become_hetero_data():
    class Model(torch.nn.Module):
        def forward(self, data):
            assert isinstance(data, HeteroData)
            assert data.edge_types == [("a", "to", "b")]
            assert data["a", "to", "b"].edge_index.shape == (2, 1)
            assert data.scale == 3
            return data.x_dict["b"] * data.scale

    slots = (
        InputSlot("x.a", "FP32", ("N.a", 2)),
        InputSlot("x.b", "FP32", ("N.b", 2)),
        InputSlot("edge_index.a__to__b", "INT64", (2, "E"), index=("N.a", "N.b")),
        InputSlot("scale", "FP32", ()),
    )
    interface = Interface(slots, (TensorSlot("y", "FP32", ("N.b", 2)),))
    model = called(Model(), spec(inputs=tuple(slot.name for slot in slots)))
    tensors = {
        "x.a": torch.ones(3, 2), "x.b": torch.ones(4, 2), "scale": torch.tensor(3.0),
        "edge_index.a__to__b": torch.tensor([[2], [3]]),
    }  # fmt: skip
    (found,) = DeclaredForward(model, interface, "m:1")(model, tensors)
    assert torch.equal(found, 3 * tensors["x.b"])


def test_what_a_request_leaves_out_is_no_attribute():
    class Model(torch.nn.Module):
        def forward(self, data):
            assert "edge_weight" not in data
            return data.x

    slots = (
        InputSlot("x", "FP32", ("N", 3)),
        InputSlot("edge_weight", "FP32", ("N",), optional=True),
    )
    interface = Interface(slots, (TensorSlot("y", "FP32", ("N", 3)),))
    model = called(Model(), spec(inputs=("x", "edge_weight")))
    (found,) = DeclaredForward(model, interface, "m:1")(model, {"x": X})
    assert found is X
