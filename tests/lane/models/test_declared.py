"""How forward is called by declared inputs, what of its outputs is taken, joining and splitting."""

import pytest
import torch

from serve.errors import InvalidInput, ModelError
from serve.interface import InputSlot, Interface, TensorSlot
from serve.lane.models.declared import DeclaredForward, join, joined_sizes, split

X = InputSlot("x", "FP32", ("N", 2))
EDGES = InputSlot("edge_index", "INT64", (2, "E"), index=("N",))
Y = TensorSlot("y", "FP32", ("N", 2))


class Function(torch.nn.Module):
    """A module whose forward is the function."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


def run(function, inputs, outputs, **tensors):
    module = Function(function)
    forward = DeclaredForward(module, Interface(tuple(inputs), tuple(outputs)), "m:1")
    return forward(module, tensors)


ONES = torch.ones(3, 2)
LINKS = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])


def test_arguments_go_by_name_where_forward_has_them():
    def forward(edge_index, scale=3.0, x=None):
        assert edge_index is LINKS
        return scale * x

    (found,) = run(forward, [X, EDGES], [Y], x=ONES, edge_index=LINKS)
    assert torch.equal(found, 3 * ONES)


def test_and_by_position_otherwise():
    def forward(features, links):
        return features * (links is LINKS)

    (found,) = run(forward, [X, EDGES], [Y], x=ONES, edge_index=LINKS)
    assert torch.equal(found, ONES)


def test_forward_may_take_any_name():
    (found,) = run(lambda **given: given["x"], [X, EDGES], [Y], x=ONES, edge_index=LINKS)
    assert found is ONES


def test_or_any_number_of_arguments():
    (found,) = run(lambda *given: given[0], [X, EDGES], [Y], x=ONES, edge_index=LINKS)
    assert found is ONES


@pytest.mark.parametrize("name", ["x_dict", "x"])
def test_dotted_names_are_entries_of_a_dict(name):
    a = InputSlot("x.a", "FP32", ("N.a", 2))
    b = InputSlot("x.b", "FP32", ("N.b", 2))
    links = InputSlot("edge_index.a__to__b", "INT64", (2, "E"), index=("N.a", "N.b"))
    space = {}
    exec(
        f"def forward({name}, edge_index_dict):\n"
        "    assert list(edge_index_dict) == [('a', 'to', 'b')]\n"
        f"    return {{'b': {name}['b'], 'a': {name}['a'], 'c': None}}",
        space,
    )
    outputs = [TensorSlot("a", "FP32", ("N.a", 2)), TensorSlot("out.b", "FP32", ("N.b", 2))]
    tensors = {"x.a": torch.ones(3, 2), "x.b": torch.zeros(2, 2)}
    tensors["edge_index.a__to__b"] = LINKS[:, :1]
    found = run(space["forward"], [a, b, links], outputs, **tensors)
    assert torch.equal(found[0], tensors["x.a"])
    assert torch.equal(found[1], tensors["x.b"])


def test_numbers_are_places_in_a_tuple():
    source = InputSlot("x.0", "FP32", ("N.a", 2))
    target = InputSlot("x.1", "FP32", ("N.b", 2))
    links = InputSlot("edge_index", "INT64", (2, "E"), index=("N.a", "N.b"))
    tensors = {"x.0": torch.ones(3, 2), "x.1": torch.zeros(2, 2), "edge_index": LINKS[:, :1]}
    slots, outputs = [target, source, links], [TensorSlot("y", "FP32", ("N.b", 2))]

    def second(x, edge_index):
        assert type(x) is tuple
        assert x[0] is tensors["x.0"]
        return x[1]

    for forward in (second, lambda *given: second(*given), lambda **given: second(**given)):
        (found,) = run(forward, slots, outputs, **tensors)
        assert found is tensors["x.1"]


def test_and_they_may_stand_in_a_dict():
    names = ("xs.a.1", "xs.a.0", "xs.b.0")
    slots = [InputSlot(name, "FP32", (f"N.{name[3]}", 2)) for name in names]
    tensors = {name: torch.full((3, 2), float(i)) for i, name in enumerate(names)}

    def forward(xs_dict):
        assert {key: len(xs) for key, xs in xs_dict.items()} == {"a": 2, "b": 1}
        return xs_dict["a"][0]

    (found,) = run(forward, slots, [TensorSlot("y", "FP32", ("N.a", 2))], **tensors)
    assert found is tensors["xs.a.0"]


def test_outputs_that_are_left_out_do_not_count():
    (found,) = run(lambda x, edge_index: (x, None), [X, EDGES], [Y], x=ONES, edge_index=LINKS)
    assert found is ONES


def test_outputs_may_be_nested():
    def forward(x, edge_index):
        return x, (edge_index, edge_index[0])

    outputs = [Y, TensorSlot("i", "INT64", (2, "E")), TensorSlot("s", "INT64", ("E",))]
    found = run(forward, [X, EDGES], outputs, x=ONES, edge_index=LINKS)
    assert [tuple(tensor.shape) for tensor in found] == [(3, 2), (2, 4), (4,)]


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (lambda x, edge_index: x.double(), r"output 'y' is float64 \[3, 2\]; declared is float32"),
        (lambda x, edge_index: x[:2], r"is float32 \[2, 2\]; .* \[N, 2\], here \[3, 2\]"),
        (lambda x, edge_index: (x, x), "returned 2 tensors; declared are y"),
        (lambda x, edge_index: {"z": x}, "returned 0 tensors; declared are y"),
        (lambda x, edge_index: "x", "returned a str"),
        (lambda x, edge_index: None, "returned a NoneType"),
        (lambda x, edge_index: x.to_sparse(), r"not dense \(torch.sparse_coo\)"),
    ],
)
def test_outputs_that_are_not_as_declared_are_errors(forward, told):
    with pytest.raises(ModelError, match=told):
        run(forward, [X, EDGES], [Y], x=ONES, edge_index=LINKS)


def test_a_forward_that_cannot_take_the_inputs_is_an_error():
    with pytest.raises(ModelError, match="forward takes x, but the declared inputs are x, edge"):
        run(lambda x: x, [X, EDGES], [Y], x=ONES, edge_index=LINKS)


def test_what_is_left_out_is_its_default_or_none():
    weight = InputSlot("w", "FP32", ("E",), optional=True, default=2.0)
    state = InputSlot("h", "FP32", ("N", 2), optional=True)

    def forward(x, edge_index, w, h):
        assert h is None
        return x * w.sum()

    (found,) = run(forward, [X, EDGES, weight, state], [Y], x=ONES, edge_index=LINKS)
    assert torch.equal(found, 8 * ONES)


def test_a_missing_input_is_refused():
    with pytest.raises(InvalidInput, match="needs the tensor 'edge_index'"):
        run(lambda x, edge_index: x, [X, EDGES], [Y], x=ONES)


def test_graphs_are_joined_and_split_again():
    batch = InputSlot("batch", "INT64", ("N",), index=("G",), optional=True, default=0.0)
    pair = InputSlot("pair", "INT64", (2, "E"), index=("G", "N"))
    pooled = TensorSlot("pooled", "FP32", ("G", 2))
    interface = Interface((X, EDGES, batch), (Y, pooled, TensorSlot("e", "FP32", ("E",))))
    assert pair.row_bounds == ("G", "N")

    def forward(x, edge_index, batch):
        rows = torch.zeros(int(batch.max()) + 1, 2).index_add(0, batch, x)
        return x, rows, x[edge_index[1], 0]

    module = Function(forward)
    declared = DeclaredForward(module, interface, "m:1")
    torch.manual_seed(0)
    graphs = [
        {"x": torch.randn(3, 2), "edge_index": LINKS, "batch": torch.tensor([0, 1, 1])},
        {"x": torch.randn(5, 2), "edge_index": LINKS[:, :2]},
        {"x": torch.randn(4, 2), "edge_index": LINKS, "batch": torch.tensor([0, 0, 1, 2])},
    ]
    sizes = [declared.sizes(graph) for graph in graphs]
    joined = join(declared, graphs, sizes)
    assert joined_sizes(sizes) == declared.sizes(joined) == {"N": 12, "E": 10, "G": 6}
    assert joined["edge_index"][:, 4:6].tolist() == [[3, 4], [4, 5]]
    assert joined["batch"].tolist() == [0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 4, 5]
    found = split(interface, declared(module, joined), sizes)
    for own, graph in zip(found, graphs, strict=True):
        for one, alone in zip(own, declared(module, graph), strict=True):
            torch.testing.assert_close(one, alone)


def test_an_input_that_only_some_have_cannot_be_joined():
    state = InputSlot("h", "FP32", ("N", 2), optional=True)
    module = Function(lambda x, h: x)
    declared = DeclaredForward(module, Interface((X, state), (Y,)), "m:1")
    graphs = [{"x": ONES, "h": ONES}, {"x": ONES}]
    with pytest.raises(ValueError, match="'h' cannot be joined"):
        join(declared, graphs, [declared.sizes(graph) for graph in graphs])
