"""A graph that a model was trained on declares the model's inputs and outputs."""

import tomllib
from typing import NamedTuple

import msgspec
import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import global_add_pool

from bench.kit import gallery
from serve.errors import ConfigError
from serve.lane.example_declaration import declare
from serve.models.declaration import InputSection, OutputSection, interface_of
from serve.models.repository import ModelSpec

SPEC = ModelSpec(
    name="m", version=1, folder="", factory="", args={}, weights="", weights_bytes=0, inputs=(),
    qos_factor=None,
)  # fmt: skip


@pytest.fixture
def declared(tmp_path):
    """Declare a module by what `torch.save` writes; returns the interface and the notes."""

    def declared(module, example):
        torch.save(example, tmp_path / "example.pt")
        text, notes = declare(module, SPEC, tmp_path / "example.pt")
        sections = tomllib.loads(text)["model"]
        interface = interface_of(
            msgspec.convert(sections["input"], tuple[InputSection, ...]),
            msgspec.convert(sections["output"], tuple[OutputSection, ...]),
            "example",
        )
        return interface, notes

    return declared


def graph_of(name):
    """A graph with the inputs of a model of the gallery as attributes."""
    interface = gallery.described(name)
    loaded = gallery.load(name)
    arrays = gallery.request(loaded, interface.spread(40, 110), seed=3)
    graph = HeteroData() if any("." in key for key in arrays) else Data()
    for key, array in arrays.items():
        attribute, _, of = key.partition(".")
        store = graph[tuple(of.split("__")) if "__" in of else of] if of else graph
        store[attribute] = torch.from_numpy(array)
    return graph.to_dict()


@pytest.mark.parametrize("name", ["rgcn", "gine", "ogb", "molecules", "schnet", "links", "hgt"])
def test_models_of_the_gallery_are_declared_as_by_hand(declared, name):
    by_hand = gallery.described(name)
    found, _ = declared(gallery.trained(name), graph_of(name))
    assert [slot.name for slot in found.inputs] == [slot.name for slot in by_hand.inputs]
    symbols = {}
    for one, other in zip(
        (*found.inputs, *found.outputs), (*by_hand.inputs, *by_hand.outputs), strict=True
    ):
        assert one.datatype == other.datatype
        # Symbols may have other names, but the same one everywhere.
        pairs = [*zip(one.shape, other.shape, strict=True)]
        pairs += [*zip(one.index, other.index, strict=True)] if one in found.inputs else []
        for mine, theirs in pairs:
            assert symbols.setdefault(mine, theirs) == theirs


def test_integers_have_the_ranges_of_the_embeddings_that_read_them(declared):
    found, notes = declared(gallery.trained("ogb"), graph_of("ogb"))
    by_hand = gallery.described("ogb")
    assert [slot.columns for slot in found.inputs] == [slot.columns for slot in by_hand.inputs]
    assert notes == ()


def test_other_integers_have_the_range_of_the_example_and_that_is_told(declared):
    found, notes = declared(gallery.trained("rgcn"), graph_of("rgcn"))
    assert found.by_name["edge_type"].bounds == (0, 4)
    (note,) = notes
    assert "'edge_type' has values in [0, 4) in the example" in note


class Pooled(nn.Module):
    def forward(self, data):
        return global_add_pool(data.x * data["weight"], data.batch)


def test_a_forward_that_takes_a_graph_is_asked_with_what_it_reads(declared):
    data = Data(
        x=torch.ones(4, 3), weight=torch.ones(4, 1), y=torch.ones(4), other=torch.ones(4),
        edge_index=torch.zeros(2, 5, dtype=torch.long),
    )  # fmt: skip
    for example in (data, data.to_dict(), Batch.from_data_list([data, data]).to_dict()):
        found, _ = declared(Pooled(), example)
        assert [slot.name for slot in found.inputs] == ["x", "weight", "batch"]
        assert found.by_name["batch"].optional
        assert [slot.shape for slot in found.outputs] == [("G", 3)]


class Movies(nn.Module):
    """Scores pairs in a graph with an attribute that one type of nodes alone has."""

    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(30, 2)

    def forward(self, data: HeteroData):
        users, movies = self.users(data["user"].node_id.clone()), data["movie"].x
        pairs = data["user", "rates", "movie"].edge_label_index
        return (users[pairs[0]] * movies[pairs[1]]).sum(-1)


def test_a_forward_that_takes_a_typed_graph_finds_what_one_type_alone_has(declared):
    data = HeteroData()
    data["user"].node_id = torch.arange(5)
    data["movie"].x = torch.ones(7, 2)
    data["user", "rates", "movie"].edge_label_index = torch.zeros(2, 4, dtype=torch.long)
    found, notes = declared(Movies(), data)
    assert [slot.name for slot in found.inputs] == [
        "node_id.user", "x.movie", "edge_label_index.user__rates__movie"
    ]  # fmt: skip
    assert found.by_name["node_id.user"].bounds == (0, 30)
    assert notes == ()
    assert [slot.shape for slot in found.outputs] == [("K",)]


class Forces(nn.Module):
    """Energies of atoms, and the forces on them."""

    def __init__(self, recipe):
        super().__init__()
        self.recipe = recipe

    def forward(self, pos):
        if not self.recipe:
            return self.forces(pos.requires_grad_())
        with torch.inference_mode(False), torch.enable_grad():
            return self.forces(pos.clone().requires_grad_())

    def forces(self, pos):
        energy = (pos**2).sum(1)
        return energy.detach(), -torch.autograd.grad(energy.sum(), pos)[0]


