"""Requests with several types of nodes and edges answer as one as they do alone: any of them."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.graphs.random_inputs import declared_inputs
from serve.interface import InputSlot, Interface, TensorSlot
from serve.lane.models.declared import DeclaredForward, join, joined_sizes, split
from tests.server.kinds import POOLED, PooledKinds, declared_by


class Sums(torch.nn.Module):
    """Adds the sources' features to the targets', along every relation, and scores every edge."""

    def forward(self, x_dict, edge_index_dict, batch_dict):
        found = {name: x.clone() for name, x in x_dict.items()}
        scores = {}
        for (source, relation, target), (first, second) in edge_index_dict.items():
            found[target].index_add_(0, second, x_dict[source][first])
            scores[relation] = (x_dict[source][first] * x_dict[target][second]).sum(dim=1)
        pooled = {}
        for name, batch in batch_dict.items():
            graphs = int(batch.max()) + 1 if batch.numel() else 0
            pooled[f"g{name}"] = torch.zeros(graphs, 2).index_add(0, batch, found[name])
        return {**found, **scores, **pooled}


@st.composite
def interfaces(draw):
    """Up to three types, up to four relations between any of them, and batches of some."""
    kinds = [f"k{i}" for i in range(draw(st.integers(1, 3)))]
    ends = draw(st.lists(st.tuples(*[st.sampled_from(kinds)] * 2), min_size=1, max_size=4))
    pools = draw(st.sets(st.sampled_from(kinds)))
    inputs = [InputSlot(f"x.{k}", "FP32", (f"N.{k}", 2)) for k in kinds]
    outputs = [TensorSlot(k, "FP32", (f"N.{k}", 2)) for k in kinds]
    for i, (source, target) in enumerate(ends):
        index = (f"N.{source}", f"N.{target}")
        name = f"edge_index.{source}__r{i}__{target}"
        inputs.append(InputSlot(name, "INT64", (2, f"E.{i}"), index=index))
        outputs.append(TensorSlot(f"r{i}", "FP32", (f"E.{i}",)))
    for k in sorted(pools):
        batch = {"index": (f"G.{k}",), "optional": True, "default": 0.0}
        inputs.append(InputSlot(f"batch.{k}", "INT64", (f"N.{k}",), **batch))
        outputs.append(TensorSlot(f"g{k}", "FP32", (f"G.{k}", 2)))
    if not pools:
        inputs.append(InputSlot("batch.none", "INT64", ("N.k0",), optional=True))
    return Interface(tuple(inputs), tuple(outputs))


def graph(interface, rng):
    """Whole numbers, so that sums are exact in any order; some types may have no nodes."""
    counts = [int(rng.integers(0, 6)) for _ in interface.counts]
    sizes = dict(zip(interface.counts, counts, strict=True))
    for slot in interface.inputs:
        if slot.is_links and not all(sizes[symbol] for symbol in slot.row_bounds):
            sizes[slot.symbols[0]] = 0
    arrays = declared_inputs(
        interface,
        [sizes[symbol] for symbol in interface.counts],
        rng,
        graphs=lambda things: np.sort(rng.integers(0, max(1, things), things)),
    )
    for slot in interface.inputs:
        if slot.datatype == "FP32":
            arrays[slot.name] = rng.integers(-9, 9, arrays[slot.name].shape).astype(np.float32)
        if slot.name == "batch.none" or (slot.default is not None and rng.random() < 0.3):
            del arrays[slot.name]
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def assert_alike(declared, module, graphs):
    """Assert that the graphs merged give each what it gives alone, to the bit."""
    sizes = [declared.sizes(one) for one in graphs]
    joined = join(declared, graphs, sizes)
    assert joined_sizes(sizes) == declared.sizes(joined)
    found = split(declared.interface, declared(module, joined), sizes)
    for own, given_alone in zip(found, graphs, strict=True):
        for one, alone in zip(own, declared(module, given_alone), strict=True):
            assert torch.equal(one, alone)


@given(interfaces(), st.integers(0, 2**32), st.integers(2, 5))
@settings(max_examples=150, deadline=None)
def test_outputs_merged_equal_outputs_alone(interface, seed, count):
    assert interface.is_joinable
    rng = np.random.default_rng(seed)
    module = Sums()
    declared = DeclaredForward(module, interface, "sums:1")
    assert_alike(declared, module, [graph(interface, rng) for _ in range(count)])


def test_what_belongs_to_a_request_as_a_whole_has_no_place_in_a_union():
    x, y = InputSlot("x", "FP32", ("N", 2)), TensorSlot("y", "FP32", ("N", 2))
    assert Interface((x,), (y,)).is_joinable
    assert not Interface((x, InputSlot("u", "FP32", (1, 4))), (y,)).is_joinable
    assert not Interface((x,), (TensorSlot("pooled", "FP32", (1, 2)),)).is_joinable


@given(st.integers(0, 2**32), st.integers(2, 5))
@settings(max_examples=100, deadline=None)
def test_graphs_of_two_kinds_of_things_are_those_of_either(seed, count):
    rng = np.random.default_rng(seed)
    interface = declared_by(POOLED)
    module = PooledKinds()
    declared = DeclaredForward(module, interface, "pooled:1")
    graphs = []
    for _ in range(count):
        things = rng.integers(1, 6, 2)
        found = {}
        for kind, number in zip("ab", things, strict=True):
            found[f"x.{kind}"] = torch.from_numpy(rng.integers(-9, 9, (number, 2))).float()
            found[f"batch.{kind}"] = torch.from_numpy(rng.integers(0, things.max(), number))
        graphs.append(found)
    assert_alike(declared, module, graphs)


def test_an_output_of_graphs_may_have_a_row_for_each_thing_of_any_kind():
    interface = declared_by(POOLED)
    assert interface.counts == ("A", "B")
    assert interface.bytes_per(interface.outputs[:1]) == ((8.0, 8.0), 0.0)
    assert interface.sizes((3, 7))["G"] == 7