def test_models_that_compute_gradients_are_told_how(declared):
    example = {"pos": torch.ones(4, 3)}
    found, _ = declared(Forces(recipe=True), example)
    assert [slot.shape for slot in found.outputs] == [("N",), ("N", 3)]
    with pytest.raises(ConfigError, match=r"models run without gradients; .* on clones of its"):
        declared(Forces(recipe=False), example)


class Halved(nn.Module):
    def forward(self, x):
        return x[::2]


class Wide(nn.Module):
    def forward(self, x, states):
        return x


@pytest.mark.parametrize(
    ("module", "example", "told"),
    [
        (
            Wide(),
            {"x": torch.ones(4, 2), "edge_index": torch.zeros(2, 1, dtype=torch.long)},
            "forward takes 'states', and the example has no such attribute; it has x, edge_index",
        ),
        (Halved(), {"x": torch.ones(4, 2)}, "which no count of the inputs tells"),
        (Pooled(), {"x": torch.ones(4, 2)}, "the model does not run on it: KeyError"),
        (Halved(), {"x": torch.ones(4, 2, dtype=torch.bfloat16)}, "'x' is torch.bfloat16"),
        (Halved(), torch.ones(3), "it holds a Tensor; a Data or HeteroData of PyG is wanted"),
    ],
)
def test_what_does_not_fit_is_told(declared, module, example, told):
    with pytest.raises(ConfigError) as raised:
        declared(module, example)
    assert told in str(raised.value)
    assert str(raised.value).count("--example: ") <= 1


class OnGraphs(nn.Module):
    """Pools, and joins attributes of each graph."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2)

    def forward(self, x, edge_index, u, batch):
        return self.lin(torch.cat([global_add_pool(x, batch), u], dim=-1))


@pytest.mark.parametrize("count", [1, 3])
def test_attributes_of_graphs_have_a_row_for_each(declared, count):
    graph = Data(x=torch.ones(5, 3), edge_index=torch.zeros(2, 4).long(), u=torch.ones(1, 1))
    example = Batch.from_data_list([graph] * count).to_dict() if count > 1 else graph.to_dict()
    found, _ = declared(OnGraphs(), example)
    shapes = {slot.name: slot.shape for slot in (*found.inputs, *found.outputs)}
    assert shapes["u"][0] == shapes["output"][0] == found.by_name["batch"].index[0]


class Counts(nn.Module):
    def forward(self, edge_index, num_nodes):
        return torch.zeros(num_nodes, 1)


class Halves(nn.Module):
    def forward(self, x, edge_index):
        return x.bfloat16()


def test_what_no_request_or_answer_can_hold_is_told(declared):
    graph = {"x": torch.ones(5, 3), "edge_index": torch.zeros(2, 4).long(), "num_nodes": 5}
    with pytest.raises(
        ConfigError, match=r"'num_nodes', and that is no tensor in the example .int."
    ):
        declared(Counts(), graph)
    with pytest.raises(
        ConfigError, match=r"returned torch.bfloat16 as 'output'; outputs are float32"
    ):
        declared(Halves(), graph)


class Scores(NamedTuple):
    logits: torch.Tensor
    nothing: None
    embedding: torch.Tensor


class Named(nn.Module):
    def forward(self, x, edge_index):
        return Scores(x[:, :1], None, x)


def test_the_fields_of_a_named_tuple_name_outputs(declared):
    graph = Data(x=torch.ones(5, 3), edge_index=torch.zeros(2, 4).long()).to_dict()
    found, _ = declared(Named(), graph)
    assert [slot.name for slot in found.outputs] == ["logits", "embedding"]


class PooledPapers(nn.Module):
    def forward(self, x_dict, batch_dict):
        return global_add_pool(x_dict["paper"], batch_dict["paper"])


def test_each_kind_of_nodes_has_a_batch_of_its_own(declared):
    graph = HeteroData()
    graph["author"].x, graph["paper"].x = torch.ones(3, 2), torch.ones(4, 5)
    found, _ = declared(PooledPapers(), Batch.from_data_list([graph, graph]).to_dict())
    of_paper = found.by_name["x.paper"].shape[0]
    assert found.by_name["batch.paper"].shape == (of_paper,)
    assert found.by_name["batch.author"].shape == (found.by_name["x.author"].shape[0],)
    assert found.outputs[0].shape == (found.by_name["batch.paper"].index[0], 5)


class Relational(nn.Module):
    """Takes types of edges, and of nodes, that a request may leave out."""

    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(9, 3)

    def forward(self, x, edge_index, edge_type=None, node_type=None):
        return x if node_type is None else x + self.kinds(node_type)


def test_integers_that_may_be_left_out_have_ranges_too(declared):
    graph = Data(
        x=torch.ones(5, 3), edge_index=torch.zeros(2, 4).long(),
        edge_type=torch.tensor([0, 2, 1, 1]), node_type=torch.arange(5),
    ).to_dict()  # fmt: skip
    found, notes = declared(Relational(), graph)
    kinds = [found.by_name[name] for name in ("edge_type", "node_type")]
    assert [(slot.optional, slot.bounds) for slot in kinds] == [(True, (0, 3)), (True, (0, 9))]
    assert len(notes) == 1


class Sums(nn.Module):
    def forward(self, x_dict):
        return {kind: x.sum(1) for kind, x in x_dict.items()}


def test_more_tensors_than_a_request_holds_are_told(declared):
    graph = HeteroData()
    for number in range(17):
        graph[f"kind{number}"].x = torch.ones(3, 2)
    with pytest.raises(ConfigError, match=r"takes 17 of its tensors; a request holds at most 16"):
        declared(Sums(), graph)
